"""Updates inside backward over several processes: whose gradients a hook sees, and what stays alive on each rank.

**DDP.** The C++ reducer of ``DistributedDataParallel`` allocates flat buckets for every parameter that it looks after
when it is constructed and keeps them for good. An update in its communication hook (``register_comm_hook``, or torch's
own ``_apply_optimizer_in_backward``) comes after the all-reduce, but frees nothing: a gradient the size of the model
stays, as bucket, and once more as ``.grad`` unless ``gradient_as_bucket_view``. So :func:`data_parallel` keeps the
tensors that are updated inside backward out of the reducer, and :class:`HookReduction` averages each in its own hook:
g/N, then an all-reduce that runs while backward goes on, and the update once the next tensor's gradient arrives. Two
tensors' gradients are alive at most, which for experts kept as two tensors a layer is one layer's. Everything else is
DDP's business as usual.

A collective in a hook waits for every rank. Batched expert tensors always get a gradient (zeros for experts that no
token reached), but should one be unused on some rank, the ranks would wait for each other. Before each all-reduce they
therefore tell each other, over a gloo group of their own, which tensor they have, and at the end of backward that it
ended: a difference is an error on every rank at once, and a rank that says nothing is one after ``timeout_s``.

**FSDP2.** ``fully_shard`` reduce-scatters one group of parameters at a time and then calls the hooks of its sharded
parameters: the gradient is this rank's part of the average, ``E/N`` experts of ``[E, m, n]`` (rounded up on the first
ranks; the last may have fewer or none). The sharded gradients of one group are views of one buffer, so experts need
groups of their own: with attention in the same group, its gradient, which waits for the clip, would keep theirs. Whole
(unsharded) gradients live for one group.

Equality: a rank's loss is the mean over its own tokens. With as many supervised tokens on every rank, the average of
the ranks' gradients is the gradient of the joined batch, up to the order of its sum.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from ..errors import UserError
from ..models.experts import find_expert_tensors
from . import group_end
from .attachment import canonical_name
from .inner import HookedTensor, Inner
from .schedule import SHARDED_CLIPS, Schedule

MODES = ("ddp", "fsdp2")
_END = -1  # in place of a tensor's index: this rank's backward pass has ended
_WAY_OUT = (
    "every rank must use every in-backward tensor in every backward pass (add 0 * tensor.sum() to its loss), or train "
    "with a standard_* method under DistributedDataParallel(find_unused_parameters=True)"
)


@dataclass(frozen=True)
class _Reduced:
    """What :func:`data_parallel` left out of a model's reducer; the optimizer looks it up."""

    names: frozenset[str]
    group: Any
    timeout_s: float


_REDUCED: weakref.WeakKeyDictionary[nn.Module, _Reduced] = weakref.WeakKeyDictionary()


def data_parallel(
    model: nn.Module, mode: str, schedule: Schedule | str = "sonar", *, timeout_s: float = 600.0, **options: Any
) -> nn.Module:
    """Make ``model`` train on this process group; then build the :class:`ScheduledOptimizer` on what is returned.

    Call it on every rank. Every rank starts with rank 0's weights (FSDP2: unless they are on the host still).

    Args:
        model: with all its weights, on this rank's device; for FSDP2 on a GPU better on the host: parts are moved.
        mode: ``ddp`` or ``fsdp2``.
        schedule: the method that the optimizer will have: it decides what is updated inside backward.
        timeout_s: DDP: how long a rank waits for the others in a hook before it gives up.
        options: for ``DistributedDataParallel`` or ``fully_shard``.

    Returns:
        DDP: the wrapped model, or ``model`` itself when all of it is updated inside backward. FSDP2: ``model``, sharded
        in place in groups of experts, blocks and the rest.

    Raises:
        UserError: an unknown mode, no process group, a model that is data parallel already.
    """
    if mode not in MODES:
        raise UserError(f"data parallel mode {mode!r}: choose one of {', '.join(MODES)}")
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(f"{mode}: no process group; start with torchrun and call torch.distributed.init_process_group")
    schedule = Schedule.named(schedule) if isinstance(schedule, str) else schedule
    if model in _REDUCED or isinstance(model, DistributedDataParallel) or any(map(is_sharded, model.parameters())):
        raise UserError(f"{mode}: this {type(model).__name__} is data parallel already; wrap a model once")
    if mode == "fsdp2":
        return _sharded(model, options)
    return _replicated(model, schedule, timeout_s, options)


def _replicated(model: nn.Module, schedule: Schedule, timeout_s: float, options: dict[str, Any]) -> nn.Module:
    group = options.get("process_group") or dist.group.WORLD
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    experts = {tensor.name for tensor in find_expert_tensors(model)}
    group_end.end_at_exit(group)
    left_out = {"none": set(), "experts": experts, "all": set(trainable)}[schedule.in_backward]
    _REDUCED[model] = _Reduced(frozenset(map(canonical_name, left_out)), group, timeout_s)
    whole = left_out == set(trainable)  # nothing would be left to DDP, which refuses that
    if options.get("init_sync", True):
        _broadcast(model.state_dict(keep_vars=True) if whole else {name: trainable[name] for name in left_out}, group)
    if whole:
        return model
    if left_out:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(left_out))
    wrapper = DistributedDataParallel(model, **options)
    group_end.hold_group(wrapper)
    return wrapper


def _sharded(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    here = next(model.parameters()).device.type
    if "mesh" not in options:
        device = "cuda" if "nccl" in dist.get_backend_config() else here
        with _without_fake():
            options["mesh"] = init_device_mesh(device, (dist.get_world_size(),))
    if here == options["mesh"].device_type:
        _broadcast(model.state_dict(keep_vars=True), options["mesh"].get_group())
    for group in options["mesh"].get_all_groups():
        group_end.end_at_exit(group)
    for module in _blocks(model):
        fully_shard(module, **options)
    return fully_shard(model, **options)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Expert modules, then the transformer blocks: the children of every ModuleList that has experts below it."""
    modules = dict(model.named_modules())
    names = [tensor.module_name for tensor in find_expert_tensors(model)]
    holders = [modules[name] for name in dict.fromkeys(names)]
    lists = [name for name, m in modules.items() if isinstance(m, nn.ModuleList)]
    with_experts = [name for name in lists if any(holder.startswith(f"{name}.") for holder in names)]
    blocks = [child for name in with_experts for child in modules[name] if next(child.parameters(), None) is not None]
    return [*holders, *(block for block in blocks if block not in holders)]


def _broadcast(tensors: dict[str, Any], group: Any) -> None:
    """Rank 0's values on every rank, as DDP does for what it looks after."""
    if dist.get_backend(group) == "fake":
        return
    source = dist.get_global_rank(group, 0)
    for name in sorted(tensors):
        if isinstance(tensors[name], Tensor):
            dist.broadcast(tensors[name].detach(), src=source, group=group)


def _without_fake() -> Any:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


class HookReduction:
    """Averages hooked gradients over the ranks one after another, in the order in which backward makes them.

    Args:
        names: of the hooked tensors, by index.
        group: the process group of the all-reduce: DDP's own, whose buffers exist already. A second NCCL communicator
            would cost memory and could wait for the first in another order on another rank.
        timeout_s: how long to wait for the other ranks' word.
    """

    def __init__(self, names: Sequence[str], group: Any, timeout_s: float) -> None:
        self.names, self.group, self.timeout_s = list(names), group, timeout_s
        self.size = dist.get_world_size(group)
        self._words: Any = None
        if dist.get_backend(group) != "fake":
            ranks = None if group is dist.group.WORLD else dist.get_process_group_ranks(group)
            self._words = dist.new_group(
                ranks,
                timeout=datetime.timedelta(seconds=timeout_s),
                backend="gloo",
                use_local_synchronization=ranks is not None,
            )
        self._waiting: tuple[HookedTensor, Any] | None = None
        self._task = -1

    def arrived(self, index: int, unit: HookedTensor, use: Callable[[HookedTensor], None]) -> None:
        """A hook has fired: start the average of its gradient, and ``use`` the one that was started before it."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._waiting = task, None
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(use))
        self._agree(index)
        gradient = unit.parameter.grad
        if not gradient.is_contiguous():
            unit.parameter.grad = gradient = gradient.contiguous()
        gradient.mul_(1.0 / self.size)  # as DDP's reducer does, before the sum
        work = dist.all_reduce(gradient, group=self.group, async_op=True)
        self._finish(use)
        self._waiting = (unit, work)

    def _finish(self, use: Callable[[HookedTensor], None]) -> None:
        if self._waiting is not None:
            (unit, work), self._waiting = self._waiting, None
            work.wait()
            use(unit)

    @torch.no_grad()
    def _end(self, use: Callable[[HookedTensor], None]) -> None:
        self._agree(_END)
        self._finish(use)

    def _agree(self, index: int) -> None:
        """Raise RuntimeError on every rank unless all are at the same tensor, or at the end."""
        if self._words is None:
            return
        mine = torch.full((1,), index, dtype=torch.int64, device="cpu")
        words = [torch.zeros_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(words, mine, group=self._words)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise RuntimeError(
                f"rank {dist.get_rank(self.group)} is at {self._place(index)} and after at most {self.timeout_s:g} s "
                f"heard nothing from another rank ({reason}): a hook did not fire there, or that rank has ended; "
                f"{_WAY_OUT}"
            ) from error
        said = [int(word) for word in words]
        if any(other != index for other in said):
            places = "; ".join(f"rank {rank} is at {self._place(other)}" for rank, other in enumerate(said))
            raise RuntimeError(f"a hook did not fire on every rank: {places}; {_WAY_OUT}")

    def _place(self, index: int) -> str:
        return "the end of its backward pass" if index == _END else f"the gradient of {self.names[index]}"


def reduction_for(given: nn.Module, model: nn.Module, units: Sequence[HookedTensor]) -> HookReduction | None:
    """The reduction that hooks need, or None: one process, sharded parameters, nothing updated inside backward.

    Args:
        given: what the optimizer was built on; ``model``: the same without a DDP wrapper.

    Raises:
        UserError: a hooked tensor that DDP averages itself, after its hook; one that is left to a hook it has not got.
    """
    if isinstance(given, DistributedDataParallel):
        group_end.hold_group(given)  # one that data_parallel did not make
    mark = _REDUCED.get(model)
    names = [unit.name for unit in units]
    covered = mark is not None and mark.names >= set(names)
    if not covered and isinstance(given, DistributedDataParallel):
        taken = [name for name in names if name not in given.parameters_to_ignore]
        if taken:
            raise UserError(
                f"{taken[0]} is updated inside backward, before this DistributedDataParallel averages its gradient: "
                "wrap the model with sonar_repro.data_parallel(model, 'ddp', method) instead"
            )
    if mark is not None and (orphans := sorted(mark.names - set(names))):
        raise UserError(
            f"{orphans[0]} was left out of DDP's reducer to be averaged in its hook, but this optimizer keeps its "
            "gradient: give data_parallel the method of the optimizer"
        )
    if not covered or not units or dist.get_world_size(mark.group) == 1:
        return None
    return HookReduction(names, mark.group, mark.timeout_s)


# ---- refusals -----------------------------------------------------------------------------------------------------


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is a DTensor (FSDP2)."""
    return hasattr(parameter, "device_mesh")


def check_sharded(
    model: nn.Module, units: Sequence[HookedTensor], inners: Sequence[Inner], clip: str, folds: bool
) -> None:
    """Refuse what sharded parameters cannot honour. Does nothing for a model without any.

    Raises:
        UserError: a clip that looks at single tensors, folding, 8-bit states, or a hooked tensor whose gradient shares
            its FSDP buffer with one that is kept.
    """
    sharded = next((name for name, p in model.named_parameters() if is_sharded(p)), None)
    if sharded is None:
        return
    if clip not in SHARDED_CLIPS:
        raise UserError(
            f"clip={clip}: not under FSDP2 ({sharded} is sharded); choose {', '.join(SHARDED_CLIPS)}, or DDP"
        )
    if folds:
        raise UserError(f"accumulation_mode=fold: not under FSDP2 ({sharded} is sharded); use update_each, or DDP")
    for inner in inners:
        if type(inner.optimizer).__module__.startswith("bitsandbytes"):
            raise UserError(
                f"{type(inner.optimizer).__name__}: bitsandbytes cannot step the sharded {inner.named[0][0]}; "
                "use adamw, or DDP"
            )
    hooked = {id(unit.parameter) for unit in units}
    for names in _fsdp_groups(model):
        inside = [name for name, p in names if id(p) in hooked]
        outside = [name for name, p in names if p.requires_grad and id(p) not in hooked]
        if inside and outside:
            raise UserError(
                f"{inside[0]} and {outside[0]} are in one FSDP group and share a gradient buffer, which would outlive "
                "the update: call fully_shard on the experts module first, or use sonar_repro.data_parallel"
            )


def _fsdp_groups(model: nn.Module) -> Iterator[list[tuple[str, Parameter]]]:
    """(name, sharded parameter) of each FSDP communication group. Private attributes of torch: none means no groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None) or []
        for group in groups:
            yield [(names.get(id(p.sharded_param), "?"), p.sharded_param) for p in group.fsdp_params]


def refuse_altering_hook(given: nn.Module) -> None:
    """A DDP communication hook that changes values would change the momentum that MESH carries in the gradient.

    Raises UserError for any communication hook but the plain all-reduce.
    """
    hooks = given._comm_hooks if isinstance(given, DistributedDataParallel) else ()
    found = [getattr(hook, "__name__", type(hook).__name__) for hook, _ in hooks]
    if isinstance(given, DistributedDataParallel) and not found:  # C++ hooks are known to the logger only
        found = [name for name in (given._get_ddp_logging_data().get("comm_hook"),) if name]
    for name in (name.rpartition(".")[2] for name in found):
        if name not in ("allreduce_hook", "ALLREDUCE"):
            raise UserError(
                f"DDP communication hook {name}: it would compress or change the momentum that the optimizer hides in "
                "the gradient; leave the hook out, or use the full-state variant (mesh_full, mesh_b_full)"
            )
