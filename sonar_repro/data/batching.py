"""Collation and iteration: right padding, masks by position, a fixed order that resumes at an integer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from .corpus import IGNORE, Example


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the CPU: ``input_ids``, ``attention_mask`` and ``labels`` are int64 ``[B, T]``.

    ``tokens`` counts real (unpadded) positions and ``supervised_tokens`` the targets that the loss averages over,
    that is labels other than -100 after the causal shift. Both are plain integers known before the forward pass: a
    batch with ``supervised_tokens == 0`` has a NaN loss (pytorch#70348) and is to be skipped on the host.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    tokens: int
    supervised_tokens: int

    def model_inputs(self, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Keyword arguments of a transformers causal LM, moved to ``device``."""
        tensors = {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "labels": self.labels}
        return tensors if device is None else {name: tensor.to(device) for name, tensor in tensors.items()}


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    """Pad to the longest example, on the right.

    Padding is masked by position. ``pad_id`` may equal the end token (Granite): a real end token keeps its mask and
    its label.
    """
    longest = max(len(example.input_ids) for example in examples)
    gaps = [longest - len(example.input_ids) for example in examples]
    ids = [example.input_ids + [pad_id] * gap for example, gap in zip(examples, gaps)]
    mask = [[1] * (longest - gap) + [0] * gap for gap in gaps]
    labels = [example.labels + [IGNORE] * gap for example, gap in zip(examples, gaps)]
    return Batch(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(mask, dtype=torch.int64),
        torch.tensor(labels, dtype=torch.int64),
        tokens=longest * len(examples) - sum(gaps),
        supervised_tokens=sum(example.supervised_tokens for example in examples),
    )


class BatchStream(Iterator[Batch]):
    """Infinite micro-batches over a sequence of examples, in their order, the same order again at each pass.

    Micro-batch ``p`` holds examples ``p*W*B + rank*B`` to ``+ B`` (modulo the number of examples), with B the batch
    size and W the number of processes: the processes together read exactly what one process with batches of W*B
    reads. No example is left out at the end of a pass: a batch that crosses the end goes on with the first examples.
    Nothing is reshuffled between passes.

    Args:
        start: first micro-batch number. ``position`` is the number of the next one: save it, and pass it as ``start``
            to resume.

    Raises:
        UserError: no examples, a batch size under 1, or more examples a batch than there are.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        pad_id: int,
        *,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size}: must be at least 1")
        if not len(examples):
            raise UserError(
                "no usable training example is left: see the dropped counts; raise data.max_length or take other data"
            )
        if batch_size * world_size > len(examples):
            raise UserError(
                f"batch_size={batch_size} on {world_size} process(es) is more than the {len(examples)} usable training "
                "examples: raise data.train_examples or lower batch_size"
            )
        if start < 0 or not 0 <= rank < world_size:
            raise ValueError(f"start={start}, rank={rank}, world_size={world_size}")
        self.examples, self.batch_size, self.pad_id = examples, batch_size, pad_id
        self.rank, self.world_size, self.position = rank, world_size, start

    def __next__(self) -> Batch:
        first = (self.position * self.world_size + self.rank) * self.batch_size
        self.position += 1
        chosen = [self.examples[(first + i) % len(self.examples)] for i in range(self.batch_size)]
        return collate(chosen, self.pad_id)


def sequential_batches(examples: Sequence[Example], batch_size: int, pad_id: int) -> Iterator[Batch]:
    """Each example once, in order; the last batch may be smaller. For held-out loss."""
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: must be at least 1")
    for start in range(0, len(examples), batch_size):
        yield collate(examples[start : start + batch_size], pad_id)
