"""Parity at start: before an arm is timed, its expert kernel is compared with ``eager`` on a small input, both ways.

The model's own experts class is taken from the model built on the meta device (no memory, some 40 ms), cut to a few
experts at full width, and filled with random values. Output and every gradient of the kernel in the arm's dtype are
compared with ``eager`` in float32 on the same values, by relative error ``|a - b| / |b|`` in the Frobenius norm.

What the bound is worth: rounding in bf16 gives 2e-3 to 5e-3 over the two products and the gate. Gate and up rows
swapped or interleaved (sonic-moe#45) give about 1; one wrong expert of eight 0.35; a row of 96 dropped 0.1.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Unsupported, UserError
from ..models.experts import decorated_expert_modules, find_expert_tensors

#: Largest relative error that is taken for rounding. float32 leaves room for TF32, which Triton kernels use by default.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 5e-3}
EXPERTS, TOP_K, TOKENS = 8, 3, 96  # one expert of the eight gets no token; a second batch has a single token
REFERENCE = "eager"


class BackendMismatch(RuntimeError):
    """A kernel that computes something else than ``eager``: its arm ends as failed, never as a number."""


def check(
    config: Any, backend: str, implementation: str, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> dict[str, Any]:
    """Compare ``implementation`` with eager on the experts of ``config``; leaves no memory and no random state behind.

    Args:
        config: the transformers config of the arm's model.
        backend: the arm's backend, for messages.
        implementation: its name in transformers' experts interface.
        dtype: of the arm's weights.
        device: of the arm.
        seed: of the values compared.

    Returns:
        The record's ``environment.parity``: what was compared, each relative error, the bound, the seconds it took.

    Raises:
        BackendMismatch: an error beyond the bound, with the quantity and both numbers.
        Unsupported: a model class that would ignore the backend.
        UserError: sizes that the kernel cannot take.
    """
    if backend == REFERENCE:
        return {"compared": False, "reason": "eager is the reference"}
    started = time.perf_counter()
    device = torch.device(device)
    template = _template(config, backend)
    if isinstance(template, str):
        return {"compared": False, "reason": template}
    generator = torch.Generator(device="cpu").manual_seed(seed)
    values = _values(template, dtype, generator)
    module = _filled(template, values, implementation, dtype, device)
    reference = _filled(template, values, REFERENCE, torch.float32, device)
    errors, refused = _compare(module, reference, dtype, device, backend, generator)
    del module, reference
    _forget(device)
    bound, experts = TOLERANCE[dtype], values[_experts(template)[0][0]].shape[0]
    result = {
        "compared": True,
        "reference": f"{REFERENCE}, float32",
        "dtype": str(dtype).removeprefix("torch."),
        "tolerance": bound,
        "max_relative_error": max(errors.values()),
        "errors": errors,
        "experts": experts,
        "tokens": [TOKENS] if refused else [TOKENS, 1],
        "single_token_refused": refused,
        "shapes": {name: list(value.shape) for name, value in values.items()},
        "seconds": time.perf_counter() - started,
    }
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= bound:  # also NaN
        raise BackendMismatch(
            f"backend={backend}: differs from eager in the {worst}: relative error {errors[worst]:.3g}, more than "
            f"{bound:g} ({result['dtype']}, {experts} experts, {TOKENS} tokens); no number was taken. Check the "
            "versions of its packages, or use backend=grouped_mm"
        )
    return result


def _compare(
    module: nn.Module,
    reference: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    generator: torch.Generator,
) -> tuple[dict[str, float], str | None]:
    """The largest relative error of each quantity, and why a batch of a single token was refused (None if not)."""
    errors: dict[str, float] = {}
    refused = None
    for tokens in (TOKENS, 1):
        batch = _batch(module, tokens, dtype, generator)
        wanted = _run(reference, batch, torch.float32, device, backend)
        try:
            got = _run(module, batch, dtype, device, backend)
        except (RuntimeError, ValueError, AssertionError) as error:
            if tokens > 1 or isinstance(error, UserError):
                raise
            refused = f"{type(error).__name__}: {error}"[:200]  # no training batch has a single token
            continue
        for name, error in _errors(got, wanted).items():
            errors[name] = max(error, errors.get(name, 0.0))
    return errors, refused


def _template(config: Any, backend: str) -> nn.Module | str:
    """The first experts module on the meta device, or why none can be compared."""
    from transformers import AutoModelForCausalLM

    own = copy.deepcopy(config)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16, experts_implementation=REFERENCE)
    decorated = decorated_expert_modules(model)
    if not decorated:
        name, experts = type(model).__name__, find_expert_tensors(model, include_frozen=True)
        why = f"{name} has expert code of its own and would ignore it" if experts else f"{name} has no batched experts"
        raise Unsupported(f"backend={backend}: {why}; use backend=eager, the model's own code")
    module = decorated[0][1]
    if any(True for _ in module.buffers()):
        return f"{type(module).__name__} has buffers whose values are not known here"
    return module


def _experts(module: nn.Module) -> list[tuple[str, int]]:
    """(name, number of experts) of the module's expert tensors."""
    return [(tensor.name, tensor.num_experts) for tensor in find_expert_tensors(module, include_frozen=True)]


def _values(template: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Random CPU values by parameter name: few experts, and scaled so that the gate's inputs are near 1."""
    experts = dict(_experts(template))
    values = {}
    for name, parameter in template.named_parameters():
        shape = list(parameter.shape)
        if name in experts:
            shape[0] = shape[0] // experts[name] * min(EXPERTS, experts[name])
        value = torch.randn(shape, generator=generator)
        if len(shape) == 3:
            value /= shape[1 if template.is_transposed else 2] ** 0.5
        values[name] = value.to(dtype)
    return values


def _filled(
    template: nn.Module, values: dict[str, Tensor], implementation: str, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """A copy of the module with these values, few experts, and its own implementation."""
    module = copy.deepcopy(template)
    module.config = copy.deepcopy(template.config)
    module.config._experts_implementation = implementation
    counts = {count for _, count in _experts(template)}
    for attribute, value in list(vars(module).items()):
        if "expert" in attribute.lower() and type(value) is int and value in counts:
            setattr(module, attribute, min(EXPERTS, value))
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, nn.Parameter(value.to(device=device, dtype=dtype)))
    return module.train()


def _batch(module: nn.Module, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Hidden states ``[T, H]``, expert indices and routing weights ``[T, K]``, the output's gradient ``[T, H]``."""
    weight = module.gate_up_proj if module.has_gate else module.up_proj
    hidden = weight.shape[1 if module.is_transposed else 2]
    usable = max(1, weight.shape[0] - 1)  # the last expert is left idle
    top_k = min(TOP_K, usable)
    index = torch.rand(tokens, usable, generator=generator).topk(top_k).indices
    scores = torch.rand(tokens, top_k, generator=generator) + 0.25
    return {
        "hidden states": torch.randn(tokens, hidden, generator=generator).to(dtype),
        "index": index,
        "routing weights": (scores / scores.sum(-1, keepdim=True)).to(dtype),
        "output gradient": torch.randn(tokens, hidden, generator=generator).to(dtype),
    }


def _run(
    module: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype, device: torch.device, backend: str
) -> dict[str, Tensor]:
    """Output and gradients in float32 on the host, by name."""
    names = ("hidden states", "routing weights", "output gradient")
    hidden, weights, upstream = (batch[name].to(device=device, dtype=dtype, copy=True) for name in names)
    hidden.requires_grad_()
    weights.requires_grad_()
    module.zero_grad(set_to_none=True)
    try:
        output = module(hidden, batch["index"].to(device), weights)
        output.backward(upstream)
    except RuntimeError as error:
        if "16 bytes" not in str(error) and "divisible by 16" not in str(error):
            raise
        step = 16 // torch.empty((), dtype=dtype).element_size()
        sizes = ", ".join(str(list(parameter.shape[1:])) for parameter in module.parameters())
        raise UserError(
            f"backend={backend}: takes rows of a multiple of 16 bytes, and an expert's matrices are {sizes}; use "
            f"hidden and expert sizes that are multiples of {step}, or backend=eager"
        ) from error
    gradients = {"gradient of the hidden states": hidden.grad, "gradient of the routing weights": weights.grad}
    gradients |= {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    results = {"output": output.detach(), **gradients}
    return {name: torch.zeros(1) if value is None else value.float().cpu() for name, value in results.items()}


def _errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    errors = {}
    for name, reference in wanted.items():
        value = got[name]
        if value.shape != reference.shape:
            errors[name] = float("inf")
            continue
        norm = reference.double().norm().item()
        difference = (value.double() - reference.double()).norm().item()
        errors[name] = difference / norm if norm else difference
    return errors


def _forget(device: torch.device) -> None:
    """Give back what the comparison took, cuBLAS's workspaces included: the arm's memory is counted from here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()
        torch.cuda.empty_cache()
