"""What a data set is, as configuration: one dataclass for instructions and text, embedded, hub or the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import UserError

KINDS = ("instructions", "text")
SOURCES = ("embedded", "hub", "path")
PROMPTS = ("alpaca",)

# Commits of the two public data sets (both the head of `main` since 2023 and 2025): a re-upload cannot change a run
# unseen.
ALPACA_ID, ALPACA_REVISION = "tatsu-lab/alpaca", "dce01c9b08f87459cf36a430d809084718273017"
FINEWEB_EDU_ID, FINEWEB_EDU_REVISION = "HuggingFaceFW/fineweb-edu", "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
FINEWEB_EDU_SUBSET = "sample-10BT"


@dataclass
class DataSpec:
    """One data set and the part of it that is used.

    ``name`` goes to the record and the tables, so it says what the data is. ``seed`` shuffles before the split, so
    that every arm and every run seed sees the same training and held-out examples; the order within training follows
    the run's seed.

    Attributes:
        kind: ``instructions`` (prompt and response, loss on the response) or ``text`` (packed sequences, loss on
            every token).
        source: ``embedded`` (in the package), ``hub`` (``hub_id`` at ``revision``) or ``path`` (a local file or
            directory).
        path: JSONL, JSON or Parquet file, or a directory of them; only with ``source=path``.
        subset: the hub's configuration name (``sample-10BT``), if the data set has several.
        train_examples: instructions: the first N of the shuffled order; text: training sequences, ``None`` for all
            there are (not allowed for a streamed hub set).
        heldout_start: instructions: first held-out position in the shuffled order, ``None`` for ``train_examples``.
            Text: ``None`` or 0, as held-out documents come first in the shuffled order, before training.
        heldout_count: held-out examples, or packed held-out sequences.
        max_length: tokens; instructions are cut there, text is packed to exactly that.
    """

    name: str = "embedded_instructions"
    kind: str = "instructions"
    source: str = "embedded"
    path: str | None = None
    hub_id: str | None = None
    revision: str | None = None
    subset: str | None = None
    train_examples: int | None = 512
    heldout_start: int | None = None
    heldout_count: int = 64
    max_length: int = 64
    seed: int = 42
    prompt: str = "alpaca"

    @classmethod
    def of(cls, config: Any) -> DataSpec:
        """Take the fields above from a dataclass, a mapping or an OmegaConf node, and check them.

        Raises:
            UserError: as :meth:`check`.
        """
        if isinstance(config, cls):
            config.check()
            return config
        given = config if isinstance(config, Mapping) else vars(config)
        spec = cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})
        spec.check()
        return spec

    def check(self) -> None:
        """Check every field against the others.

        Raises:
            UserError: names the dotted key, its value and what is allowed.
        """
        for key, allowed in (("kind", KINDS), ("source", SOURCES), ("prompt", PROMPTS)):
            if getattr(self, key) not in allowed:
                raise UserError(f"data.{key}={getattr(self, key)!r}: choose one of {', '.join(allowed)}")
        self._check_source()
        self._check_counts()

    def _check_source(self) -> None:
        if self.source == "path" and not self.path:
            raise UserError(
                "data.source=path needs data.path=FILE: a JSONL, JSON or Parquet file, or a directory of them"
            )
        if self.source != "path" and self.path:
            raise UserError(f"data.path={self.path} is not read with data.source={self.source}: set data.source=path")
        if self.source == "hub" and not (self.hub_id and self.revision):
            raise UserError(
                "data.source=hub needs data.hub_id and data.revision (a commit, so that the data cannot change unseen)"
            )

    def _check_counts(self) -> None:
        text, train, start = self.kind == "text", self.train_examples, self.heldout_start
        if train is None and not (text and self.source != "hub"):
            raise UserError("data.train_examples=null: give a number (all of it is possible for local text only)")
        if train is not None and train < 1:
            raise UserError(f"data.train_examples={train}: must be at least 1")
        if self.heldout_count < 0:
            raise UserError(f"data.heldout_count={self.heldout_count}: must be 0 or more")
        if self.max_length < 2:
            raise UserError(f"data.max_length={self.max_length}: must be at least 2, as each token predicts the next")
        if self.seed < 0:
            raise UserError(f"data.seed={self.seed}: must be 0 or more")
        if text and start not in (None, 0):
            raise UserError(f"data.heldout_start={start}: held-out text always comes first; leave it null")
        if not text and start is not None and self.heldout_count and start < train:
            raise UserError(
                f"data.heldout_start={start} lies inside the {train} training examples: "
                f"use data.heldout_start={train} or more, or fewer data.train_examples"
            )

    @property
    def heldout_range(self) -> tuple[int, int]:
        """Held-out positions ``[start, stop)`` in the shuffled order of an instruction set."""
        start = self.train_examples if self.heldout_start is None else self.heldout_start
        return start, start + self.heldout_count

    @property
    def rows_needed(self) -> int:
        """Rows that an instruction set must have for this training and held-out selection."""
        return max(self.train_examples, self.heldout_range[1] if self.heldout_count else 0)
