"""The MESH family as data: rules (what is done to a parameter), variants (which role gets which rule), hyperparameters.

A new variant is one line in ``VARIANTS``; a new rule one line in ``RULES`` if the knobs suffice. Loads no torch.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import UserError

ROLES = ("vocabulary", "one_d", "dense", "routed", "shared")


@dataclass(frozen=True)
class Rule:
    """One update rule.

    Args:
        direction: ``sinkhorn`` | ``sign`` | ``factored`` | ``sage`` | ``adamw``.
        momentum: ``none``, ``hidden`` (H in the gradient buffer) or ``full`` (H in optimizer state).
        block: MESH-B's multiplier from V.
    """

    direction: str
    momentum: str = "none"
    block: bool = False


RULES: dict[str, Rule] = {
    "adamw": Rule("adamw"),
    "sage": Rule("sage"),
    "sinkhorn": Rule("sinkhorn"),
    "mesh": Rule("sinkhorn", "hidden"),
    "mesh_b": Rule("sinkhorn", "hidden", block=True),
    "mesh_full": Rule("sinkhorn", "full"),
    "mesh_b_full": Rule("sinkhorn", "full", block=True),
    "v_only": Rule("sinkhorn", block=True),
    "sign": Rule("sign"),  # sign_source=G; with H: momentum full
    "factored_v": Rule("factored"),
}


def _hybrid(experts: str) -> dict[str, str]:
    return {"vocabulary": "sage", "one_d": "sage", "dense": "sinkhorn", "routed": experts, "shared": experts}


VARIANTS: dict[str, dict[str, str]] = {
    # SinkGD's own hybrid: embeddings and vectors on AdamW. SAGE replaces AdamW there; MESH calls that one "direct".
    "sinkgd": {
        "vocabulary": "adamw",
        "one_d": "adamw",
        "dense": "sinkhorn",
        "routed": "sinkhorn",
        "shared": "sinkhorn",
    },
    "sage": _hybrid("sinkhorn"),
    "direct": _hybrid("sinkhorn"),
    "mesh": _hybrid("mesh"),
    "mesh_b": _hybrid("mesh_b"),
    "mesh_full": _hybrid("mesh_full"),
    "mesh_b_full": _hybrid("mesh_b_full"),
    "mesh_v_only": _hybrid("v_only"),
    "mesh_sign_only": _hybrid("sign"),
    "mesh_factored_v": _hybrid("factored_v"),
    "mesh_adamw": dict.fromkeys(ROLES, "adamw"),
}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _at_least_0(value: Any) -> bool:
    return _number(value) and value >= 0


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _betas(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(_number(b) and 0 <= b < 1 for b in value)


def _bounds(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_positive, value)) and value[0] < value[1]


def _or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


def _choice(*names: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value in names), "one of " + ", ".join(names)


_ZERO_UP = (_at_least_0, "a number of at least 0")
_PAIR = (_betas, "two numbers in [0, 1)")
_ABOVE = (_positive, "a positive number")
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_or_none(_at_least_0), "a number of at least 0, or null for the rule's default"),
    "weight_decay": (_or_none(_at_least_0), "a number of at least 0, or null for the rule's default"),
    "betas": (_or_none(_betas), "two numbers in [0, 1), or null for the rule's default"),
    "eps": _ABOVE,
    "tau": (_or_none(_positive), "a positive number, or null for the form's default"),
    "rounds": (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1, "an int of at least 1 (K rounds)"),
    "form": _choice("sage", "sinkgd"),
    "order": _choice("code", "paper"),
    "stat": _choice("H", "G"),
    "sign_source": _choice("G", "H"),
    "bounds": (_bounds, "two positive numbers, lower first"),
    "clip": (_or_none(_positive), "a positive number, or null for no clipping"),
    "adamw_lr": _ZERO_UP,
    "adamw_betas": _PAIR,
    "adamw_weight_decay": _ZERO_UP,
    "partition": _choice("split", "fused"),
    "idle": _choice("move", "hold"),
    "diagnostics": (lambda v: isinstance(v, bool), "true or false"),
}


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of a variant; the defaults are SAGE's, which MESH follows (lr, β, wd, τ, K, ε).

    Args:
        lr, betas, weight_decay: of every rule but AdamW: 2e-3, (0.9, 0.99), 0.01. Under ``mesh_adamw`` they set AdamW.
        eps: ε of the Sinkhorn rounds, of SAGE and of AdamW.
        tau: update scale τ of Sinkhorn and the controls: 10 for ``form=sage``, 0.05 for ``form=sinkgd``.
        rounds: K.
        form: ``sage`` (RMS 1/√m) or ``sinkgd`` (RMS 1).
        order: SAGE's m before the sign (``code``) or after (``paper``).
        stat: MESH-B's V from ``H`` (the paper's default) or ``G`` (full-state variant only: hidden H has no raw G).
        sign_source: of the sign-only control.
        bounds: clip of q. Inferred: not printed.
        clip: global-norm bound over everything outside expert momentum; ``None`` clips nothing (the paper prints none).
        adamw_lr, adamw_betas, adamw_weight_decay: of the roles on AdamW: 6e-4, (0.9, 0.95), 0.1 (nanowhale's).
        roles: role -> rule, replaces the variant's (the role ablations).
        partition: of a fused gate/up tensor: one matrix each (``split``), or ``fused`` [2I, D] (a diagnosis, not MESH).
        idle: an expert whose gradient is exactly 0 in a step moves on along H (``move``, the paper's rule) or keeps its
            weights and V (``hold``; for rules with momentum, one process).
        diagnostics: compare hidden momentum with a shadow at every step.
    """

    variant: str
    lr: float | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float | None = None
    eps: float = 1e-8
    tau: float | None = None
    rounds: int = 5
    form: str | None = None
    order: str = "code"
    stat: str = "H"
    sign_source: str = "G"
    bounds: tuple[float, float] = (0.25, 4.0)
    clip: float | None = None
    adamw_lr: float = 6e-4
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    adamw_weight_decay: float = 0.1
    roles: Mapping[str, str] = field(default_factory=dict)
    partition: str = "split"
    idle: str = "move"
    diagnostics: bool = False

    def rules(self) -> dict[str, str]:
        """role -> rule name."""
        return {**VARIANTS[self.variant], **self.roles}

    def rule(self, name: str) -> Rule:
        """The rule with this settings' choices in it."""
        rule = RULES[name]
        if rule.direction == "sign" and self.sign_source == "H":
            return Rule("sign", "full")
        return rule

    def group(self, role: str) -> dict[str, Any]:
        """The hyperparameters of a role's parameter group. ``warmup_share`` is the paper's, for the scheduler."""
        name = self.rules()[role]
        rule = self.rule(name)
        common = {"name": role, "rule": name, "eps": self.eps}
        if rule.direction == "adamw":
            own = self.variant == "mesh_adamw"
            lr, betas, decay = (self.lr, self.betas, self.weight_decay) if own else (None, None, None)
            return common | {
                "lr": self.adamw_lr if lr is None else lr,
                "betas": tuple(self.adamw_betas if betas is None else betas),
                "weight_decay": self.adamw_weight_decay if decay is None else decay,
                "warmup_share": 0.03,
            }
        group = common | {
            "lr": 2e-3 if self.lr is None else self.lr,
            "betas": tuple(self.betas or (0.9, 0.99)),
            "weight_decay": 0.01 if self.weight_decay is None else self.weight_decay,
            "warmup_share": 0.1,
        }
        if rule.direction == "sage":
            return group | {"order": self.order}
        form = self.form or ("sinkgd" if self.variant == "sinkgd" else "sage")
        tau = self.tau or {"sage": 10.0, "sinkgd": 0.05}[form]
        group |= {"tau": tau, "rounds": self.rounds, "form": form, "direction": rule.direction}
        if rule.momentum != "none":
            group |= {"momentum": rule.momentum, "idle": self.idle}
        return group | ({"stat": self.stat, "bounds": tuple(self.bounds)} if rule.block else {})


def near(word: str, known: Any) -> str:
    """A hint for a misspelt name."""
    close = difflib.get_close_matches(word, list(known), n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(known)}"


def make_settings(variant: str, hyper: Mapping[str, Any]) -> Settings:
    """Checked settings.

    Raises:
        UserError: one line with the key, the value and what is allowed.
    """
    if variant not in VARIANTS:
        raise UserError(f"variant={variant!r}: unknown; {near(variant, VARIANTS)}")
    known = [f.name for f in fields(Settings) if f.name != "variant"]
    for key, value in hyper.items():
        if key not in known:
            raise UserError(f"optimizer {variant} has no hyperparameter {key}={value!r}; {near(key, known)}")
        if key in CHECKS and not (key == "form" and value is None) and not CHECKS[key][0](value):
            raise UserError(f"optimizer {variant}: {key}={value!r} is not {CHECKS[key][1]}")
    _check_roles(variant, hyper.get("roles") or {})
    settings = Settings(variant, **{**hyper, "roles": dict(hyper.get("roles") or {})})
    hidden = [r for r, name in settings.rules().items() if settings.rule(name) == Rule("sinkhorn", "hidden", True)]
    if settings.stat == "G" and hidden:
        raise UserError(
            f"optimizer {variant}: stat='G' needs the raw gradient, which hidden momentum lacks; use mesh_b_full"
        )
    return settings


def _check_roles(variant: str, roles: Any) -> None:
    if not isinstance(roles, Mapping):
        raise UserError(f"optimizer {variant}: roles={roles!r} is not a mapping of role to rule")
    for role, rule in roles.items():
        if role not in ROLES:
            raise UserError(f"optimizer {variant}: roles.{role}={rule!r}: unknown role; {near(str(role), ROLES)}")
        if rule not in RULES:
            raise UserError(f"optimizer {variant}: roles.{role}={rule!r}: unknown rule; {near(str(rule), RULES)}")
        if RULES[rule].direction not in ("sage", "adamw") and role == "one_d":
            raise UserError(f"optimizer {variant}: roles.one_d={rule!r}: vectors have no columns; use sage or adamw")
