"""``python -m sonar_repro.gpu_check [--wheels DIR] [--out FILE.tar.gz] [--minutes 8] [--layers N] [--dry]``."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from .bootstrap import Missing, use_wheels

#: Seconds kept for the forecasts and the tar file.
RESERVE_S = 75.0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sonar_repro.gpu_check", description=sys.modules[__package__].__doc__
    )
    parser.add_argument("--wheels", type=Path, help="folder with wheels of hydra-core, omegaconf and antlr4")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_check.tar.gz"), help="the tar file (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole check (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps an arm (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="fewer layers of the full-size model, for a smaller card")
    parser.add_argument("--only", help="stages to run, by name, with commas between them")
    parser.add_argument("--dry", action="store_true", help="the same code on a tiny model and the CPU, in a minute")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the check. 0: every arm that ran ended as it should; 1: one failed; 2: it could not start."""
    options = arguments(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit from outside still leaves the tar file
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        work = Path(folder)
        try:
            use_wheels(options.wheels, work / "site")
            session, facts = prepare(options, work)
        except Missing as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        try:
            check(options, session, facts)
        except KeyboardInterrupt:
            print("interrupted: what ran is kept", file=sys.stderr)
        finally:
            report(options, work, session, facts)
    return int(any(row["status"] in ("failed", "crashed") for row in session.rows))


def prepare(options: argparse.Namespace, work: Path) -> tuple[Any, dict[str, Any]]:
    """The session and the card's facts; the harness is imported from here on. Raises Missing without a GPU."""
    from .. import machine
    from .clock import Clock
    from .session import Session

    card = machine.first_card()
    if card is None and not options.dry:
        raise Missing("no CUDA GPU is visible; --dry runs the same code on a tiny model and the CPU")
    import torch
    import transformers

    facts = {"name": card.name if card and not options.dry else machine.cpu_name(), "torch": torch.__version__}
    facts |= {"transformers": transformers.__version__, "python": sys.version.split()[0], "dry": options.dry or None}
    if card and not options.dry:
        facts |= {"memory_bytes": card.total_bytes, "capability": ".".join(map(str, card.capability))}
        facts |= machine.gpu_facts(card.uuid)
        shared = machine.shared_card(facts)
        if shared:
            print(f"warning: {shared}", file=sys.stderr)
    clock = Clock(options.minutes, reserve_s=0.0 if options.dry else RESERVE_S)
    return Session(work / "runs", clock, say=lambda line: print(line, flush=True)), facts


def check(options: argparse.Namespace, session: Any, facts: dict[str, Any]) -> None:
    """Measure, forecast, and use what time is left for the stages behind the forecasts."""
    from ..kernels import status
    from . import arms

    setting = arms.Setting(options.dry, options.layers, options.steps)
    free_disk = shutil.disk_usage(session.runs_dir.parent).free
    plan = arms.stages(setting, lambda name: status(name, "cpu" if options.dry else "cuda"), free_disk)
    if options.only:
        plan = [stage for stage in plan if stage.name in options.only.split(",")]
    capability = int(str(facts.get("capability", "9")).split(".")[0])
    workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    behind = [stage for stage in plan if stage.name in ("lengths", "repeat")]
    for stage in plan:
        if stage not in behind:
            if stage.name == "caps" and not stage.arms:
                stage.arms = arms.caps((*setting.base(), *arms.PACKED), between(session.rows))
            session.run_stage(stage)
    session.forecast_all(workers, capability)
    session.clock.release()
    for stage in behind:
        session.run_stage(stage)
    session.forecast_all(workers, capability)  # those of the last stages are recorded already: the arms are the same


def between(rows: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """A cap between Sonar's and the standard schedule's peak, and one below both, from what was just measured."""
    from .summary import peak

    found = {row["name"]: row["record"] for row in rows if row["stage"] == "table1"}
    kinds = ("reserved", "allocated")
    peaks = [
        next((p for k in kinds if (p := peak(found.get(m), "measured", k))), None)
        for m in ("standard_no_expert_clip", "sonar")
    ]
    if None in peaks:
        return []
    return [(sum(peaks) / 2 / 1e9, "adamw"), (0.9 * min(peaks) / 1e9, "adamw")]


def report(options: argparse.Namespace, work: Path, session: Any, facts: dict[str, Any]) -> None:
    """Print the tables and leave the tar file, whatever happened before."""
    from . import summary

    facts["seconds"] = round(session.clock.spent())
    print(summary.text(session.rows, facts), flush=True)
    summary.write(work, options.out, session.rows, facts)
    print(f"\n{options.out}: records, logs and summary; {facts['seconds']} s of {60 * options.minutes:.0f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
