"""One entry for every data set: ``load_corpus``."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from ..errors import UserError
from . import instructions, sources, text
from .corpus import Corpus, order_hash
from .spec import DataSpec


def load_corpus(
    data_cfg: Any, *, tokenizer: Any = None, max_length: int | None = None, seed: int | None = None
) -> Corpus:
    """Choose, tokenize and order one data set; embedded, local and hub sets differ in how their rows are read only.

    Args:
        data_cfg: a :class:`DataSpec`, or anything with its fields (a config node).
        tokenizer: a transformers tokenizer with an end token; ``None`` for the embedded one of this kind of data.
        max_length: overrides ``data_cfg.max_length``.
        seed: the run's seed. Which examples are train and held-out depends on ``data_cfg.seed`` only; a run seed that
            differs from it reorders the training examples, one that equals it keeps the shuffle's own order (the
            paper's).

    Raises:
        UserError: bad rows (file and line), data that is missing or too small, a tokenizer without an end token.
    """
    spec = DataSpec.of(data_cfg)
    if max_length is not None:
        spec = DataSpec.of(replace(spec, max_length=max_length))
    if tokenizer is None:
        from .tokenizer import load_tokenizer

        tokenizer = load_tokenizer(spec.kind)
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {name}: has no end token (eos_token), which responses and documents are closed with"
        )
    build = _instructions if spec.kind == "instructions" else _text
    train, heldout, counts = build(spec, tokenizer, seed)
    if not len(train):
        raise UserError(
            f"data.max_length={spec.max_length}: no training example of {spec.train_examples} keeps a supervised "
            "token: raise data.max_length"
        )
    pad = tokenizer.pad_token_id
    return Corpus(
        name=spec.name,
        tokenizer_name=name,
        train=train,
        heldout=heldout,
        counts=counts,
        sha256=order_hash(train),
        pad_id=tokenizer.eos_token_id if pad is None else pad,
        eos_id=tokenizer.eos_token_id,
        vocab_size=len(tokenizer),
        max_length=spec.max_length,
        source=_provenance(spec),
    )


def _provenance(spec: DataSpec) -> dict[str, Any]:
    facts = {"kind": spec.kind, "source": spec.source, "shuffle_seed": spec.seed}
    if spec.source == "hub":
        facts |= {"hub_id": spec.hub_id, "revision": spec.revision, "subset": spec.subset}
    if spec.kind == "instructions":
        facts |= {"prompt": spec.prompt, "heldout_range": list(spec.heldout_range)}
    return facts


def _instructions(spec: DataSpec, tokenizer: Any, seed: int | None):
    rows = sources.instruction_rows(spec)
    train_indices, heldout_indices = instructions.choose(spec, len(rows))
    train_indices = instructions.reorder(train_indices, spec, seed)
    train, train_counts = instructions.encode_rows(rows, train_indices, tokenizer, spec.max_length)
    heldout, heldout_counts = instructions.encode_rows(rows, heldout_indices, tokenizer, spec.max_length)
    return train, heldout, {"train": train_counts, "heldout": heldout_counts}


def _text(spec: DataSpec, tokenizer: Any, seed: int | None):
    length = spec.max_length
    order_seed = None if seed is None or seed == spec.seed else seed
    if spec.source == "hub":
        open_documents = sources.stream_documents(spec)
        documents = open_documents()
        heldout, used = text.take_heldout(documents, tokenizer, length, spec.heldout_count)
        train = text.StreamedSequences(
            documents, lambda: islice(open_documents(), used, None), tokenizer, length, spec.train_examples, order_seed
        )
    else:
        documents = sources.local_documents(spec)
        train, heldout = text.split_local(
            documents, tokenizer, length, spec.heldout_count, spec.train_examples, spec.seed, order_seed
        )
    wanted = {"train": spec.train_examples or len(train), "heldout": spec.heldout_count}
    used_counts = {"train": len(train), "heldout": len(heldout)}
    counts = {s: {"requested": wanted[s], "used": used_counts[s], "truncated": 0, "dropped": {}} for s in wanted}
    return train, heldout, counts
