"""Sentences under a table: units, sources, caps, data, seeds and code versions of the records that it shows."""

from __future__ import annotations

from collections.abc import Iterable

from .. import format as fmt
from ..collection import Arm
from ..metrics import MEASURED_SOURCES, metric
from ..records import Record
from .cells import Setting, published_beside
from .spec import Column, TableSpec

VERSIONS = (
    ("package_version", "package version"),
    ("git_commit", "commit"),
    ("torch", "torch"),
    ("transformers", "transformers"),
)


def _sources(records: list[Record], section: str, names: tuple[str, ...]) -> str:
    """Where a section's numbers come from, over the records that have one of the metrics."""
    having = [r for r in records if any(metric(n).extract(r).value is not None for n in names)]
    found = {MEASURED_SOURCES.get(s, str(s)) for s in (r.get(f"{section}.source") for r in having) if s}
    return " and ".join(sorted(found))


def notes_of(spec: TableSpec, setting: Setting, columns: list[Column], records: list[Record]) -> list[str]:
    """The standing notes of one table over the columns that it shows."""
    ok = [r for r in records if r.status == "ok"]
    scale, printed = setting.scale, setting.paper
    parts = []
    for section, unit in (("memory", "GB"), ("time", "ms")):
        shown = tuple({c.metric for c in columns if metric(c.metric).unit == unit})
        if found := _sources(ok, section, shown):
            parts.append(f"{section} {found}")
    if printed and any(published_beside(c, setting) for c in columns):
        parts.append(f"columns marked paper are published ({printed.title}, {spec.source})")
    units = {metric(c.metric).unit for c in columns}
    notes = ["GB = 1e9 bytes."] if "GB" in units else []
    notes += [f"Sources: {'; '.join(parts)}."] if parts else []
    if scale == "smoke" and printed and any(c.delta and c.published for c in columns):
        notes.append(
            "Smoke scale runs tiny random models: only the paper's changes stand beside ours, not its absolute values;"
            " its SonicMoE changes stand beside grouped_mm."
        )
    if scale == "smoke" and any(c.metric == "step_ms" for c in columns):
        notes.append("Step times of a tiny model on a shared CPU vary by tens of percent from run to run.")
    notes += [*spec.notes, *(c.note for c in columns if c.note)]
    if lengths := sorted({int(n) for r in ok if (n := r.number("data.max_length"))}):
        notes.append(f"Sequences are capped at {' or '.join(map(str, lengths))} tokens.")
    if names := sorted({str(n) for r in ok if (n := r.get("data.name"))}):
        notes.append(f"Data: {', '.join(names)}.")
    seeds = sorted({r.seed for r in ok if r.seed is not None})
    if len(seeds) > 1:
        notes.append(f"Seeds {', '.join(map(str, seeds))}: mean ± sample standard deviation (number of seeds).")
    return notes + version_notes(ok)


def version_notes(records: Iterable[Record]) -> list[str]:
    """One sentence for each of package, commit, torch and transformers of which the records have several versions."""
    records, notes = list(records), []
    for key, title in VERSIONS:
        counts: dict[str, int] = {}
        for r in records:
            value = str(r.get(f"environment.{key}") or "not recorded")[:12]
            counts[value] = counts.get(value, 0) + 1
        if len(counts) > 1:
            listed = ", ".join(f"{v} ({n} records)" for v, n in sorted(counts.items()))
            notes.append(f"The rows come from more than one {title}: {listed}.")
    return notes


def noise_notes(arms: Iterable[Arm]) -> list[str]:
    """Largest differences between runs of one arm with one seed, as section 5.1 of the paper reports them."""
    step: list[float] = []
    loss: list[float] = []
    counted = 0
    for arm in arms:
        for other in arm.repeats:
            first = arm.by_seed[other.seed]
            counted += 1
            for name, kept, relative in (("step_ms", step, True), ("heldout_loss", loss, False)):
                a, b = (metric(name).extract(r).value for r in (first, other))
                if a is not None and b is not None:
                    kept.append(abs(a - b) / a * 100 if relative else abs(a - b))
    if not counted:
        return []
    parts = [f"{fmt.fixed(max(step), 1)}% in step time"] if step else []
    parts += [f"{fmt.fixed(max(loss), 4)} in held-out loss"] if loss else []
    said = f" by at most {' and '.join(parts)}" if parts else " in nothing that is recorded"
    return [f"Same-seed repeats ({counted}) vary{said}; the paper prints at most 1.4% and 0.0016."]
