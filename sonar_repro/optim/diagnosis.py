"""What the MESH paper considered as reasons why stateless Sinkhorn fails on routed experts, measured in a run.

Five explanations are named (MESH, diagnosis): route-count sparsity, gate-weight skew, semantic routing, sensitivity to
how expert tensors are cut into matrices, and missing temporal smoothing. The paper prints no figures for them; the
quantities here are ours:

* ``load``: tokens of an expert over its uniform share N k / E, of every step, layer and expert; ``idle``: share of
  (step, layer, expert) without a token;
* ``gate``: effective sample size of an expert's gate weights a, (Σa)² / Σa², over its token count (1: no skew);
* ``semantic``: information that a token's id gives about its expert, I(id; expert) / H(expert), and the same with ids
  shuffled among the positions (what chance gives at this sample size);
* ``partition``: cosine between Sinkhorn of a fused gate/up tensor cut into its two matrices and taken as one;
* ``temporal``: cosine between the gradients of consecutive steps, and between their Sinkhorn directions, a role.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..models.experts import decorated_expert_modules
from .layouts import Layout
from .roles import assign_roles
from .sinkhorn import sinkhorn

#: Gradients are kept at every tenth step and compared with those of the next one.
EVERY = 10
ROLES = ("routed", "shared", "dense")


class Diagnosis:
    """Hooks on a model's experts and gradients that gather the figures while it trains; they change no value.

    Costs a clone of the routed, shared and dense gradients at every tenth step, and a host sync a layer: times of such
    a run are not comparable with others.

    Args:
        model: a transformers MoE that honours its experts interface.
        seed: of the shuffled control of ``semantic``.

    Raises:
        UserError: no such experts module.
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        modules = decorated_expert_modules(model)
        if not modules:
            raise UserError(
                f"{type(model).__name__} has no experts module whose routing can be watched; drop diagnosis"
            )
        self.routing = [Routing() for _ in modules]
        self.temporal: dict[str, list[float]] = defaultdict(list)
        self.step = -1
        self._tokens: Tensor | None = None
        self._generator = torch.Generator().manual_seed(seed)
        self._previous: dict[str, Tensor] = {}
        self._seen: set[str] = set()
        self._handles = [model.register_forward_pre_hook(self._before_model, with_kwargs=True)]
        for routing, (_, module) in zip(self.routing, modules):
            hook = self._before_experts(routing)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for fact in assign_roles(named, model):
            if fact.role in ROLES and fact.layout is not None:
                self._handles.append(fact.parameter.register_hook(self._on_gradient(fact.name, fact.role, fact.layout)))

    def begin_step(self) -> None:
        """Call before each training step."""
        self.step += 1
        self._seen.clear()

    def close(self) -> None:
        """Remove every hook and drop the kept gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._previous.clear()

    # -- routing ---------------------------------------------------------------------------------------------------

    def _before_model(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._tokens = kwargs.get("input_ids", args[0] if args else None) if module.training else None

    def _before_experts(self, routing: Routing) -> Any:
        def watch(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if self._tokens is None or torch._C._current_graph_task_id() != -1:
                return  # evaluation, or a checkpointed block that backward runs again
            names = ("hidden_states", "top_k_index", "top_k_weights")
            given = {**dict(zip(names, args)), **kwargs}
            index, weights = given["top_k_index"].detach(), given["top_k_weights"].detach()
            routing.add(index.cpu(), weights.float().cpu(), experts_of(module), self._tokens.cpu(), self._generator)

        return watch

    # -- gradients -------------------------------------------------------------------------------------------------

    def _on_gradient(self, name: str, role: str, layout: Layout) -> Any:
        def watch(gradient: Tensor) -> None:
            if name in self._seen:
                return  # of an accumulated step the first micro-batch stands for all
            self._seen.add(name)
            if self.step % EVERY == 0:
                self._previous[name] = gradient.detach().clone()
            elif name in self._previous:
                self._compare(role, layout, self._previous.pop(name), gradient.detach())

        return watch

    def _compare(self, role: str, layout: Layout, before: Tensor, now: Tensor) -> None:
        for old, new in zip(layout.views(before.contiguous()), layout.views(now.contiguous())):
            self.temporal[f"gradient_{role}"] += cosines(old, new)
            self.temporal[f"direction_{role}"] += cosines(sinkhorn(old), sinkhorn(new))
        if layout.parts == 2:
            whole = replace(layout, parts=1)
            fused = torch.empty_like(now, dtype=torch.float32)
            for place, view in zip(whole.views(fused), whole.views(now.contiguous())):
                place.copy_(sinkhorn(view))
            for split, one in zip(layout.views(now.contiguous()), layout.views(fused)):
                self.temporal["partition"] += cosines(sinkhorn(split), one)

    def summary(self) -> dict[str, Any]:
        """The record's ``diagnosis``: nested numbers; a share is between 0 and 1, a cosine between -1 and 1."""
        found = {k: sum(v) / len(v) for k, v in self.temporal.items() if v}
        temporal = {
            kind: {role: found[f"{kind}_{role}"] for role in ROLES if f"{kind}_{role}" in found}
            for kind in ("gradient", "direction")
        }
        return {
            "steps": self.step + 1,
            **Routing.summary(self.routing),
            "partition": {"cosine_of_split_and_fused": found.get("partition")},
            "temporal": {f"cosine_of_consecutive_{kind}s": roles for kind, roles in temporal.items()},
        }


class Routing:
    """Counts of one experts module over the training steps."""

    def __init__(self) -> None:
        self.loads: list[Tensor] = []  # [E] a forward pass: tokens over N k / E
        self.effective: list[Tensor] = []  # [E]: (Σa)² / Σa² over the count; nan for an idle expert
        self.pairs: Tensor | None = None  # [2, V, E]: (token id, expert) counts, as routed and shuffled

    def add(self, index: Tensor, weights: Tensor, experts: int, tokens: Tensor, generator: torch.Generator) -> None:
        """One forward pass: ``index`` and ``weights`` ``[N, k]``, ``tokens`` the batch's ids, any shape of N in all."""
        flat, a = index.reshape(-1).long(), weights.reshape(-1)
        real = flat < experts  # an index of E stands for "no expert"
        flat, a = flat[real], a[real]
        count = torch.bincount(flat, minlength=experts).double()
        total = torch.zeros(experts, dtype=torch.float64).index_add_(0, flat, a.double())
        squares = torch.zeros(experts, dtype=torch.float64).index_add_(0, flat, a.double() ** 2)
        self.loads.append(count * experts / index.numel())
        self.effective.append(total**2 / squares / count)
        if tokens.numel() == index.shape[0]:
            self._add_pairs(index, experts, tokens.reshape(-1), generator)

    def _add_pairs(self, index: Tensor, experts: int, tokens: Tensor, generator: torch.Generator) -> None:
        size = int(tokens.max()) + 1
        if self.pairs is None or self.pairs.shape[1] < size:
            grown = torch.zeros(2, size, experts, dtype=torch.float64)
            if self.pairs is not None:
                grown[:, : self.pairs.shape[1]] = self.pairs
            self.pairs = grown
        shuffled = tokens[torch.randperm(len(tokens), generator=generator)]
        for pairs, ids in zip(self.pairs, (tokens, shuffled)):
            for chosen in index.long().T:
                real = chosen < experts
                pairs.index_put_((ids[real], chosen[real]), torch.ones((), dtype=torch.float64), accumulate=True)

    @staticmethod
    def summary(routings: list[Routing]) -> dict[str, Any]:
        """``load``, ``gate`` and ``semantic`` over all modules and steps; null where nothing was routed."""
        loads = torch.stack([load for r in routings for load in r.loads] or [torch.full((1,), torch.nan)])
        ratios = torch.stack([ratio for r in routings for ratio in r.effective] or [torch.full((1,), torch.nan)])
        by_expert = [torch.stack(r.effective).nanmean(0) for r in routings if r.effective]
        information = [mutual_information(r.pairs) for r in routings if r.pairs is not None]
        mean = torch.tensor(information).mean(0).tolist() if information else [None, None]
        return {
            "load": {
                "smallest": number(loads.min()),
                "largest": number(loads.max()),
                "coefficient_of_variation": number(loads.std(-1, unbiased=False).mean()),
                "idle": number((loads == 0).double().mean()),
            },
            "gate": {
                "effective_share_of_tokens": number(ratios.nanmean()),
                "smallest_of_an_expert": number(torch.cat(by_expert).nan_to_num(torch.inf).min())
                if by_expert
                else None,
            },
            "semantic": {"information_of_token_id": mean[0], "shuffled": mean[1]},
        }


def experts_of(module: nn.Module) -> int:
    """E of a batched experts module: dim 0 of its weights."""
    return next(p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 3)


def cosines(a: Tensor, b: Tensor) -> list[float]:
    """Cosine of each pair of matrices ``[B, m, n]``, in float64; pairs with a zero matrix are left out."""
    a, b = a.flatten(1).double(), b.flatten(1).double()
    norms = a.norm(dim=1) * b.norm(dim=1)
    return [float(dot / norm) for dot, norm in zip((a * b).sum(1), norms) if norm > 0]


def mutual_information(pairs: Tensor) -> list[float]:
    """I(row; column) / H(column) of each table of counts ``[..., V, E]``; 0 where the column never varies."""
    shares = []
    for counts in pairs:
        joint = counts / counts.sum()
        row, column = joint.sum(1, keepdim=True), joint.sum(0, keepdim=True)
        information = torch.xlogy(joint, joint).sum() - torch.xlogy(joint, row * column).sum()
        entropy = -torch.xlogy(column, column).sum()
        shares.append(float(information / entropy) if entropy > 0 else 0.0)
    return shares


def number(value: Tensor) -> float | None:
    """A 0-d tensor for strict JSON."""
    return float(value) if bool(torch.isfinite(value)) else None
