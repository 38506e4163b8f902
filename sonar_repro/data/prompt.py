"""The Stanford Alpaca prompt, character for character, and what is supervised behind it."""

from __future__ import annotations

from collections.abc import Mapping

# Source: PROMPT_DICT in train.py of the Stanford Alpaca repository. No newline follows "### Response:": the response
# comes next.
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ALPACA_NO_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
# The parts of the two prompts that never change; the smoke tokenizer knows each as one token (as chat formats do).
FIXED_PARTS = tuple(
    dict.fromkeys(
        part
        for template in (ALPACA_WITH_INPUT, ALPACA_NO_INPUT)
        for part in template.replace("{instruction}", "\0").replace("{input}", "\0").split("\0")
    )
)


def alpaca_prompt(row: Mapping[str, str]) -> str:
    """The prompt of one row; without input where ``input`` is missing or empty, as Stanford's code does."""
    # str.replace in turn would expand "{input}" inside an instruction; concatenation cannot.
    template = ALPACA_WITH_INPUT if row.get("input") else ALPACA_NO_INPUT
    head, _, rest = template.partition("{instruction}")
    middle, _, tail = rest.partition("{input}")
    return head + row["instruction"] + middle + (row["input"] + tail if row.get("input") else "")
