"""Instruction rows to training examples: choose, format, tokenize, mask, cut, drop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..config.schema import DataConfig
from .checks import require_rows
from .corpus import IGNORE, SHUFFLE_SEED, Example
from .prompt import alpaca_prompt

PROMPT_TOO_LONG = "prompt_too_long"


def shuffled_indices(n: int, seed: int) -> list[int]:
    """The order of ``datasets.Dataset.shuffle(seed)`` on ``n`` rows, without the second that importing it takes."""
    import numpy

    return numpy.random.default_rng(seed).permutation(n).tolist()


def choose(data: DataConfig, available: int) -> tuple[list[int], list[int]]:
    """Row indices for training and held-out, both in shuffled order and disjoint, before any example is looked at.

    Raises:
        UserError: the data set is too small for the selection.
    """
    require_rows(data, available)
    order = shuffled_indices(available, SHUFFLE_SEED)
    start, stop = data.heldout_range
    return order[: data.train_examples], order[start:stop]


def reorder(indices: list[int], run_seed: int | None) -> list[int]:
    """The training order of a run: the split's own for the split's own seed (the paper's), else a shuffle of it."""
    if run_seed is None or run_seed == SHUFFLE_SEED:
        return indices
    return [indices[i] for i in shuffled_indices(len(indices), run_seed)]


def mask_example(
    index: int, prompt: Sequence[int], response: Sequence[int], eos_id: int, max_length: int
) -> Example | None:
    """Prompt, response and end token in one sequence, cut at ``max_length``; labels are the response and the end token.

    Which tokens are supervised follows from positions alone: an end or pad token inside the response stays
    supervised, one in the prompt does not. Returns ``None`` when the prompt leaves no supervised token (trl#6320).
    """
    ids = [*prompt, *response, eos_id][:max_length]
    labels = ([IGNORE] * len(prompt) + ids[len(prompt) :])[:max_length]
    example = Example(index, ids, labels)
    return example if example.supervised_tokens else None


def _bos(tokenizer: Any) -> list[int]:
    """The start token, if this tokenizer opens every sequence with it (OLMoE's and Granite's do not)."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def encode_rows(
    rows: Sequence[Mapping[str, str]], indices: Iterable[int], tokenizer: Any, max_length: int
) -> tuple[list[Example], dict[str, Any]]:
    """Tokenize the chosen rows, prompt and response apart, so that no merge can cross the supervision boundary.

    Args:
        tokenizer: a transformers tokenizer with an end token.

    Returns:
        The usable examples in order, and their counts: requested, used, truncated, dropped by reason.
    """
    indices = list(indices)
    eos, bos = tokenizer.eos_token_id, _bos(tokenizer)
    texts = [alpaca_prompt(rows[i]) for i in indices] + [rows[i]["output"] for i in indices]
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"] if texts else []
    prompts, responses = ids[: len(indices)], ids[len(indices) :]
    examples, truncated, dropped = [], 0, 0
    for index, prompt, response in zip(indices, prompts, responses):
        example = mask_example(index, bos + prompt, response, eos, max_length)
        if example is None:
            dropped += 1
            continue
        truncated += len(bos) + len(prompt) + len(response) + 1 > max_length
        examples.append(example)
    counts = {
        "requested": len(indices),
        "used": len(examples),
        "truncated": truncated,
        "dropped": {PROMPT_TOO_LONG: dropped},
    }
    return examples, counts
