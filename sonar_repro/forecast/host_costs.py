"""What an operator costs the host: measured on a named machine, kept in a file, and scaled by a host speed.

A file ``timing/hosts/<name>.json`` holds microseconds by context (:data:`.recorder.CONTEXTS`) and operator: the time
from the end of the operator before to its own end in the real training step, Python and autograd included, kernel
launches not. ``python -m sonar_repro.forecast.measure_host FILE.json`` writes one for the machine at hand.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from typing import Any

from ..config.schema import host_file
from ..errors import UserError
from .recorder import CONTEXTS, Operator

#: Microseconds of one kernel launch on the host, beside what the operator itself costs. NVIDIA, "Getting Started with
#: CUDA Graphs" (developer blog, 2019): 3.8 us a kernel when launches are queued back to back; 4 to 6 us on a GeForce
#: RTX 5070 Ti (susun-blog.com, pegainfer 3); 2.2 us for a bare precompiled launch (meta-pytorch/tritonbench#1002).
LAUNCH_US = 4.0
#: A kernel of SonicMoE or ScatterMoE is launched from Python by Triton or CuTe: 11 us a Triton launch
#: (meta-pytorch/tritonbench#1002; 8.7 us on GB200, vllm-project/vllm#34838). The libraries' own Python is not here.
LIBRARY_LAUNCH_US = 11.0


@dataclass(frozen=True)
class Host:
    """Measured host costs in microseconds; ``speed`` divides them all (2: a host twice as fast)."""

    name: str
    cpu: str
    operators: dict[str, dict[str, float]]  # context -> operator -> us a call
    tensors: dict[str, dict[str, float]]  # context -> multi-tensor operator -> us a tensor
    default: dict[str, float]  # context -> mean us of an operator
    head_us: float  # before the first operator, a parameter of the model
    tail_us: float  # after the last operator, a parameter of the model

    @property
    def product_us(self) -> float:
        """Microseconds of a matrix product: what a grouped product that loops costs a group."""
        return self.operators["forward"].get("aten::mm", self.default["forward"])

    def cost(self, operator: Operator) -> float:
        """Microseconds of ``operator`` without its launches."""
        if operator.library:
            return 0.0
        if operator.work.tensors > 1:
            each = self.tensors.get(operator.context, {}).get(operator.name)
            if each is not None:
                return each * operator.work.tensors
        by_name = self.operators.get(operator.context, {})
        found = by_name.get(operator.name)
        if found is None:
            found = next((o[operator.name] for o in self.operators.values() if operator.name in o), None)
        return self.default[operator.context] if found is None else found


def _checked(host: Host) -> Host:
    """Every cost is a number of at least 0, and every context has a default. Raises ValueError naming what is not."""
    numbers: dict[str, Any] = {"head_us": host.head_us, "tail_us": host.tail_us}
    for table in ("operators", "tensors"):
        for context, costs in getattr(host, table).items():
            numbers |= {f"{table}.{context}.{name}": value for name, value in costs.items()}
    numbers |= {f"default.{context}": host.default[context] for context in CONTEXTS}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}, not a number of at least 0")
    if not isinstance(host.name, str) or not isinstance(host.operators["forward"], dict):
        raise ValueError("name or operators.forward is missing")
    return host


@functools.cache
def load(name: str) -> Host:
    """A committed host by name, or a file of your own by its path (:func:`sonar_repro.config.schema.host_file`).

    Raises:
        UserError: a file that is not a host's.
    """
    path = host_file(name)
    how = "python -m sonar_repro.forecast.measure_host FILE.json writes one for this machine"
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        keys = ("name", "cpu", "operators", "tensors", "default", "head_us", "tail_us")
        return _checked(Host(**{key: data[key] for key in keys}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"host={name}: {path.name} is no host file ({type(error).__name__}: {error}); {how}") from error
