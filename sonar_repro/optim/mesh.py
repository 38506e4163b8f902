"""MESH and its relatives: one optimizer class, built from a role -> rule table (:mod:`.settings`).

    optimizer = build(list(model.named_parameters()), model, variant="mesh_b")
    for batches in data:
        optimizer.zero_grad()
        optimizer.prepare()                    # hidden momentum: p.grad ← β1 H, before the first backward
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()
        optimizer.step()
        scheduler.step()

Expert update (MESH): H ← β1 H + G; W ← (1 − lr·wd) W − lr·τ·q ⊙ Sinkhorn(H), q = 1 or MESH-B's block multiplier. An
expert that gets no token keeps moving at full length along its decaying H: Sinkhorn ignores scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..errors import UserError
from .apply import DIRECTIONS, MOMENTUM
from .hidden import HiddenMomentum, expert_is_live
from .roles import ROLES, Named, ParameterRole, assign_roles
from .settings import VARIANTS, Settings, make_settings
from .squares import arithmetic_dtype


class MeshOptimizer(torch.optim.Optimizer):
    """An optimizer with one rule a role. Use :func:`build`.

    Args:
        roles: what each parameter is (:func:`~.roles.assign_roles`); each is owned once.
        settings: checked hyperparameters.

    Attributes:
        hidden_parameters: whose gradient is expert momentum (or feeds an explicit one): never clipped.
        last_clip_norm: norm before clipping of everything else, a 0-d tensor; ``None`` without ``clip``.
        steps: completed steps.

    State by parameter: ``step``; ``m``, ``s`` (SAGE); ``exp_avg``, ``exp_avg_sq`` (AdamW); ``H`` (momentum; a hidden
    one is in the state dict, not in :meth:`optimizer_state_bytes`); ``V`` (MESH-B); ``row``, ``column`` (factored-v).
    """

    def __init__(self, roles: Sequence[ParameterRole], settings: Settings) -> None:
        self.settings = settings
        self._roles = {r.parameter: r for r in roles}
        members = {role: [r.parameter for r in roles if r.role == role] for role in ROLES}
        groups = [{"params": params, **settings.group(role)} for role, params in members.items() if params]
        super().__init__(groups, {})
        self.steps = 0
        self.last_clip_norm: Tensor | None = None
        momentum = {p: settings.rule(g["rule"]).momentum for g in self.param_groups for p in g["params"]}
        self.hidden_parameters = [p for p, kind in momentum.items() if kind != "none"]
        hidden = [(r.name, r.parameter) for r in roles if momentum[r.parameter] == "hidden"]
        hold = settings.idle == "hold"
        options = {"diagnostics": settings.diagnostics, "watch_idle": hold}
        self._hidden = HiddenMomentum(hidden, self._stored_momentum, **options) if hidden else None
        self._ready = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the constructor: a later parameter would have no role. Raises UserError afterwards."""
        if getattr(self, "_ready", False):
            raise UserError("add_param_group after the optimizer was built: unfreeze or add parameters, then build it")
        super().add_param_group(param_group)

    def _stored_momentum(self, parameter: Parameter) -> Tensor | None:
        return self.state[parameter].get(MOMENTUM) if parameter in self.state else None

    # ---- the step -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Hidden momentum: p.grad ← β1 H. Call it after zero_grad and before the first backward of a step.

        Idempotent until ``step``; does nothing for variants without hidden momentum. Raises UserError if a gradient is
        there already.
        """
        if self._hidden:
            beta1 = {p: group["betas"][0] for group in self.param_groups for p in group["params"]}
            self._hidden.prepare(beta1.__getitem__)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient or momentum.

        Raises:
            UserError: hidden momentum that was not prepared, or that something else touched (each message says what).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                self.prepare()
                loss = closure()
        hidden = self._hidden.collect() if self._hidden else {}
        self._clip()
        for group in self.param_groups:
            rule = self.settings.rule(group["rule"])
            DIRECTIONS[rule.direction](self, group, hidden)
        for parameter, buffer in hidden.items():
            self.state[parameter][MOMENTUM] = buffer
        if self._hidden:
            self._hidden.stash()
        self.steps += 1
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by ``GradScaler.step``: one inf would destroy H, and scaled gradients would be summed into it."""
        if self._hidden:
            raise UserError(
                "GradScaler (fp16) with hidden momentum: one overflow destroys H; train in bf16, or use the full-state "
                "variant (mesh_full, mesh_b_full)"
            )
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; a prepared hidden buffer stays (it holds no gradient before the first backward).

        Raises UserError if a backward pass has already been accumulated into hidden momentum.
        """
        slots = {slot.parameter for slot in self._hidden.slots} if self._hidden else set()
        if self._hidden:
            self._hidden.zero_grad()
        for group in self.param_groups:
            for p in group["params"]:
                if p in slots or p.grad is None:
                    continue
                if set_to_none:
                    p.grad = None
                else:
                    p.grad.detach_().zero_()

    def clippable_parameters(self) -> list[Parameter]:
        """Everything outside expert momentum: what a global norm may measure and scale."""
        out = set(self.hidden_parameters)
        return [p for group in self.param_groups for p in group["params"] if p not in out]

    def accept_gradients(self) -> None:
        """Call after changing gradients by hand in a way that is right for H too, such as an all-reduce mean.

        Hidden momentum refuses any other write between prepare and step; DDP needs no such call.
        """
        if self._hidden:
            self._hidden.accept()

    def _live_experts(self, parameter: Parameter) -> list[bool] | None:
        """Which experts of a routed tensor move in this step (``idle=hold``); ``None``: all."""
        role = self._roles[parameter]
        if self.settings.idle == "move" or role.role != "routed" or parameter.ndim < 3:
            return None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise UserError("idle='hold' in several processes: each sees its own tokens only; use idle='move'")
        if self._hidden and self._hidden.owns(parameter):
            live = self._hidden.live_experts(parameter)
        else:
            live = None if parameter.grad is None else expert_is_live(parameter.grad)
        if live is None:
            return [False] * parameter.shape[0]
        return live.tolist() if type(live) is Tensor else None  # fake tensors have no values: all move

    def _clip(self) -> None:
        if self.settings.clip is not None:
            self.last_clip_norm = nn.utils.clip_grad_norm_(self.clippable_parameters(), self.settings.clip)

    # ---- state --------------------------------------------------------------------------------------------------

    def _statistic(self, parameter: Parameter, key: str, shape: Sequence[int]) -> Tensor:
        """A small fp32 state (fp64 for fp64 parameters), zeros at the start."""
        state = self.state[parameter]
        if key not in state:
            state[key] = torch.zeros(shape, dtype=arithmetic_dtype(parameter.dtype), device=parameter.device)
        return state[key]

    def _moment(self, parameter: Parameter, key: str) -> Tensor:
        state = self.state[parameter]
        if key not in state:
            state[key] = torch.zeros_like(parameter)
        return state[key]

    def _count(self, parameter: Parameter) -> int:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        return state["step"]

    def optimizer_state_bytes(self) -> int:
        """Bytes of all optimizer state tensors, without the hidden buffers (MESH's accounting)."""
        hidden = {slot.parameter for slot in self._hidden.slots} if self._hidden else set()
        return sum(
            value.numel() * value.element_size()
            for parameter, state in self.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and not (key == MOMENTUM and parameter in hidden)
        )

    def hidden_buffer_bytes(self) -> int:
        """Bytes of the hidden momentum, wherever it is at the moment (between steps or attached to the gradients)."""
        if not self._hidden:
            return 0
        buffers = [
            slot.buffer if slot.attached else self._stored_momentum(slot.parameter) for slot in self._hidden.slots
        ]
        return sum(b.numel() * b.element_size() for b in buffers if b is not None)

    def diagnostics(self) -> dict[str, float | None]:
        """What the paper reports of hidden momentum; ``None`` for what was not measured (``diagnostics=True`` does)."""
        if not self._hidden:
            return {"prepare_calls_per_step": None, "cosine": None, "relative_error": None}
        values = (self._hidden.last_cosine, self._hidden.last_relative_error)
        cosine, error = (None if v is None else float(v) for v in values)
        per_step = self._hidden.prepares / self.steps if self.steps else None
        return {"prepare_calls_per_step": per_step, "cosine": cosine, "relative_error": error}

    def state_dict(self) -> dict[str, Any]:
        """The usual dict, with H of hidden parameters in it. Raises UserError between prepare and step."""
        if self._hidden:
            self._hidden.check_idle("state_dict()")
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of the same variant; copies, dtypes as saved. Raises UserError if the roles' rules differ."""
        if self._hidden:
            self._hidden.check_idle("load_state_dict()")
        mine = [(g["name"], g["rule"], len(g["params"])) for g in self.param_groups]
        saved = [(g.get("name"), g.get("rule"), len(g["params"])) for g in state_dict["param_groups"]]
        if mine != saved:
            raise UserError(
                f"optimizer state has the groups {saved}, this optimizer {mine}: use the same variant and model"
            )
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})
        order = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        for index, parameter in zip(indices, order):
            # torch casts state to the parameter's dtype and may alias the saved tensors: V and s stay fp32, copies.
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and key != "step":
                    self.state[parameter][key] = value.detach().to(parameter.device, copy=True)
        self.steps = state_dict.get("steps", 0)

    # ---- description --------------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """One line a role: tensors, logical matrices, parameters, rule and its hyperparameters."""
        lines = []
        for group in self.param_groups:
            members = [self._roles[p] for p in group["params"]]
            rule = self.settings.rule(group["rule"])
            what = f"{len(members)} tensors, {sum(p.numel() for p in group['params']):,} parameters"
            matrices = sum(r.matrices for r in members)
            how = {k: group[k] for k in ("lr", "weight_decay", "betas", "tau", "rounds", "form", "order") if k in group}
            momentum = f", {rule.momentum} momentum" if rule.momentum != "none" else ""
            views = f", {matrices} matrices" if matrices else ""
            settings = ", ".join(f"{k} {v}" for k, v in how.items())
            lines.append(f"{group['name']}: {what}{views}, rule {group['rule']}{momentum} ({settings})")
        return lines


def validate(variant: str, hyper: Mapping[str, Any]) -> None:
    """Check hyperparameters without a model. Raises UserError (key, value, what is allowed)."""
    make_settings(variant, hyper)


def build(named_params: Named, model: nn.Module, *, variant: str, **hyper: Any) -> MeshOptimizer:
    """A MESH-family optimizer over named parameters of a model.

    Args:
        named_params: what it must own: all trainable parameters, or a subset (one expert tensor inside a hook).
        model: the model they belong to (a DDP wrapper is fine); roles come from its modules.
        variant: ``sinkgd``, ``sage`` = ``direct``, ``mesh``, ``mesh_b``, ``mesh_full``, ``mesh_b_full``, the controls
            ``mesh_v_only``, ``mesh_sign_only``, ``mesh_factored_v``, or ``mesh_adamw``.
        hyper: see :class:`~.settings.Settings`; ``roles={"routed": "adamw"}`` makes a role ablation.

    Raises:
        UserError: unknown names, values out of range, a model without routed experts where the variant needs them, a
            parameter given twice or unknown to the model.
    """
    settings = make_settings(variant, hyper)
    needed = set(settings.roles) | (set() if variant in ("sinkgd", "sage", "direct", "mesh_adamw") else {"routed"})
    roles = assign_roles([(n, p) for n, p in named_params if p.requires_grad], model, needed=needed)
    if settings.partition == "fused":
        whole = {"parts": 1, "interleaved": False}
        roles = [replace(r, layout=r.layout and replace(r.layout, **whole)) for r in roles]
    return MeshOptimizer(roles, settings)


__all__ = ["MeshOptimizer", "VARIANTS", "build", "validate"]
