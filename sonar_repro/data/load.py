"""One entry for every data set: ``load_corpus``."""

from __future__ import annotations

from itertools import islice
from typing import Any

from ..config.schema import DataConfig
from ..errors import UserError
from . import instructions, sources, text
from .checks import check_data
from .corpus import SHUFFLE_SEED, Corpus, order_hash


def load_corpus(data: DataConfig, *, tokenizer: Any = None, seed: int | None = None) -> Corpus:
    """Choose, tokenize and order one data set; embedded, local and hub sets differ in how their rows are read only.

    Args:
        tokenizer: a transformers tokenizer with an end token; ``None`` for the embedded one of this kind of data.
        seed: the run's seed. It does not choose which examples are train and held-out: a seed other than
            :data:`SHUFFLE_SEED` reorders the training examples, that one keeps the shuffle's own order (the paper's).

    Raises:
        UserError: bad rows (file and line), data that is missing or too small, a tokenizer without an end token.
    """
    check_data(data)
    if data.source == "synthetic":
        raise UserError("data.source=synthetic: a forecast's, with nothing to train on; choose embedded, hub or path")
    if tokenizer is None:
        from .tokenizer import load_tokenizer

        tokenizer = load_tokenizer(data.kind)
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {name}: has no end token (eos_token), which responses and documents are closed with"
        )
    build = _instructions if data.kind == "instructions" else _text
    train, heldout, counts = build(data, tokenizer, seed)
    if not len(train):
        raise UserError(
            f"data.max_length={data.max_length}: no training example of {data.train_examples} keeps a supervised "
            "token: raise data.max_length"
        )
    pad = tokenizer.pad_token_id
    return Corpus(
        name=data.name,
        tokenizer_name=name,
        train=train,
        heldout=heldout,
        counts=counts,
        sha256=order_hash(train),
        pad_id=tokenizer.eos_token_id if pad is None else pad,
        eos_id=tokenizer.eos_token_id,
        vocab_size=len(tokenizer),
        max_length=data.max_length,
        source=_provenance(data),
    )


def _provenance(data: DataConfig) -> dict[str, Any]:
    facts = {"kind": data.kind, "source": data.source, "shuffle_seed": SHUFFLE_SEED}
    if data.source == "hub":
        facts |= {"hub_id": data.hub_id, "revision": data.revision, "subset": data.subset}
    if data.kind == "instructions":
        facts |= {"prompt": "alpaca", "heldout_range": list(data.heldout_range)}
    return facts


def _instructions(data: DataConfig, tokenizer: Any, seed: int | None):
    rows = sources.instruction_rows(data)
    train_indices, heldout_indices = instructions.choose(data, len(rows))
    train_indices = instructions.reorder(train_indices, seed)
    train, train_counts = instructions.encode_rows(rows, train_indices, tokenizer, data.max_length)
    heldout, heldout_counts = instructions.encode_rows(rows, heldout_indices, tokenizer, data.max_length)
    return train, heldout, {"train": train_counts, "heldout": heldout_counts}


def _text(data: DataConfig, tokenizer: Any, seed: int | None):
    length = data.max_length
    order_seed = None if seed is None or seed == SHUFFLE_SEED else seed
    if data.source == "hub":
        open_documents = sources.stream_documents(data)
        documents = open_documents()
        heldout, used = text.take_heldout(documents, tokenizer, length, data.heldout_count)
        train = text.StreamedSequences(
            documents, lambda: islice(open_documents(), used, None), tokenizer, length, data.train_examples, order_seed
        )
    else:
        documents = sources.local_documents(data)
        train, heldout = text.split_local(
            documents, tokenizer, length, data.heldout_count, data.train_examples, SHUFFLE_SEED, order_seed
        )
    wanted = {"train": data.train_examples or len(train), "heldout": data.heldout_count}
    used_counts = {"train": len(train), "heldout": len(heldout)}
    counts = {s: {"requested": wanted[s], "used": used_counts[s], "truncated": 0, "dropped": {}} for s in wanted}
    return train, heldout, counts
