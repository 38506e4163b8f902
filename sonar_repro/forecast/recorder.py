"""Records the operators of a step, in order, with the work each does: an observer of the allocation tracker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..instruments.events import OPTIMIZER
from ..methods import ranges
from .declared_work import Kernel, listening
from .kernel_model import CHUNK, KernelModel, Work, foreach_group

KINDS = ("forward_backward", "clipping", "optimizer")  # the parts of Figure 3
FORWARD_BACKWARD, CLIPPING, OPTIMIZING = range(3)
#: Where the host is when it runs an operator; what it costs depends on it (:mod:`.host`). ``hook``: clipping and
#: optimizer inside backward; ``piece``: further optimizer calls of the same hook (one an expert); ``end``: of the step.
CONTEXTS = ("forward", "backward", "hook", "piece", "end")


class Context:
    """Names the context of operators, asked in order; the measurement of a host and the recorder share it."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._again = False

    def __call__(self, name: str, at_end: bool) -> str:
        """Context of operator ``name``; ``at_end``: the step's own optimizer work is going on."""
        in_backward = torch._C._current_graph_task_id() != -1
        if ranges.innermost() is not None and in_backward:
            self._again = self._again or name in self._seen
            self._seen.add(name)
            return "piece" if self._again else "hook"
        self._seen.clear()
        self._again = False
        if in_backward:
            return "backward"
        return "end" if at_end or ranges.innermost() is not None else "forward"


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a recorded step."""

    name: str  # as in the dispatcher, without overload: aten::mm
    work: Work
    context: str  # one of CONTEXTS
    kind: int  # index into KINDS
    micro_batch: int
    library: bool = False  # declared, not seen by the dispatcher
    live: int = 0  # bytes allocated when it has run


@dataclass
class RecordedStep:
    """A step's operators and the lengths of its micro-batches in tokens a sequence."""

    lengths: list[int]
    operators: list[Operator] = field(default_factory=list)


class StepRecorder:
    """Keeps the last two steps that were recorded; ``with recorder:`` around the run, the object itself as observer.

    Operators in a row that take norms or scale gradients one tensor at a time inside clipping are one multi-tensor
    operator on CUDA, and become one here.
    """

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []
        self._model = KernelModel()
        self._step: RecordedStep | None = None
        self._micro_batch = 0
        self._context_of = Context()
        self._context, self._kind = "forward", FORWARD_BACKWARD
        self._run: list[Tensor] = []  # gradients of the clipping operators in a row
        self._run_name, self._run_context = "", "end"
        self._stack = ExitStack()
        self.live: Callable[[], int] = lambda: 0  # the meter's count of allocated bytes

    def __enter__(self) -> StepRecorder:
        self._stack.enter_context(ranges.watching())
        self._stack.enter_context(listening(self._declared))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    def step(self, lengths: list[int]) -> None:
        """The next operators are those of a step at these lengths."""
        self._close_run()
        self.steps = self.steps[-1:]
        self._step = RecordedStep(list(lengths))
        self.steps.append(self._step)
        self._micro_batch = 0

    def micro_batch(self, index: int) -> None:
        """The next operators belong to micro-batch ``index``."""
        self._micro_batch = index

    def end(self) -> None:
        """The step is over."""
        self._close_run()
        self._step = None

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, region: int) -> None:
        """Observe one operator (:class:`~sonar_repro.instruments.tracker.AllocationTracker`)."""
        if self._step is None:
            return
        work = self._model.work(func, args, kwargs, result)
        if work is None:
            return
        name = func._schema.name
        self._kind = _KIND_OF_RANGE.get(ranges.innermost(), FORWARD_BACKWARD)
        self._context = self._context_of(name, region == OPTIMIZER)
        if self._kind == CLIPPING and _ONE_TENSOR.get(name):
            self._one_of_many(_ONE_TENSOR[name], args)
            return
        self._add(name, work)

    def _one_of_many(self, name: str, args: Any) -> None:
        if name != self._run_name:
            self._close_run()
            self._run_name, self._run_context = name, self._context
        self._run.append(args[0])

    def _close_run(self) -> None:
        if not self._run or self._step is None:
            self._run = []
            return
        sizes, name = [t.numel() for t in self._run], self._run_name
        work = foreach_group(sizes, [t.element_size() for t in self._run], writes=name.endswith("_"))
        if len(sizes) == 1 and sizes[0] <= CHUNK:  # the norm of the norms is no list
            name, work = "aten::linalg_vector_norm", Work(work.nbytes)
        self._run, self._run_name = [], ""
        now, self._context = self._context, self._run_context
        self._append(name, work, False, CLIPPING)
        self._context = now

    def _add(self, name: str, work: Work) -> None:
        self._close_run()
        self._append(name, work, False, self._kind)

    def _append(self, name: str, work: Work, library: bool, kind: int) -> None:
        operator = Operator(name, work, self._context, kind, self._micro_batch, library, self.live())
        self._step.operators.append(operator)

    def _declared(self, kernel: Kernel) -> None:
        if self._step is None:
            return
        self._context = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        work = Work(
            kernel.nbytes,
            kernel.flops,
            kernel.launches,
            kernel.expert_bytes,
            kernel.tokens,
            kernel.top_k,
            kernel.experts,
        )
        self._append(kernel.name, work, True, FORWARD_BACKWARD)


_KIND_OF_RANGE = {ranges.CLIP: CLIPPING, ranges.OPTIMIZER: OPTIMIZING}
#: Per-tensor operators of ``clip_grad_norm_`` where foreach is not supported, and what CUDA runs instead.
_ONE_TENSOR = {"aten::linalg_vector_norm": "aten::_foreach_norm", "aten::mul_": "aten::_foreach_mul_"}
