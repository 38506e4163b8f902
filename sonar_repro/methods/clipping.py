"""What is clipped, and the norm that is reported with its scope."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from .inner import HookedTensor


@dataclass(frozen=True)
class ClipReport:
    """Norm before clipping (0-d tensor on the gradients' device, not synchronised) and whose norm it is.

    ``norm`` is ``None`` when nothing was measured; it is never 0 for "not measured".
    """

    norm: Tensor | None
    scope: str  # all | non_expert | none


class ScopedClip:
    """Clip the joint norm of the gradients that are left at the end of backward (``clip=all|non_expert|none``)."""

    passes = 1

    def __init__(self, scope: str, max_norm: float | None) -> None:
        self.scope = scope if max_norm is not None else "none"
        self.max_norm = max_norm

    def update_now(self, unit: HookedTensor) -> bool:
        """Called when a hooked tensor's gradient is complete: whether its optimizer steps at once."""
        return True

    def finish(self, parameters: Iterable[Parameter]) -> ClipReport:
        """Clip what is left of the scope's gradients, in place, exactly as ``clip_grad_norm_`` does."""
        if self.scope == "none":
            return ClipReport(None, "none")
        left = [p for p in parameters if p.grad is not None]
        if not left:
            return ClipReport(None, self.scope)
        return ClipReport(torch.nn.utils.clip_grad_norm_(left, self.max_norm), self.scope)
