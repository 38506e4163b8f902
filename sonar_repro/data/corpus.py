"""What every data set becomes: ordered training and held-out examples, their counts, and the hash of their order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

IGNORE = -100  # the label that torch's cross-entropy leaves out
HASHED_EXAMPLES = 256
# Shuffles before the split, so that every arm and every run seed sees the same training and held-out examples: the
# papers' seed. The order within training follows the run's seed.
SHUFFLE_SEED = 42


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence. ``index`` is its row in the unshuffled data set (text: its number in the packed split).

    ``input_ids`` and ``labels`` have one length T; a label is the token at the same position, or -100 where not
    supervised.
    """

    index: int
    input_ids: list[int]
    labels: list[int]

    @property
    def supervised_tokens(self) -> int:
        """Labels that a causal model is scored on: the shift drops the first position."""
        return sum(label != IGNORE for label in self.labels[1:])


def order_hash(examples: Iterable[Example], first: int = HASHED_EXAMPLES) -> str:
    """sha256 over dataset index, length and token ids of the first ``first`` training examples, in their order.

    Batching, padding and accumulation do not enter, so arms with different batch sizes agree when their data agrees.

    Returns:
        64 hex digits. Integers are hashed as 8-byte little-endian.
    """
    digest = hashlib.sha256()
    for example in islice(examples, first):
        numbers = (example.index, len(example.input_ids), *example.input_ids)
        digest.update(b"".join(number.to_bytes(8, "little") for number in numbers))
    return digest.hexdigest()


@dataclass
class Corpus:
    """A tokenized data set, ready for batching.

    ``train`` and ``heldout`` are in the order in which they are visited; ``train`` may be a lazy sequence (a streamed
    set) that is read once, in order. ``counts[split]`` has ``requested``, ``used``, ``truncated`` and ``dropped``
    (reason -> number).
    """

    name: str
    tokenizer_name: str
    train: Sequence[Example]
    heldout: Sequence[Example]
    counts: dict[str, dict[str, Any]]
    sha256: str
    pad_id: int
    eos_id: int
    vocab_size: int
    max_length: int
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def dropped(self) -> dict[str, int]:
        """Unusable examples by reason, both splits together."""
        total: dict[str, int] = {}
        for split in self.counts.values():
            for reason, number in split["dropped"].items():
                total[reason] = total.get(reason, 0) + number
        return total

    def describe(self) -> dict[str, Any]:
        """The record's ``data`` entry, JSON types only; null is what the training task knows (steps and batches)."""
        train, heldout = self.counts["train"], self.counts["heldout"]
        return {
            "name": self.name,
            "tokenizer": self.tokenizer_name,
            "source": dict(self.source),
            "requested_train": train["requested"],
            "used_train": train["used"],
            "requested_heldout": heldout["requested"],
            "used_heldout": heldout["used"],
            "dropped": self.dropped,
            "truncated": train["truncated"] + heldout["truncated"],
            "sha256": self.sha256,
            "sha256_examples": min(HASHED_EXAMPLES, train["used"]),
            "supervised_tokens_per_step": None,
            "max_length": self.max_length,
            "batch_shape": None,
        }

    def epochs(self, examples: int) -> float:
        """Passes over the training set that deliver ``examples`` of them; over 1, the same order comes again."""
        return examples / len(self.train)
