"""Data: the sets that ship, the hub's and the user's own, their tokenizers, batches and the order hash.

What a data set is stands in :class:`sonar_repro.config.schema.DataConfig`. The names below are resolved on first use
(PEP 562): a config can be checked without importing torch or transformers.
"""

from __future__ import annotations

import importlib

_EXPORTS = {
    "Batch": "batching",
    "BatchStream": "batching",
    "collate": "batching",
    "sequential_batches": "batching",
    "Corpus": "corpus",
    "Example": "corpus",
    "order_hash": "corpus",
    "load_corpus": "load",
    "check_available": "sources",
    "fetch_dataset": "sources",
    "load_tokenizer": "tokenizer",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
