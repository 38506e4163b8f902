"""What is wrong with a data config, before anything is read: one line with the key, the value and the way out."""

from __future__ import annotations

from ..config.schema import DataConfig
from ..errors import UserError
from .rows import check_file

KINDS = ("instructions", "text")
SOURCES = ("embedded", "hub", "path", "synthetic")


def check_data(data: DataConfig) -> None:
    """Check every field against the others; of a forecast's ``source=synthetic`` only what it uses.

    Raises:
        UserError: names the dotted key, its value and what is allowed.
    """
    for key, allowed in (("kind", KINDS), ("source", SOURCES)):
        if getattr(data, key) not in allowed:
            raise UserError(f"data.{key}={getattr(data, key)!r}: choose one of {', '.join(allowed)}")
    if data.max_length < 2:
        raise UserError(f"data.max_length={data.max_length}: must be at least 2, as each token predicts the next")
    _check_source(data)
    if data.source != "synthetic":
        _check_counts(data)


def _check_source(data: DataConfig) -> None:
    if data.source != "path" and data.path:
        raise UserError(
            f"data.path={data.path} is not read with data.source={data.source}: choose data=own with it "
            "(python -m sonar_repro data=own data.path=FILE)"
        )
    if data.source == "path":
        if not data.path:
            raise UserError("data.source=path needs data.path=FILE: a JSONL, JSON or Parquet file")
        check_file(data.path)
    if data.source == "hub" and not (data.hub_id and data.revision):
        raise UserError(
            "data.source=hub needs data.hub_id and data.revision (a commit, so that the data cannot change unseen)"
        )


def _check_counts(data: DataConfig) -> None:
    text, train, start = data.kind == "text", data.train_examples, data.heldout_start
    if train is None and not (text and data.source != "hub"):
        raise UserError("data.train_examples=null: give a number (all of it is possible for local text only)")
    if train is not None and train < 1:
        raise UserError(f"data.train_examples={train}: must be at least 1")
    if data.heldout_count < 0:
        raise UserError(f"data.heldout_count={data.heldout_count}: must be 0 or more")
    if text and start not in (None, 0):
        raise UserError(f"data.heldout_start={start}: held-out text always comes first; leave it null")
    if not text and start is not None and data.heldout_count and start < (train or 0):
        raise UserError(
            f"data.heldout_start={start} lies inside the {train} training examples: "
            f"use data.heldout_start={train} or more, or fewer data.train_examples"
        )


def require_rows(data: DataConfig, available: int) -> None:
    """Refuse an instruction set that is smaller than its selection.

    Raises:
        UserError: with the rows that are there and those that are needed.
    """
    if data.rows_needed > available:
        start, stop = data.heldout_range
        raise UserError(
            f"data.name={data.name}: {available} rows, but train_examples={data.train_examples} and held-out positions "
            f"{start}-{stop - 1} need {data.rows_needed}: lower data.train_examples, data.heldout_start or "
            "data.heldout_count"
        )
