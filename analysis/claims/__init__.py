"""Claims of both papers over the records; ``python -m analysis claims``."""

from __future__ import annotations

from collections.abc import Sequence

from ..collection import Collection
from . import mesh, sonar
from .base import Claim, Verdict, judge

CLAIMS: tuple[Claim, ...] = (*sonar.CLAIMS, *mesh.CLAIMS)


def judged(origins: Sequence[Collection]) -> list[tuple[Claim, Verdict]]:
    """Every claim with its verdict, in the papers' order."""
    return [(claim, judge(claim, origins)) for claim in CLAIMS]
