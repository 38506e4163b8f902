"""Tables for practitioners: which card holds what, and forecasts against our own measurements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .. import format as fmt
from ..collection import Collection
from ..conf import Card, cards, smallest
from ..metrics import metric
from ..records import Record
from .coverage import setup
from .spec import Cell, Custom, Field, Table, labels, number, triple

BORDERLINE = 0.02  # the error that is stated of reserved forecasts: a margin below it decides nothing
AXES = ("model", "backend", "method", "optimizer", "batch_size", "accumulation", "checkpointing", "memory_cap_gb")


def peak_gb(record: Record) -> float | None:
    """What must fit: reserved memory, or allocated where the allocator was not modelled."""
    reserved = metric("peak_reserved_gb").extract(record).value
    return reserved if reserved is not None else metric("peak_allocated_gb").extract(record).value


def fits_records(origin: Collection, scale: str = "forecast") -> list[Record]:
    """Records of the fits experiment of one origin, by model, optimizer, length and batch, largest peak first."""
    usable = [r for r in origin.of("fits", scale) if r.status == "ok" and peak_gb(r) is not None]

    def key(r: Record) -> tuple:
        shape = (r.number("data.max_length") or 0, r.arm.get("batch_size") or 0)
        return (str(r.arm.get("model")), str(r.arm.get("optimizer")), shape, -(peak_gb(r) or 0))

    return sorted(usable, key=key)


def room(peak: float, card: Card) -> str:
    """What is left on a card, or how much it is short; borderline within the error of a forecast."""
    left = card.usable_gb - peak
    said = f"{fmt.fixed(left, 1)} GB left" if left >= 0 else f"short by {fmt.fixed(-left, 1)} GB"
    return f"{said} (borderline)" if abs(left) <= BORDERLINE * peak else said


def _fits_row(r: Record) -> dict[str, Any]:
    """One forecast: its peaks, the smallest card that holds it, and the card that was asked for."""
    peak = peak_gb(r) or 0.0
    card = smallest(peak)
    asked = next((c for c in cards() if c.name == r.arm.get("gpu")), None)
    step, rate = card_times(r, card)
    own = r.number("time.forecast.filled.step_ms")
    row = {k: r.arm.get(k) for k in ("model", "optimizer", "method")} | {"card": card and card.name}
    row |= {n: metric(n).extract(r).value for n in ("peak_allocated_gb", "peak_reserved_gb")}
    row |= {"step_ms": step, "batch_size": r.arm.get("batch_size"), "length": r.number("data.max_length")}
    row |= {"room_gb": card.usable_gb - peak if card else None, "tokens_per_s": rate}
    row |= {"asked_card": r.arm.get("gpu"), "asked_room_gb": asked.usable_gb - peak if asked else None}
    row |= {"asked_step_ms": own, "_setup": setup({**r.arm, "optimizer": "adamw", "batch_size": 2})}
    near = card is not None and abs(card.usable_gb - peak) <= BORDERLINE * peak
    named = Cell((card.title if card else "none listed") + (" (borderline)" if near else ""))
    there = Cell(f"{fmt.fixed(step, 1)} ({card.short})") if card and step is not None else Cell()
    of_asked = Cell(f"{asked.short}: {room(peak, asked)}") if asked else Cell(str(r.arm.get("gpu") or fmt.DASH))
    return row | {"borderline": near, "cells": {"card": named, "step_ms": there, "asked_card": of_asked}}


def fits(table: Table, scale: str, origins: list[Collection]) -> None:
    """Peak, the smallest card that holds it, the asked card, and step times, for each model, optimizer and method."""
    fields = labels(model="Model", optimizer="Optimizer", _setup="Method")
    fields += [Field("batch_size", "Batch"), Field("length", "Length", show=number(0))]
    fields += [Field("peak_allocated_gb", "Peak alloc. GB", show=number(2))]
    fields += [Field("peak_reserved_gb", "Peak res. GB", show=number(2)), Field("card", "Smallest card")]
    fields += [Field("room_gb", "Room GB", show=number(1)), Field("step_ms", "Step ms there")]
    fields += [Field("tokens_per_s", "Tok/s there", show=number(0)), Field("asked_card", "Card asked for")]
    fields += [Field("asked_step_ms", "Step ms on it", show=number(1))]
    shown: list[Record] = []
    for origin in origins:
        if found := fits_records(origin, scale):
            title = f"reference: {origin.label}" if origin.label else "your runs"
            rows = [{**_fits_row(r), "origin": origin.label or "own"} for r in found]
            table.add(title if len(origins) > 1 else None, fields, rows, group=("model",))
            shown += found
    table.has_records = bool(shown)
    if not shown:
        return
    listed = ", ".join(f"{c.title} ({fmt.fixed(c.usable_gb, 1)} GB)" for c in cards())
    table.notes += [
        "GB = 1e9 bytes. All numbers are forecasts. A card holds a run if the reserved peak is at most its memory less"
        " an allowance for the CUDA context; room is what is left, borderline where it is within"
        f" {100 * BORDERLINE:.0f}% of the peak, the error of a forecast.",
        f"Usable memory: {listed}.",
        "Every position of the batch is filled, for memory and time. Step times of different rows may be of different"
        " cards: compare those on the card asked for. On a card that does not hold the run it is the time if it did.",
    ]
    hosts = sorted({str(r.get("time.forecast.host_cpu")) for r in shown if r.get("time.forecast.host_cpu")})
    table.notes += [f"Step time: with the host {', '.join(hosts)}."] if hosts else []


def card_times(record: Record, card: Card | None) -> tuple[float | None, float | None]:
    """Step in ms and tokens a second, every position filled: on ``card``, or on the record's own if none holds it."""
    where = f"time.forecast.cards.{card.name}.filled" if card else "time.forecast.filled"
    return record.number(f"{where}.step_ms"), record.number(f"{where}.tokens_per_s")


def measured(table: Table, scale: str, origins: list[Collection]) -> None:
    """Forecast against measured, for every arm that has both (time only where the card is the same)."""
    errors: dict[str, list[float]] = {"peak_allocated_gb": [], "peak_reserved_gb": [], "step_ms": []}
    records = [r for o in origins for r in o.records if r.scale == "paper" and r.readable and r.status == "ok"]
    rows = [_measured_row(r, errors, origins) for r in records if r.get("memory.source") == "cuda"]
    made = [row for row in rows if row is not None]
    if not made:
        return
    fields = labels(device="Device", model="Model", backend="Backend", _setup="Set-up")
    for name in errors:
        m = metric(name)
        ours, theirs, error = triple(name, m.heading, m.decimals)
        fields.append(Field(ours.key, ours.heading, "ours", ours.show, "measured"))
        fields.append(Field(f"{name}.forecast", m.heading, "published", theirs.show, "forecast"))
        fields.append(error)
    table.add(None, fields, made, group=("device",))
    table.has_records = True
    for name, found in errors.items():
        if found:
            worst = fmt.percent(max(found, key=abs), 2)
            table.notes.append(f"{metric(name).label}: {len(found)} arms, largest error of the forecast {worst}.")


def _measured_row(r: Record, errors: dict[str, list[float]], origins: Iterable[Collection]) -> dict[str, Any] | None:
    axes = {k: r.arm.get(k) for k in AXES}
    forecast = next((f for o in origins for f in o.arm(axes, "forecast").ok), None)
    if forecast is None:
        return None
    device = str(r.get("environment.device_name") or "CUDA device")
    row: dict[str, Any] = {"device": device, **axes, "_setup": setup(axes)}
    for name, kept in errors.items():
        ours, theirs = metric(name).extract(r).value, metric(name).extract(forecast).value
        if name == "step_ms" and not _same_card(str(forecast.arm.get("gpu") or ""), device):
            theirs = _on_device(forecast, device)
        error = 100 * (theirs - ours) / ours if ours and theirs is not None else None
        kept += [error] if error is not None else []
        row |= {name: ours, f"{name}.forecast": theirs, f"{name}.error_pct": error}
    return row


def _on_device(forecast: Record, device: str) -> float | None:
    """The forecast's step in ms on the card that was measured, if it is one of those that it was made for."""
    found = (card for card in cards() if _same_card(card.name, device))
    return next((forecast.number(f"time.forecast.cards.{card.name}.step_ms") for card in found), None)


def _same_card(gpu: str, device: str) -> bool:
    """Whether a card's file name (rtx_pro_6000) names the device (NVIDIA RTX PRO 6000 Blackwell ...)."""
    words = device.lower().replace("-", " ").split()
    return bool(gpu) and all(any(part in word for word in words) for part in gpu.lower().split("_"))


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
