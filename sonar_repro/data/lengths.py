"""Sequence lengths like Alpaca's, for forecasts of unfilled batches and for benchmarks that need no data."""

from __future__ import annotations

import random

from ..errors import UserError

# Quantiles 0, 1/40, ..., 1 of the uncut sequence length (Stanford prompt + response + end token) over the first 1,805
# rows of Stanford Alpaca in their original order, counted with OLMo's GPT-NeoX tokenizer. Rows are a sample of the
# 52,002, not all of them. Cut at 256 the sample has a mean of 105.5 tokens, 52.5 of them supervised (so 105 a step at
# batch 2, where the paper prints 111 over its 4,000 examples) and 2.3% of it is cut.
ALPACA_LENGTH_QUANTILES = (
    *(36, 47, 52, 56, 58, 60, 63, 64, 66, 68, 69, 71, 72, 74, 76, 78, 80, 82, 85, 88, 91),
    *(95, 99, 103, 107, 111, 115, 119, 123, 126, 131, 136, 141, 147, 153, 162, 172, 185, 201, 243, 476),
)


def alpaca_like_lengths(n: int, seed: int, max_length: int = 256) -> list[int]:
    """Draw ``n`` sequence lengths in tokens, each in ``[36, max_length]``, with Alpaca's distribution.

    Inverse-transform sampling from :data:`ALPACA_LENGTH_QUANTILES`, linear between them; longer draws are cut, as the
    data path does. The same ``seed`` gives the same lengths on every Python version (``random.Random.random`` is
    stable by contract).

    Raises:
        UserError: negative ``n``, or ``max_length`` under 1.
    """
    if n < 0 or max_length < 1:
        raise UserError(
            f"alpaca_like_lengths(n={n}, max_length={max_length}): n must be 0 or more and max_length at least 1"
        )
    uniform = random.Random(seed).random
    steps = len(ALPACA_LENGTH_QUANTILES) - 1
    lengths = []
    for _ in range(n):
        position = uniform() * steps
        low = int(position)
        left, right = ALPACA_LENGTH_QUANTILES[low], ALPACA_LENGTH_QUANTILES[low + 1]
        lengths.append(min(max_length, round(left + (position - low) * (right - left))))
    return lengths


def batch_lengths(batches: int, batch_size: int, seed: int, max_length: int) -> list[int]:
    """Tokens a sequence of each of ``batches`` padded batches: the longest of ``batch_size`` Alpaca-like draws."""
    drawn = alpaca_like_lengths(batches * batch_size, seed, max_length)
    return [max(drawn[first : first + batch_size]) for first in range(0, len(drawn), batch_size)]
