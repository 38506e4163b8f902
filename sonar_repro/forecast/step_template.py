"""A steady training step as a function of its batch lengths, so that hundreds of steps can be replayed from two.

The same step is recorded at two lengths. Its allocations and frees are the same sequence; only sizes differ, and a
size is a line in the length of its micro-batch (activations), or constant (gradients, weights, optimizer). What is not
exactly linear (a ``T x T`` mask, a length rounded up to 128) is interpolated; such blocks are small. A test compares
the interpolated sizes with a third recorded length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..instruments.events import EventLog


class NoTemplate(ValueError):
    """The two recorded steps are not the same sequence; the message says where they part."""


class StepTemplate:
    """The last recorded step, with block sizes as lines between the last two recorded steps.

    ``actions``, ``first_block`` and ``end`` are described at
    :class:`sonar_repro.forecast.allocator.Continuation`.

    Args:
        log: a recorded run whose last two complete steps are steady and run at ``lengths``.
        lengths: (tokens a sequence in the last step but one, in the last step), different from each other.

    Raises:
        NoTemplate: the two steps differ in more than sizes, or free blocks older than one step.
    """

    def __init__(self, log: EventLog, lengths: tuple[int, int]) -> None:
        starts = [position for position, kind, _ in log.marks if kind == "step"]
        if len(starts) < 3 or lengths[0] == lengths[1]:
            raise NoTemplate("needs two complete steady steps at different lengths, and a mark at the end")
        start_a, start_b, self.end = starts[-3:]
        first_a = _first_block(log, start_a)
        self.first_block = _first_block(log, start_b)
        after = _first_block(log, self.end)
        count = after - self.first_block
        if self.first_block - first_a != count:
            raise NoTemplate(
                f"{self.first_block - first_a} allocations at length {lengths[0]}, {count} at {lengths[1]}"
            )
        _same_order(log, (start_a, start_b), (start_b, self.end), lengths)
        self.actions = self._actions(log, start_b, first_a)
        self.lengths = lengths
        self._constant, self._varying = self._lines(log, first_a, count, _micro_batches(log, start_b, self.end))

    def sizes(self, micro_batch_lengths: Sequence[int]) -> list[int]:
        """Block sizes in bytes of a step whose micro-batches have these lengths (one length serves all)."""
        length_a, length_b = self.lengths
        sizes = list(self._constant)
        for position, micro_batch, size_a, slope in self._varying:
            length = micro_batch_lengths[min(micro_batch, len(micro_batch_lengths) - 1)]
            sizes[position] = max(1, size_a + slope * (length - length_a) // (length_b - length_a))
        return sizes

    def over(self, steps: Sequence[Sequence[int]], first_label: int) -> Sequenced:
        """A :class:`~sonar_repro.forecast.allocator.Continuation` over steps of micro-batch lengths."""
        return Sequenced(self, steps, first_label)

    def _actions(self, log: EventLog, start: int, first_a: int) -> list[int]:
        actions = []
        for event in log.events[start : self.end]:
            if event > 0:
                actions.append(0)
            elif -event - 1 >= self.first_block:
                actions.append(-event - self.first_block)
            elif -event - 1 >= first_a:
                actions.append(-(-event - 1 - first_a) - 1)
            else:
                raise NoTemplate("the step frees a block that is older than the step before it")
        return actions

    def _lines(
        self, log: EventLog, first_a: int, count: int, micro_batch_of: list[int]
    ) -> tuple[list[int], list[tuple[int, int, int, int]]]:
        sizes_a = log.sizes[first_a : first_a + count]
        sizes_b = log.sizes[self.first_block : self.first_block + count]
        varying = [
            (position, micro_batch_of[position], a, b - a)
            for position, (a, b) in enumerate(zip(sizes_a, sizes_b))
            if a != b
        ]
        return list(sizes_b), varying


class Sequenced:
    """A template and the lengths to run it at."""

    def __init__(self, template: StepTemplate, lengths: Sequence[Sequence[int]], first_label: int) -> None:
        self.actions, self.first_block, self.end = template.actions, template.first_block, template.end
        self._template, self._lengths, self._first_label = template, lengths, first_label

    def steps(self) -> Iterator[tuple[str, list[int]]]:
        """(label, block sizes) of each step."""
        for offset, micro_batch_lengths in enumerate(self._lengths):
            yield str(self._first_label + offset), self._template.sizes(micro_batch_lengths)


def _first_block(log: EventLog, position: int) -> int:
    """Index of the first block allocated at or after ``position``: blocks are numbered as they are allocated."""
    for event in log.events[position:]:
        if event > 0:
            return event - 1
    return len(log.sizes)


def _same_order(log: EventLog, step_a: tuple[int, int], step_b: tuple[int, int], lengths: tuple[int, int]) -> None:
    events_a, events_b = log.events[slice(*step_a)], log.events[slice(*step_b)]
    if len(events_a) != len(events_b) or any((a > 0) != (b > 0) for a, b in zip(events_a, events_b)):
        raise NoTemplate(f"allocations and frees come in another order at lengths {lengths[0]} and {lengths[1]}")


def _micro_batches(log: EventLog, start: int, end: int) -> list[int]:
    """The micro-batch of each block that is allocated in ``events[start:end]``."""
    marks = [position for position, kind, _ in log.marks if kind == "micro_batch" and start <= position < end]
    owners: list[int] = []
    current = -1
    for position in range(start, end):
        while current + 1 < len(marks) and marks[current + 1] <= position:
            current += 1
        if log.events[position] > 0:
            owners.append(max(current, 0))
    return owners
