"""Tables for practitioners: which card holds what, forecasts against our own measurements, and every other arm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..axes import display
from ..cards import Card, cards, smallest
from ..collection import Collection
from ..metrics import metric
from ..records import Record
from . import format as fmt
from .confront import setup
from .spec import Block, Cell, Column, Custom, Header, Table, TableSpec


def peak_gb(record: Record) -> float | None:
    """What must fit: reserved memory, or allocated where the allocator was not modelled."""
    reserved = metric("peak_reserved_gb").extract(record).value
    return reserved if reserved is not None else metric("peak_allocated_gb").extract(record).value


def fits_records(origins: Iterable[Collection], scale: str = "forecast") -> tuple[list[Record], list[str | None]]:
    """Records of the fits experiment by model, optimizer and method; and their origins' labels (None: own runs).

    The user's own come first: of the committed ones those of models that the user has not run are added.
    """
    found: list[Record] = []
    labels: list[str | None] = []
    for origin in origins:
        own = {r.arm.get("model") for r in found}
        usable = [r for r in origin.of("fits", scale) if r.status == "ok" and peak_gb(r) is not None]
        added = [r for r in usable if r.arm.get("model") not in own]
        found += added
        labels += [origin.label] if added else []
    key = [(str(r.arm.get("model")), str(r.arm.get("optimizer")), -(peak_gb(r) or 0)) for r in found]
    return [r for _, r in sorted(zip(key, found), key=lambda pair: pair[0])], labels


def fits(table: Table, scale: str, origins: list[Collection]) -> None:
    """Peak, the smallest card that holds it, and the step time there, for each model, optimizer and method."""
    found, sources = fits_records(origins, scale)
    if not found:
        return
    title = " and ".join(f"reference: {label}" if label else "your runs" for label in sources)
    heads = [Header("Model"), Header("Optimizer"), Header("Method")]
    for name in ("Peak alloc. GB", "Peak res. GB", "Smallest card", "Room GB", "Step ms there", "Tok/s there"):
        heads.append(Header(name, kind="ours", panel="memory"))
    block = Block(title if any(sources) else None, heads)
    last = None
    for r in found:
        peak = peak_gb(r)
        card = smallest(peak)
        values = [metric(n).extract(r).value for n in ("peak_allocated_gb", "peak_reserved_gb")]
        times = card_times(r, card)
        if r.arm.get("model") != last:
            block.groups.append(len(block.rows))
            last = r.arm.get("model")
        what = setup({**r.arm, "optimizer": "adamw"})
        labels = [
            Cell(display("model", last), kind="label"),
            Cell(display("optimizer", r.arm.get("optimizer")), kind="label"),
        ]
        room = fmt.fixed(card.usable_gb - peak, 1) if card else fmt.DASH
        cells = [fmt.fixed(values[0], 2), fmt.fixed(values[1], 2), card.title if card else "none listed", room]
        on_it = [Cell(fmt.fixed(times[0], 1)), Cell(fmt.fixed(times[1], 0))]
        if card is None and times[0] is not None:
            on_it[0].reasons.append(f"no listed card holds it: the time is that of {r.arm.get('gpu')} if it did")
        block.rows.append([*labels, Cell(what, kind="label"), *(Cell(c) for c in cells), *on_it])
        raw = {
            "model": last,
            "optimizer": r.arm.get("optimizer"),
            "method": r.arm.get("method"),
            "card": card and card.name,
        }
        table.raw.append({**raw, "peak_allocated_gb": values[0], "peak_reserved_gb": values[1], "step_ms": times[0]})
    table.blocks.append(block)
    table.has_records = True
    listed = ", ".join(f"{c.title} ({fmt.fixed(c.usable_gb, 1)} GB)" for c in cards())
    table.notes += [
        "GB = 1e9 bytes. All numbers are forecasts. A card holds a run if the reserved peak is at most its"
        " memory less an"
        " allowance for the CUDA context; room is what is left.",
        f"Usable memory: {listed}.",
    ]
    shapes = sorted({str(r.get("data.batch_shape")) for r in found if r.get("data.batch_shape")})
    table.notes += [f"Batch shape: {', '.join(shapes)}, every position filled, for memory and time."] if shapes else []
    hosts = sorted({str(r.get("time.forecast.host_cpu")) for r in found if r.get("time.forecast.host_cpu")})
    if hosts:
        table.notes.append(f"Step time: on the smallest card that holds it, with the host {', '.join(hosts)}.")


def card_times(record: Record, card: Card | None) -> tuple[float | None, float | None]:
    """Step in ms and tokens a second, every position filled: on ``card``, or on the record's own if none holds it."""
    where = f"time.forecast.cards.{card.name}.filled" if card else "time.forecast.filled"
    return record.number(f"{where}.step_ms"), record.number(f"{where}.tokens_per_s")


def measured(table: Table, scale: str, origins: list[Collection]) -> None:
    """Forecast against measured, for every arm that has both (time only where the card is the same)."""
    heads = [Header("Device"), Header("Model"), Header("Backend"), Header("Set-up")]
    for name in ("Peak alloc. GB", "Peak res. GB", "Step ms"):
        heads += [
            Header(name, "measured", kind="ours"),
            Header(name, "forecast", kind="published"),
            Header(name, "error", kind="error"),
        ]
    block, errors = Block(None, heads), {"peak_allocated_gb": [], "peak_reserved_gb": [], "step_ms": []}
    for origin in origins:
        for r in origin.records:
            if r.scale == "paper" and r.readable and r.status == "ok" and r.get("memory.source") == "cuda":
                _measured_row(table, block, errors, r, origins)
    if block.rows:
        block.groups = [i for i, row in enumerate(block.rows) if not i or row[0].text != block.rows[i - 1][0].text]
        table.blocks.append(block)
        table.has_records = True
        for name, found in errors.items():
            if found:
                worst = max(found, key=abs)
                said = (
                    f"{metric(name).label}: {len(found)} arms, largest error of the forecast {fmt.percent(worst, 2)}."
                )
                table.notes.append(said)


def _measured_row(
    table: Table, block: Block, errors: dict[str, list[float]], r: Record, origins: list[Collection]
) -> None:
    keys = ("model", "backend", "method", "optimizer", "batch_size", "accumulation", "checkpointing", "memory_cap_gb")
    axes = {k: r.arm.get(k) for k in keys}
    forecast = next((f for o in origins for f in o.arm(axes, "forecast").ok), None)
    if forecast is None:
        return
    device = str(r.get("environment.device_name") or "CUDA device")
    row = [Cell(device, kind="label"), Cell(display("model", axes["model"]), kind="label")]
    row += [Cell(display("backend", axes["backend"]), kind="label"), Cell(setup(axes), kind="label")]
    raw: dict[str, Any] = {"device": device, **axes}
    for name, kept in errors.items():
        ours, theirs = metric(name).extract(r).value, metric(name).extract(forecast).value
        if name == "step_ms" and not _same_card(str(forecast.arm.get("gpu") or ""), device):
            theirs = _on_device(forecast, device)
        error = 100 * (theirs - ours) / ours if ours and theirs is not None else None
        kept += [error] if error is not None else []
        decimals = metric(name).decimals
        row += [Cell(fmt.fixed(ours, decimals)), Cell(fmt.fixed(theirs, decimals), kind="published")]
        row.append(Cell(fmt.percent(error, 2), kind="error"))
        raw |= {name: ours, f"{name}.forecast": theirs, f"{name}.error_pct": error}
    block.rows.append(row)
    table.raw.append(raw)


def _on_device(forecast: Record, device: str) -> float | None:
    """The forecast's step in ms on the card that was measured, if it is one of those that it was made for."""
    found = (card for card in cards() if _same_card(card.name, device))
    return next((forecast.number(f"time.forecast.cards.{card.name}.step_ms") for card in found), None)


def _same_card(gpu: str, device: str) -> bool:
    """Whether a card's file name (rtx_pro_6000) names the device (NVIDIA RTX PRO 6000 Blackwell ...)."""
    words = device.lower().replace("-", " ").split()
    return bool(gpu) and all(any(part in word for word in words) for part in gpu.lower().split("_"))


def others(covered: set[str], origins: Iterable[Collection]) -> list[TableSpec]:
    """A plain table for each recorded experiment that has none of its own (the user's sweeps)."""
    names = {r.experiment for o in origins for r in o.records if r.readable} - covered
    columns = (
        Column("peak_allocated_gb"),
        Column("peak_reserved_gb"),
        Column("step_ms", panel="time"),
        Column("tokens_per_s", panel="time"),
        Column("heldout_loss", panel="quality"),
        Column("optimizer_calls", panel="counts"),
    )
    return [
        TableSpec(
            name=name,
            title=f"Experiment {name}",
            experiment=name,
            rows=lambda scale: [],
            labels=(("model", "Model"), ("backend", "Backend"), ("method", "Method")),
            columns=columns,
            paper=None,
            names={},
        )
        for name in sorted(names)
    ]


TABLES = (
    Custom("fits", "Which card holds what", ("fits",), ("forecast",), fits),
    Custom(
        "forecast_measured",
        "Forecast against our own measurements",
        ("table1", "table6", "table8"),
        ("paper",),
        measured,
    ),
)
