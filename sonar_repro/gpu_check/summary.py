"""What the check found: printed tables, ``summary.json``, and the tar file with the records."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

from ..records import finite

PHASES = ("load", "warmup", "measured")
KINDS = ("allocated", "reserved")
#: What travels: records, logs, snapshots; not weights or checkpoints.
LEFT_OUT = (".safetensors", ".pt", ".lock", ".tmp")


def peak(record: dict[str, Any] | None, phase: str, kind: str) -> int | None:
    """Peak bytes of a record's phase, or None."""
    block = ((record or {}).get("memory") or {}).get(phase) or {}
    return block.get(f"peak_{kind}_bytes")


def error_percent(forecast: int | None, measured: int | None) -> float | None:
    """(forecast - measured) / measured in percent."""
    return None if not forecast or not measured else 100 * (forecast - measured) / measured


def memory_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measured and forecast peaks by arm, phase and kind, with the error, for arms that have both records."""
    found = []
    for row in rows:
        if row["record"] and row["forecast"]:
            for phase in PHASES:
                for kind in KINDS:
                    measured, forecast = (peak(row[key], phase, kind) for key in ("record", "forecast"))
                    named = {"stage": row["stage"], "name": row["name"], "phase": phase, "kind": kind}
                    error = error_percent(forecast, measured)
                    found.append({**named, "measured": measured, "forecast": forecast, "error_percent": error})
    return found


def time_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median step time by arm, and its ratio to standard_global_clip of the same stage (else of Table 1's)."""
    medians = {
        (row["stage"], row["name"]): (row["record"]["time"] or {}).get("median_s") for row in rows if row["record"]
    }
    base = "standard_global_clip"
    found = []
    for (stage, name), median in medians.items():
        reference = medians.get((stage, base)) or medians.get(("table1", base))
        if median and stage not in ("caps", "table4"):
            ratio = median / reference if reference else None
            found.append({"stage": stage, "name": name, "median_s": median, "ratio": ratio})
    return found


def text(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The printed summary."""
    lines = ["", "card: " + ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)]
    lines += ["", "memory, measured beside forecast (GB = 1e9 bytes; error = forecast over measured)"]
    if facts.get("dry"):
        lines.append("  dry: a tiny model on a CPU, which has no cuBLAS workspaces; only a GPU's errors mean anything")
    lines.append(f"  {'arm':<52}{'phase':<10}{'kind':<11}{'measured':>9}{'forecast':>10}{'error':>9}")
    for row in memory_rows(rows):
        told = row["measured"] is not None and row["stage"] != "caps" and row["phase"] != "warmup"
        if told and (row["phase"], row["kind"]) != ("load", "reserved"):
            name = f"{row['stage']}: {row['name']}"
            cells = f"{_gb(row['measured']):>9}{_gb(row['forecast']):>10}{_percent(row['error_percent']):>9}"
            lines.append(f"  {name:<52}{row['phase']:<10}{row['kind']:<11}{cells}")
    lines += ["", "step time (median; ratio to standard_global_clip of the same stage, else of table1)"]
    for row in time_rows(rows):
        ratio = "" if row["ratio"] is None else f"{row['ratio']:8.3f}"
        lines.append(f"  {row['stage'] + ': ' + row['name']:<52}{1e3 * row['median_s']:9.1f} ms{ratio}")
    lines += [*_caps(rows), *_compared(rows), *_parity(rows)]
    lines += ["", "not run, or not well"]
    odd: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] not in ("ok", "oom"):
            odd.setdefault(f"{row['stage']}: {row['status']}, {row['why']}", []).append(row["name"])
    lines += [f"  {why} ({', '.join(names)})" for why, names in odd.items()] or ["  nothing"]
    return "\n".join(lines)


def _caps(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["", "caps: what happened, and what the forecast said"]
    for row in rows:
        if row["stage"] == "caps" and row["record"]:
            where = f" ({row['why']})" if row["why"] else ""
            lines.append(
                f"  {row['name']:<52}{row['status']:<8}{(row['forecast'] or {}).get('status', '-'):<8}{where[:90]}"
            )
    return lines


def _compared(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["", "weights that differ after three steps (expert; other)"]
    for row in rows:
        compared = (row["record"] or {}).get("compare")
        if compared:
            kinds = (compared["expert"], compared["other"])
            told = "; ".join(f"{kind['differing']:,} of {kind['total']:,}" for kind in kinds)
            lines.append(f"  {row['name']:<58}{told}")
    return lines


def _parity(rows: list[dict[str, Any]]) -> list[str]:
    found = {}
    for row in rows:
        environment = (row["record"] or {}).get("environment") or {}
        parity = environment.get("parity") or {}
        if parity.get("compared"):
            found[environment["experts_implementation"]] = parity
    lines = ["", "kernels against eager, largest relative error (bound)"]
    return lines + [f"  {name:<20}{p['max_relative_error']:.2e} ({p['tolerance']:g})" for name, p in found.items()]


def _gb(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e9:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}%"


def write(folder: Path, tar: Path, rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write ``summary.txt`` and ``summary.json`` beside the records, and all of it as one tar file."""
    told = text(rows, facts)
    (folder / "summary.txt").write_text(told + "\n", encoding="utf-8")
    kept = [{key: row[key] for key in ("stage", "name", "status", "why")} for row in rows]
    data = {"facts": facts, "arms": kept, "memory": memory_rows(rows), "time": time_rows(rows)}
    (folder / "summary.json").write_text(json.dumps(finite(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    tar.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(tar, "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if path.is_file() and parts[0] != "site" and not path.name.endswith(LEFT_OUT) and "checkpoint" not in parts:
                archive.add(path, arcname=str(Path("gpu_check", *parts)))
