"""One function a direction: read the parameter group, build what the pure update functions take, and call them.

``optimizer`` is a :class:`~.mesh.MeshOptimizer`; ``hidden`` maps its hidden parameters to this step's H.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from .controls import BlockScale, Factored, factored_update_, sign_update_, update_statistics_
from .sage import Sage, sage_matrices_, sage_vectors_
from .sinkhorn import Descent, Normalisation, block_mean_square, sinkhorn_update_
from .squares import MatrixBatch, Workspace

MOMENTUM = "H"  # the state key of the expert momentum, hidden or full
Hidden = Mapping[Parameter, Tensor]


def _sources(optimizer: Any, group: dict[str, Any], hidden: Hidden) -> list[tuple[Parameter, Tensor]]:
    """(parameter, what is normalised): G, hidden H, or explicit H ← β1 H + G."""
    momentum = optimizer.settings.rule(group["rule"]).momentum
    if momentum == "hidden":
        return [(p, hidden[p]) for p in group["params"]]
    if momentum == "none":
        return [(p, p.grad) for p in group["params"] if p.grad is not None]
    # Like the hidden buffer, an explicit H moves on when its own parameter got no gradient in this step.
    live = [p for p in group["params"] if p.grad is not None or MOMENTUM in optimizer.state.get(p, {})]
    if all(p.grad is None for p in live):
        return []
    sources = [(p, optimizer._moment(p, MOMENTUM)) for p in live]
    torch._foreach_mul_([h for _, h in sources], group["betas"][0])
    pairs = [(h, p.grad) for p, h in sources if p.grad is not None]
    torch._foreach_add_([h for h, _ in pairs], [g for _, g in pairs])
    return sources


def _descent(group: dict[str, Any]) -> Descent:
    return Descent(group["lr"], group["weight_decay"], group["tau"])


def _batches(optimizer: Any, parameter: Parameter, source: Tensor, block: bool = False) -> list[MatrixBatch]:
    """The logical matrices of a parameter that move in this step, with their V if the rule has blocks."""
    layout = optimizer._roles[parameter].layout
    optimizer._count(parameter)
    views = zip(layout.views(parameter.detach()), layout.views(source.contiguous()))
    batches = [MatrixBatch(w, s, axis=layout.axis) for w, s in views]
    if block:
        v = optimizer._statistic(parameter, "V", layout.statistic_shape(parameter.shape, layout.axis))
        for batch, statistic in zip(batches, layout.statistic_views(v, layout.axis)):
            batch.statistic = statistic
    live = optimizer._live_experts(parameter)
    return batches if live is None else [part for batch in batches for part in _only(batch, live)]


def _only(batch: MatrixBatch, live: Sequence[bool]) -> list[MatrixBatch]:
    """The matrices of live experts: a slice an expert (two matrices of a fused pair)."""
    each = batch.weight.shape[0] // len(live)
    slices = [slice(e * each, (e + 1) * each) for e, alive in enumerate(live) if alive]
    v = batch.statistic
    return [MatrixBatch(batch.weight[s], batch.source[s], None if v is None else v[s], batch.axis) for s in slices]


def _apply_sinkhorn(optimizer: Any, group: dict[str, Any], hidden: Hidden) -> None:
    rule = optimizer.settings.rule(group["rule"])
    from_g = rule.block and group["stat"] == "G" and rule.momentum == "full"
    batches = []
    for parameter, source in _sources(optimizer, group, hidden):
        batches += _batches(optimizer, parameter, source, rule.block)
        if from_g and parameter.grad is not None:
            layout = optimizer._roles[parameter].layout
            parts = layout.statistic_views(optimizer.state[parameter]["V"], layout.axis)
            for raw, v in zip(layout.views(parameter.grad.contiguous()), parts):
                update_statistics_([v], [block_mean_square(MatrixBatch(raw, raw, axis=layout.axis))], group["betas"][1])
    scale = BlockScale(group["betas"][1], group["bounds"], update=not from_g) if rule.block else None
    how = Normalisation(group["rounds"], group["eps"], group["form"])
    sinkhorn_update_(batches, _descent(group), how, multiplier=scale)


def _apply_sign(optimizer: Any, group: dict[str, Any], hidden: Hidden) -> None:
    for parameter, source in _sources(optimizer, group, hidden):
        sign_update_(_batches(optimizer, parameter, source), _descent(group))


def _apply_factored(optimizer: Any, group: dict[str, Any], hidden: Hidden) -> None:
    for parameter, source in _sources(optimizer, group, hidden):
        batches = _batches(optimizer, parameter, source)
        layout = optimizer._roles[parameter].layout
        found = []
        for key, axis in (("row", "rows"), ("column", "columns")):
            state = optimizer._statistic(parameter, key, layout.statistic_shape(parameter.shape, axis))
            found.append(layout.statistic_views(state, axis))
        how = Factored(group["betas"][1], optimizer.state[parameter]["step"])
        factored_update_(batches, found[0], found[1], _descent(group), how)


def _apply_sage(optimizer: Any, group: dict[str, Any], hidden: Hidden) -> None:
    workspace = Workspace()
    for p in group["params"]:
        if p.grad is None:
            continue
        layout, weight, m = optimizer._roles[p].layout, p.detach(), optimizer._moment(p, "m")
        values = (group[k] for k in ("lr", "weight_decay", "betas", "eps", "order"))
        how = Sage(*values, step=optimizer._count(p))
        if layout is None:
            sage_vectors_(weight, p.grad, m, optimizer._statistic(p, "s", p.shape), how)
            continue
        s = optimizer._statistic(p, "s", layout.statistic_shape(p.shape, "columns"))
        views = (layout.views(t) for t in (weight, p.grad.contiguous(), m))
        for w, g, moment, row in zip(*views, layout.statistic_views(s, "columns")):
            sage_matrices_(w, g, moment, row, how, workspace)


def _apply_adamw(optimizer: Any, group: dict[str, Any], hidden: Hidden) -> None:
    """torch's own AdamW, fused where every tensor allows it: the same bits as ``torch.optim.AdamW``."""
    params = [p for p in group["params"] if p.grad is not None]
    if not params:
        return
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in params)
    for p in params:
        if "step" not in optimizer.state[p]:
            optimizer.state[p]["step"] = torch.zeros((), device=p.device if fused else "cpu")
    adamw(
        params,
        [p.grad for p in params],
        [optimizer._moment(p, "exp_avg") for p in params],
        [optimizer._moment(p, "exp_avg_sq") for p in params],
        [],
        [optimizer.state[p]["step"] for p in params],
        fused=fused,
        foreach=False,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    if fused:
        # The fused kernel does not bump version counters: autograd could not see that a weight changed.
        for p in params:
            torch.autograd.graph.increment_version(p)


DIRECTIONS: dict[str, Callable[[Any, dict[str, Any], Hidden], None]] = {
    "sinkhorn": _apply_sinkhorn,
    "sign": _apply_sign,
    "factored": _apply_factored,
    "sage": _apply_sage,
    "adamw": _apply_adamw,
}
