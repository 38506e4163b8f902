"""Two MESH tables of ours: which parameters hold which state, and the diagnosis."""

from __future__ import annotations

import statistics
from typing import Any

from .. import conf
from .. import format as fmt
from ..axes import display
from ..collection import Collection
from ..metrics import metric
from .spec import Custom, Field, Table, labels, number


def roles(table: Table, scale: str, origins: list[Collection]) -> None:
    """Which parameters hold which state: one block per optimizer, one row per role, from the records' ``roles``."""
    fields = labels(role="Role", rule="Rule")
    fields += [Field(k, k.capitalize(), show=number(0)) for k in ("tensors", "parameters")]
    fields += [Field("state_bytes", "State MB", show=lambda v: fmt.fixed(v / 1e6, 2)), Field("state", "State")]
    for origin in origins:
        seen: set[str] = set()
        for record in origin.of("mesh_table1", scale) + origin.of("mesh_table2", scale):
            name, listed = str(record.arm.get("optimizer")), record.get("roles")
            if name in seen or not isinstance(listed, list):
                continue
            seen.add(name)
            title = display("optimizer", name) + (f" (reference: {origin.label})" if origin.label else "")
            plain = [{k: v for k, v in role.items() if not isinstance(v, (dict, list))} for role in listed if role]
            table.add(title, fields, [{"optimizer": name, **role} for role in plain])
            table.has_records = True


def diagnosis(table: Table, scale: str, origins: list[Collection]) -> None:
    """The explanations that the paper rules out: each number of the records' ``diagnosis``, a column per optimizer."""
    columns: dict[str, list[dict[str, Any]]] = {}
    seeds: set[int] = set()
    for origin in origins:
        for record in origin.of("mesh_diagnosis", scale):
            found = _flat(record.get("diagnosis"))
            if found:
                name = display("optimizer", record.arm.get("optimizer"))
                found = {"evaluation loss": metric("heldout_loss").extract(record).value, **found}
                columns.setdefault(name + (f" ({origin.label})" if origin.label else ""), []).append(found)
                seeds |= {record.seed} if record.seed is not None else set()
    if not columns:
        return
    keys = dict.fromkeys(k for records in columns.values() for found in records for k in found)
    made = [
        {"quantity": k, "_shown": k.replace("_", " ").replace(".", ": ")}
        | {name: [found.get(k) for found in records] for name, records in columns.items()}
        for k in keys
    ]
    table.add(None, [*labels(_shown="Quantity"), *(Field(c, c, show=_over_seeds) for c in columns)], made)
    table.has_records = True
    several = f"Seeds {', '.join(map(str, sorted(seeds)))}: mean ± sample standard deviation."
    table.notes += [
        *([several] if len(seeds) > 1 else []),
        "The paper names the explanations and prints no figures for them; the quantities are ours. Load: tokens of an"
        " expert over its uniform share. Gate: effective sample size of the gate weights over the token count (1: no"
        " skew). Semantic: share of the expert choice that the token's id tells, and by chance (ids shuffled).",
        "A cosine of consecutive gradients below zero is a step that overshoots; noise alone gives zero.",
    ]


def _over_seeds(values: list[Any]) -> str:
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if len(numbers) < 2 or len(numbers) < len(values) or len(set(numbers)) == 1:
        return _short(values[0])
    mean, deviation = statistics.fmean(numbers), statistics.stdev(numbers)
    return f"{mean:.4g} ± {deviation:.2g}".replace("-", fmt.MINUS)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Numbers and short texts of nested objects by dotted key; lists are left out."""
    if not isinstance(value, dict):
        return {prefix: value} if prefix and isinstance(value, (int, float, str, bool)) else {}
    out: dict[str, Any] = {}
    for key, inner in value.items():
        out |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return out


def _short(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return fmt.DASH if value is None else str(value)
    return fmt.fixed(value, 0) if float(value).is_integer() else f"{value:.4g}".replace("-", fmt.MINUS)


TABLES = (
    Custom("mesh_state", "MESH: which parameters hold which state", ("mesh_table1", "mesh_table2"), conf.SCALES, roles),
    Custom(
        "mesh_diagnosis",
        "MESH: the explanations that the paper rules out",
        ("mesh_diagnosis",),
        ("smoke", "paper"),
        diagnosis,
    ),
)
