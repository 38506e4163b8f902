"""Data room: instruction and text corpora, their tokenizers, collation and the order hash.

``sonar_repro.data.spec`` imports neither torch nor transformers, so that configs can be composed without them; the
names below are resolved on first use (PEP 562).
"""

from __future__ import annotations

import importlib

_EXPORTS = {
    "DataSpec": "sonar_repro.data.spec",
    "Example": "sonar_repro.data.corpus",
    "Corpus": "sonar_repro.data.corpus",
    "order_hash": "sonar_repro.data.corpus",
    "Batch": "sonar_repro.data.batching",
    "BatchStream": "sonar_repro.data.batching",
    "batches": "sonar_repro.data.batching",
    "collate": "sonar_repro.data.batching",
    "filled_batch": "sonar_repro.data.batching",
    "sequential_batches": "sonar_repro.data.batching",
    "load_corpus": "sonar_repro.data.load",
    "check_available": "sonar_repro.data.sources",
    "fetch_dataset": "sonar_repro.data.sources",
    "load_tokenizer": "sonar_repro.data.tokenizer",
    "alpaca_like_lengths": "sonar_repro.data.lengths",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'sonar_repro.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
