"""Does it fit: one arm's forecast, its verdict on each card, and the first change that would make it fit.

What is said of an arm here is what ``scale=forecast`` records of it: the same task runs, in a process of its own. One
recorded run serves every card: it is replayed under each card's usable bytes with that card's cuBLAS workspaces.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.identity import arm_id, axes, fingerprint
from ..config.schema import Config, GpuConfig, conf_dir
from ..errors import UserError

#: Largest error of a reserved forecast against the paper's printed ones is 1.5%: a margin below that is borderline.
BORDERLINE = 0.015


@dataclass(frozen=True)
class OnCard:
    """The verdict on one card. Bytes; milliseconds of a step with every position filled; tokens per second.

    ``margin_bytes`` is the card's usable memory less what is reserved under it; of a run that does not fit, less the
    uncapped allocated peak, which is what it lacks at the least.
    """

    name: str
    title: str
    usable_bytes: int
    fits: bool
    margin_bytes: int
    borderline: bool
    step_ms: float | None
    tokens_per_s: float | None


@dataclass(frozen=True)
class Fit:
    """One arm's answer; ``breakdown`` sums to ``peak_reserved_bytes``."""

    arm_id: str
    arm: dict[str, Any]
    batch: int
    length: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    breakdown: dict[str, int]
    peak_when: str
    parameters: int
    cards: list[OnCard] = field(default_factory=list)

    def on(self, name: str) -> OnCard:
        """The verdict on the card of this name."""
        return next(card for card in self.cards if card.name == name)


class _Sections:
    """Collects what the forecast task reports; a failure is told with the phase it came from."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {}
        self.phase_name = "start"

    def phase(self, name: str) -> None:
        self.phase_name = name

    def section(self, name: str, value: Any) -> None:
        self.sections[name] = value

    def note(self, text: str) -> None:
        pass


def forecast_arm(config: Config, cards: Sequence[GpuConfig]) -> Fit:
    """Forecast ``config`` (composed at ``scale=forecast``, without a cap) and judge it on ``cards``. Needs torch.

    Raises:
        UserError, Unsupported: what the forecast task raises.
    """
    from . import task

    told = _Sections()
    meter = task.run(config, told)
    model, measured = told.sections["model"], told.sections["memory"]["measured"]
    peak = meter.breakdown(model["layers"])
    phases = [told.sections["memory"][name] for name in ("load", "warmup", "measured")]
    allocated = max(phase["peak_allocated_bytes"] for phase in phases)
    reserved = max(phase["peak_reserved_bytes"] for phase in phases)
    times = (told.sections["time"].get("forecast") or {}).get("cards") or {}
    return Fit(
        arm_id=arm_id(config),
        arm=axes(config),
        batch=config.batch_size,
        length=config.data.max_length,
        peak_allocated_bytes=measured["peak_allocated_bytes"],
        peak_reserved_bytes=measured["peak_reserved_bytes"],
        breakdown=peak.with_fragmentation(measured["peak_reserved_bytes"]),
        peak_when=peak.when,
        parameters=model["parameters"],
        cards=[on_card(card, meter, allocated, reserved, times.get(card.name)) for card in cards],
    )


def on_card(card: GpuConfig, meter: Any, allocated: int, reserved: int, time: dict[str, Any] | None) -> OnCard:
    """The allocator gives its cache back at the limit, so what decides is a replay under it."""
    usable = int((card.memory_gb - card.context_gb) * 1e9)
    fits, held = True, reserved
    if reserved > usable:
        report = meter.under(usable, card.compute_capability)
        fits, held = report.oom is None, report.peak_reserved if report.oom is None else allocated
    margin = usable - held
    # What is held under a cap says nothing of how close it was: the allocated peak does.
    room = abs(usable - allocated) if reserved > usable else margin
    filled = (time or {}).get("filled") or {}
    return OnCard(
        name=card.name,
        title=card.title,
        usable_bytes=usable,
        fits=fits,
        margin_bytes=margin,
        borderline=room < BORDERLINE * usable,
        step_ms=filled.get("step_ms"),
        tokens_per_s=filled.get("tokens_per_s"),
    )


def work(data: dict[str, Any], cards: list[dict[str, Any]]) -> dict[str, Any]:
    """:func:`forecast_arm` between processes: plain data in and out; a mistake comes back as ``{"error": line}``."""
    import contextlib
    import io
    import warnings

    from ..config.schema import from_dict
    from ..errors import Unsupported

    warnings.simplefilter("ignore")  # what libraries tell a user who trains; nobody trains here
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            found = forecast_arm(from_dict(data), [GpuConfig(**card) for card in cards])
        return dataclasses.asdict(found)
    except (UserError, Unsupported) as error:
        return {"error": str(error)}


def from_plain(data: dict[str, Any]) -> Fit:
    """Inverse of ``dataclasses.asdict``. Raises UserError for the error of a worker."""
    if "error" in data:
        raise UserError(data["error"])
    return Fit(**{**data, "cards": [OnCard(**card) for card in data["cards"]]})


# -- the cache -------------------------------------------------------------------------------------------------------


def cache_file(config: Config, cards: Sequence[GpuConfig]) -> Path:
    """Where this arm's answer is kept: named by its fingerprint, the cards, the libraries and our own code.

    A change in any of them is another name, so an answer is never stale.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sonar_repro" / "fit"
    described = [dataclasses.asdict(card) for card in cards]
    told = json.dumps([fingerprint(config), described, _code()], sort_keys=True)
    return root / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.json"


def _code() -> str:
    """A digest of the package's sources, and the versions of what it stands on."""
    from importlib.metadata import version

    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in [*sorted(package.rglob("*.py")), *sorted((package / "forecast" / "hosts").glob("*.json"))]:
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {version('torch')} {version('transformers')}"


def read_cache(path: Path) -> Fit | None:
    """The kept answer, or None; a damaged file is none."""
    try:
        return from_plain(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_cache(path: Path, fit: Fit) -> None:
    """Keep an answer, whole or not at all; a folder that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps(dataclasses.asdict(fit)), encoding="utf-8")
        os.replace(scratch, path)
    except OSError:
        pass


# -- cards, remedies, the largest value that fits --------------------------------------------------------------------


def cards_named(names: str | None) -> list[GpuConfig]:
    """The cards of ``conf/gpu`` by name (commas between them), or all of them.

    Raises:
        UserError: a name that is not there, with the near ones.
    """
    import difflib

    import yaml

    files = {path.stem: path for path in sorted((conf_dir() / "gpu").glob("*.yaml"))}
    wanted = [name.strip() for name in names.split(",")] if names else list(files)
    for name in wanted:
        if name not in files:
            near = difflib.get_close_matches(name, files, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"--gpu {name}: no such card{hint}; choose of {', '.join(files)}")
    return [GpuConfig(**yaml.safe_load(files[name].read_text(encoding="utf-8"))) for name in dict.fromkeys(wanted)]


def budget_card(gigabytes: float) -> GpuConfig:
    """A card of the user's own size: all of it may be reserved, nothing is known of its speed."""
    if not 0 < gigabytes < math.inf:
        raise UserError(f"--budget-gb {gigabytes:g}: must be positive, in units of 1e9 bytes")
    title = f"a budget of {gigabytes:g} GB"
    return GpuConfig(name="budget", title=title, memory_gb=gigabytes, context_gb=0.0, compute_capability=9)


#: Changes that make a run smaller, by what they cost in time: (words, overrides, needs experts).
REMEDIES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("Sonar-MoE (--method sonar)", ("method=sonar",), True),
    ("Sonar-MoE and checkpointing", ("method=sonar", "checkpointing=true"), True),
    ("checkpointing (--checkpointing)", ("checkpointing=true",), False),
    ("Sonar-MoE and 8-bit AdamW", ("method=sonar", "optimizer=adamw8bit"), True),
    ("Sonar-MoE, 8-bit AdamW and checkpointing", ("method=sonar", "optimizer=adamw8bit", "checkpointing=true"), True),
    ("batch 1, with all of these", ("method=sonar", "optimizer=adamw8bit", "checkpointing=true", "batch_size=1"), True),
)


def remedies(overrides: Sequence[str], experts: bool) -> list[tuple[str, list[str]]]:
    """The changes that would make a run smaller and are not made yet: (words, overrides of the changed arm)."""
    found, seen = [], {_settled(overrides)}
    for words, changes, needs_experts in REMEDIES:
        keys = {change.split("=")[0] for change in changes}
        changed = [o for o in overrides if o.split("=")[0] not in keys] + list(changes)
        if (experts or not needs_experts) and _settled(changed) not in seen:
            seen.add(_settled(changed))
            found.append((words, changed))
    return found


def _settled(overrides: Sequence[str]) -> frozenset[str]:
    return frozenset(overrides)


def largest(fits: Callable[[int], bool], limit: int, start: int = 1) -> int | None:
    """The largest n in [start, limit] with ``fits(n)``, for a ``fits`` that is true up to some n and false beyond.

    Doubling, then bisection: about 2 log2(n) calls. None where not even ``start`` fits.
    """
    if not fits(start):
        return None
    low, high = start, start
    while high < limit:
        high = min(2 * high, limit)
        if not fits(high):
            break
        low = high
    else:
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def smallest(fits: Callable[[int], bool], limit: int) -> int | None:
    """The smallest n in [1, limit] with ``fits(n)``, for a ``fits`` that is false below some n and true from it on."""
    below, high = 0, 1
    while not fits(high):
        below = high
        if high == limit:
            return None
        high = min(2 * high, limit)
    while high - below > 1:
        middle = (below + high) // 2
        below, high = (below, middle) if fits(middle) else (middle, high)
    return high
