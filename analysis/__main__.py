"""Command line: ``python -m analysis {tables,figures,report,claims,check-report}``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sonar_repro.errors import UserError

DESCRIPTION = "Tables, figures, report and claims from recorded JSON and published numbers."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis", description=DESCRIPTION)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{tables,figures,report,claims,check-report}"
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--runs", type=Path, default=Path("runs"), help="folder of records (default: runs)")
    common.add_argument(
        "--out", type=Path, default=Path("analysis/output"), help="folder for the results (default: analysis/output)"
    )
    tables = commands.add_parser("tables", parents=[common], help="write the tables as Markdown, LaTeX and CSV")
    tables.add_argument("--table", help="one table (default: all)")
    tables.add_argument("--scale", help="one scale: smoke, forecast or paper (default: those recorded)")
    tables.add_argument("--print", dest="show", action="store_true", help="print the tables too")
    return parser


def _tables(args: argparse.Namespace) -> int:
    from .run import write_tables

    return write_tables(args.runs, args.out, name=args.table, scale=args.scale, show=args.show)


COMMANDS = {"tables": _tables}


def main(argv: list[str] | None = None) -> int:
    """Run one command; a user's mistake ends as one line and exit code 2."""
    args = _parser().parse_args(argv)
    try:
        return COMMANDS[args.command](args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 141


if __name__ == "__main__":
    sys.exit(main())
