"""Text for pre-training: documents joined by the end token, packed to one length, held-out documents apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from ..errors import UserError
from .corpus import Example
from .instructions import shuffled_indices

BLOCK = 1024  # sequences that a stream holds at a time; another run seed reorders within a block
_AT_ONCE = 64  # documents tokenized together (the fast tokenizers use all cores on a list)


def packed(documents: Iterator[str], tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Token ids of the documents, each followed by the end token, cut into consecutive pieces of exactly ``length``.

    Empty documents are skipped; a last piece that is too short is left out. Memory is bounded by 64 documents.
    """
    eos, pending = tokenizer.eos_token_id, []
    documents = iter(documents)
    while chunk := [text for text in islice(documents, _AT_ONCE)]:
        texts = [text for text in chunk if text]
        for ids in (
            tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"] if texts else []
        ):
            pending += [*ids, eos]
        whole = len(pending) - len(pending) % length
        for start in range(0, whole, length):
            yield pending[start : start + length]
        del pending[:whole]


def text_example(index: int, ids: list[int]) -> Example:
    """A packed sequence: every token is a label."""
    return Example(index, ids, list(ids))


def take_heldout(documents: Iterator[str], tokenizer: Any, length: int, count: int) -> tuple[list[Example], int]:
    """The first ``count`` packed sequences, and how many documents they used. No document is shared with
    training: what is left of the last one is dropped.

    Raises:
        UserError: the text is too short.
    """
    ids: list[int] = []
    used = 0
    while len(ids) < count * length:
        text = next(documents, None)
        if text is None:
            raise UserError(
                f"data.heldout_count={count} sequences of {length} tokens need {count * length} tokens, the text has "
                f"{len(ids)}: lower data.heldout_count or data.max_length"
            )
        used += 1
        if text:
            ids += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return [text_example(i, ids[i * length : (i + 1) * length]) for i in range(count)], used


class StreamedSequences(Sequence[Example]):
    """The first ``count`` packed sequences of a document stream as a sequence that holds one block of 1,024.

    Made for reading in order. Reading on skips forward; reading back before the current block opens the stream
    anew (resume at step k re-tokenizes what came before it).

    Args:
        documents: the training documents, open at the first.
        reopen: opens the same documents at the first again.
        order_seed: reorders within each block; ``None`` keeps the stream's order.

    Raises:
        UserError: on reading past the stream's end.
    """

    def __init__(
        self,
        documents: Iterator[str],
        reopen: Callable[[], Iterator[str]],
        tokenizer: Any,
        length: int,
        count: int,
        order_seed: int | None = None,
    ) -> None:
        self._reopen, self._tokenizer, self._length = reopen, tokenizer, length
        self._count, self._order_seed = count, order_seed
        self._stream = packed(documents, tokenizer, length)
        self._block, self._held, self._order = -1, [], []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._count:
            raise IndexError(index)
        block, offset = divmod(index, BLOCK)
        if block < self._block:
            self._stream, self._block = packed(self._reopen(), self._tokenizer, self._length), -1
        while self._block < block:
            self._read_block()
        offset = self._order[offset]
        return text_example(block * BLOCK + offset, self._held[offset].tolist())

    def _read_block(self) -> None:
        import numpy

        block = self._block + 1
        wanted = min(BLOCK, self._count - block * BLOCK)
        held = [numpy.asarray(ids, dtype=numpy.int32) for ids in islice(self._stream, wanted)]
        if len(held) < wanted:
            there = block * BLOCK + len(held)
            raise UserError(
                f"data.train_examples={self._count}: the stream ended after {there} sequences of {self._length} tokens"
            )
        self._block, self._held, self._order = block, held, list(range(wanted))
        if self._order_seed is not None:
            self._order = numpy.random.default_rng([self._order_seed, block]).permutation(wanted).tolist()


def split_local(
    documents: list[str],
    tokenizer: Any,
    length: int,
    heldout: int,
    train: int | None,
    seed: int,
    order_seed: int | None,
) -> tuple[list[Example], list[Example]]:
    """Shuffle documents by ``seed``, take held-out from the front and pack the rest for training.

    Returns:
        ``(train, heldout)``; ``order_seed`` reorders the training sequences, ``None`` keeps the packed order.

    Raises:
        UserError: the text is too short for what is asked.
    """
    stream = iter([documents[i] for i in shuffled_indices(len(documents), seed)])
    held, _ = take_heldout(stream, tokenizer, length, heldout)
    sequences = [text_example(i, ids) for i, ids in enumerate(islice(packed(stream, tokenizer, length), train))]
    if not sequences or (train is not None and len(sequences) < train):
        raise UserError(
            f"data.train_examples={train}: after {heldout} held-out sequences the text fills "
            f"{len(sequences)} of {length} tokens: lower data.train_examples, data.heldout_count or data.max_length"
        )
    if order_seed is not None:
        sequences = [sequences[i] for i in shuffled_indices(len(sequences), order_seed)]
    return sequences, held
