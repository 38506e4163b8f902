"""Claims of both papers over the records; ``python -m analysis claims``."""

from __future__ import annotations

from collections.abc import Sequence

from ..collection import Collection
from ..published import FILES, Claim, paper
from .evaluate import judge
from .evidence import Verdict

CLAIMS: tuple[Claim, ...] = tuple(claim for name in FILES for claim in paper(name).claims)


def judged(origins: Sequence[Collection]) -> list[tuple[Claim, Verdict]]:
    """Every claim with its verdict, in the papers' order."""
    return [(claim, judge(claim, origins)) for claim in CLAIMS]
