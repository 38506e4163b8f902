"""Command line: ``python -m analysis {tables,figures,report,claims}``."""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
from pathlib import Path

from sonar_repro.errors import UserError

DESCRIPTION = "Tables, figures, report and claims from recorded JSON and published numbers."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{tables,figures,report,claims}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--runs", type=Path, default=Path("runs"), help="folder of records (default: runs)")
    common.add_argument(
        "--out", type=Path, default=Path("analysis/output"), help="folder for the results (default: analysis/output)"
    )
    tables = commands.add_parser("tables", parents=[common], help="write the tables as Markdown, LaTeX and CSV")
    tables.add_argument("--table", help="one table (default: all)")
    tables.add_argument("--scale", help="one scale: smoke, forecast or paper (default: those recorded)")
    tables.add_argument("--print", dest="show", action="store_true", help="print the tables too")
    figures = commands.add_parser("figures", parents=[common], help="draw the figures as PDF and PNG")
    figures.add_argument("--figure", help="one figure (default: all)")
    figures.add_argument("--scale", help="one scale: smoke, forecast or paper (default: those recorded)")
    commands.add_parser("report", parents=[common], help="write one self-contained HTML page with everything")
    claims = commands.add_parser("claims", parents=[common], help="check the papers' sentences against the records")
    claims.add_argument("--paper", choices=("sonar", "mesh"), help="one paper (default: both)")
    return parser


def _run(args: argparse.Namespace) -> int:
    from . import run  # here, so that --help is quick

    where = (args.runs, args.out)
    if args.command == "tables":
        return run.write_tables(*where, name=args.table, scale=args.scale, show=args.show)
    if args.command == "figures":
        return run.write_figures(*where, name=args.figure, scale=args.scale)
    if args.command == "claims":
        return run.write_claims(*where, paper=args.paper)
    return run.write_report(*where)


# What a narrow encoding has no sign for, written as people do without it; a minus must not get lost.
WORDS = ["-", "-", "-", "+/-", "D", "yes", "u", "x", "-", "~", "sec.", "<=", ">=", "...", "->", "beta", "tau", ","]
PLAIN = dict(zip("−–─±Δ✓µ×·≈§≤≥…→βτ˒", WORDS)) | {sign: f"^{n}" for n, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Encoding error handler: plain signs for those that the encoding lacks, a question mark where there is none."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end


def main(argv: list[str] | None = None) -> int:
    """Run one command; a user's mistake ends as one line and exit code 2, a closed pipe in silence."""
    codecs.register_error("plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain")
    args = _parser().parse_args(argv)
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (BrokenPipeError, SystemExit):  # rich makes the first into the second
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to fail at exit
        return 141


if __name__ == "__main__":
    sys.exit(main())
