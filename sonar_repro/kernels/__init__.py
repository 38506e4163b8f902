"""Expert kernels behind transformers' ExpertsInterface: one registry line a backend."""

from .registry import BACKENDS, Backend, require, status

__all__ = ["BACKENDS", "Backend", "require", "status"]
