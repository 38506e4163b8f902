"""Where the memory goes at the peak: the live blocks of a recorded run, summed by part, and when that is, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..instruments.events import OWNERS, REGIONS, EventLog
from .allocator import CachingAllocator, Continuation

#: A module's kind by the first of these words in its qualified name; activations are told apart by it.
KINDS = (
    ("experts", ("experts",)),
    ("router", ("router", ".gate")),
    ("attention", ("attn", "attention")),
    ("norms", ("norm",)),
    ("embedding", ("embed", "wte")),
    ("logits and loss", ("lm_head", "embed_out", "output_layer")),
    ("recurrent", ("mamba", "conv", "recurrent", "ssm")),
    ("mlp", ("mlp", "feed_forward", "ffn", "shared_expert")),
)
WORKSPACES, FRAGMENTATION = "workspaces", "fragmentation"


@dataclass(frozen=True)
class Breakdown:
    """Bytes by part at the peak of allocated memory, and when it is.

    ``parts`` sum to the allocated peak, byte for byte: whole allocator blocks are counted, rounding included.
    """

    parts: dict[str, int]
    when: str

    def with_fragmentation(self, reserved: int) -> dict[str, int]:
        """The parts with what is reserved beyond them; they sum to ``reserved``."""
        return {**self.parts, FRAGMENTATION: reserved - sum(self.parts.values())}


def kind_of(place: str) -> str:
    """The kind of module that a qualified name belongs to; outside every module it is the loss."""
    if not place:
        return "logits and loss"
    return next((kind for kind, words in KINDS if any(word in place for word in words)), "other modules")


def breakdown(log: EventLog, layers: int, continuation: Continuation | None = None) -> Breakdown:
    """The parts at the largest allocated sum of the ``measured`` phase.

    Args:
        log: a recorded run with ``places`` (the tracker's ``place`` at each allocation).
        layers: transformer layers of the model, for the words.
        continuation: the steps replayed behind the recorded ones.
    """
    count, peak = 0, -1
    start = next((at for at, kind, label in log.marks if kind == "phase" and label == "measured"), 0)
    allocator = CachingAllocator()
    for position, _, _, _ in _walk(log, allocator, continuation):
        if position >= start and allocator.allocated > peak:
            peak, count = allocator.allocated, position
    live: dict[object, tuple[int, int]] = {}
    last = 0
    for position, key, size, block in _walk(log, CachingAllocator(), continuation):
        if size is None:
            live.pop(key)
        else:
            live[key] = (size, block)
            last = block
        if position == count:
            break
    parts: dict[str, int] = {}
    for size, block in live.values():
        name = _part(log, block)
        parts[name] = parts.get(name, 0) + size
    return Breakdown(dict(sorted(parts.items(), key=lambda item: -item[1])), _when(log, last, layers))


def _walk(
    log: EventLog, allocator: CachingAllocator, continuation: Continuation | None
) -> Iterator[tuple[int, object, int | None, int]]:
    """(position, key, bytes of the allocator's block or None for a free, index in the log) of every event in turn."""
    handles: dict[object, tuple] = {}
    end = len(log.events) if continuation is None else continuation.end

    def malloc(key: object, nbytes: int) -> int:
        block = allocator.malloc(nbytes)
        handles[key] = (block, nbytes)
        return block.size

    for position in range(end):
        event = log.events[position]
        if event > 0:
            yield position, event - 1, malloc(event - 1, log.sizes[event - 1]), event - 1
        else:
            allocator.free(*handles.pop(-event - 1))
            yield position, -event - 1, None, -event - 1
    if continuation is None:
        return
    first, position = continuation.first_block, end
    before: dict[int, object] = {index - first: index for index in list(handles) if index >= first}  # type: ignore[operator]
    for label, sizes in continuation.steps():
        own: dict[int, object] = {}
        made = 0
        for action in continuation.actions:
            if action == 0:
                key = (label, made)
                own[made] = key
                yield position, key, malloc(key, sizes[made]), first + made
                made += 1
            else:
                key = own.pop(action - 1) if action > 0 else before.pop(-action - 1)
                allocator.free(*handles.pop(key))
                yield position, key, None, 0
            position += 1
        before = own


def _part(log: EventLog, block: int) -> str:
    owner = OWNERS[log.owners[block]]
    place = log.place_names[log.places[block]]
    if owner == "optimizer_state":
        return f"optimizer states, {'experts' if kind_of(place) == 'experts' else 'other'}"
    if owner == "activations":
        return f"activations, {kind_of(place)}"
    if owner == "temporaries" and block in log.workspaces:
        return WORKSPACES
    return {"expert_gradients": "gradients, experts", "other_gradients": "gradients, other"}.get(owner, owner)


def _when(log: EventLog, block: int, layers: int) -> str:
    """``backward, layer 3 of 16, after mlp.experts.down_proj``: the region, the layer from 1, and the last module."""
    place = log.place_names[log.places[block]]
    words = [REGIONS[log.regions[block]]]
    pieces = place.split(".")
    numbers = [index for index, piece in enumerate(pieces) if piece.isdigit()]
    if numbers:
        words.append(f"layer {int(pieces[numbers[0]]) + 1} of {layers}")
        pieces = pieces[numbers[0] + 1 :]
    if place:
        words.append(f"{'after' if words[0] == 'backward' else 'in'} {'.'.join(pieces)}")
    return ", ".join(words)
