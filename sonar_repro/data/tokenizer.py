"""The two smoke-scale tokenizers: byte-level BPE, trained on the embedded sets, no download, 2,048 entries each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from ..errors import UserError
from .prompt import FIXED_PARTS
from .sources import embedded_path

VOCAB_SIZE = 2048
EOS, PAD = "<|endoftext|>", "<|padding|>"
FILES = {"instructions": "instructions_bpe_2048.json", "text": "text_bpe_2048.json"}
NAMES = {"instructions": "embedded_bpe_2048", "text": "embedded_text_bpe_2048"}


def train_tokenizer(texts: Iterable[str], fixed: Iterable[str] = ()) -> Tokenizer:
    """Train a byte-level BPE of :data:`VOCAB_SIZE` entries in all; the same texts give the same result each time.

    Args:
        fixed: strings that become one token each, as a chat format's markers do: the constant parts of the prompt.
            They count towards the vocabulary, and take their places from the merges.

    Returns:
        A ``tokenizers.Tokenizer``; ids 0 and 1 are the end and pad tokens.
    """
    fixed = [AddedToken(part, normalized=False, special=False) for part in fixed]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(fixed),
        special_tokens=[EOS, PAD],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(fixed)
    return tokenizer


def train_instruction_tokenizer(rows: Iterable[dict[str, str]]) -> Tokenizer:
    """The tokenizer of the embedded instructions: BPE over their fields, each constant part of the prompt one token."""
    texts = [row[field] for row in rows for field in ("instruction", "input", "output") if row[field]]
    return train_tokenizer(texts, FIXED_PARTS)


def load_tokenizer(kind: str = "instructions") -> Any:
    """The embedded tokenizer for ``instructions`` or ``text`` as a transformers ``PreTrainedTokenizerFast``.

    It has an end and a pad token and no start token, as OLMoE's and Granite's.

    Raises:
        UserError: no such kind.
    """
    if kind not in FILES:
        raise UserError(f"embedded tokenizer {kind!r}: choose one of {', '.join(FILES)}")
    from transformers import PreTrainedTokenizerFast

    path = str(embedded_path(FILES[kind]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=path, eos_token=EOS, pad_token=PAD, padding_side="right")
    tokenizer.name_or_path = NAMES[kind]
    return tokenizer
