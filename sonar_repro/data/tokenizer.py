"""The two smoke-scale tokenizers that ship: byte-level BPE of 2,048 entries, trained on the embedded sets."""

from __future__ import annotations

from typing import Any

from ..errors import UserError
from .frozen import TOKENIZERS, frozen_file

EOS, PAD = "<|endoftext|>", "<|padding|>"  # ids 0 and 1
NAMES = {"instructions": "embedded_bpe_2048", "text": "embedded_text_bpe_2048"}


def load_tokenizer(kind: str = "instructions") -> Any:
    """The embedded tokenizer for ``instructions`` or ``text`` as a transformers ``PreTrainedTokenizerFast``.

    It has an end and a pad token and no start token, as OLMoE's and Granite's.

    Raises:
        UserError: no such kind, or its file is missing or changed.
    """
    if kind not in TOKENIZERS:
        raise UserError(f"embedded tokenizer {kind!r}: choose one of {', '.join(TOKENIZERS)}")
    from transformers import PreTrainedTokenizerFast

    path = str(frozen_file(TOKENIZERS[kind]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=path, eos_token=EOS, pad_token=PAD, padding_side="right")
    tokenizer.name_or_path = NAMES[kind]
    return tokenizer
