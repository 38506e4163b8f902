"""Build and run any transformers MoE at full size on fake tensors: exact shapes and allocations, no weights, no GPU.

Inside :func:`fake_environment` the real model classes run under ``FakeTensorMode`` on device "cpu" (a CPU wheel aborts
on fake "cuda" tensors; on a GPU machine the bytes are the same). Where transformers looks at tensor values or at the
mode itself and would then build something that a CUDA run does not build, the question is answered as the CUDA run
would answer it; each such place is a patch below with its reason.
"""

from __future__ import annotations

import copy
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

from ..errors import UserError
from ..models.build import class_error
from ..models.experts import decorated_expert_modules, find_expert_tensors, module_list_experts

#: Expert implementations that run on fake tensors; the footprints stand in for libraries that need a GPU.
FAKE_IMPLEMENTATIONS = {
    "eager": "eager",  # only for a model class with its own expert code: the usual eager experts loop over values
    "grouped_mm": "grouped_mm",
    "batched_mm": "batched_mm",
    "sonicmoe": "sonicmoe_footprint",
    "scattermoe": "scattermoe_footprint",
}


class FakeEnvironment:
    """What :func:`fake_environment` yields: builds models and batches of fake tensors in the active mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._padded = False

    def build(
        self,
        config: Any,
        *,
        dtype: torch.dtype = torch.bfloat16,
        experts: str = "grouped_mm",
        attention: str | None = None,
    ) -> nn.Module:
        """The causal LM of ``config`` in train mode, its parameters and buffers fake.

        The model is first built on the meta device (which every model class can do, at once, whatever its constructor
        casts), then each meta tensor is replaced by a fake one; tied parameters stay tied.

        Args:
            config: a transformers config.
            dtype: of the parameters; families that keep some in float32 keep them.
            experts: a backend's name (:data:`FAKE_IMPLEMENTATIONS`), or ``eager`` for a class with its own expert code.
            attention: transformers' attention implementation; ``None``: its default (sdpa where the class supports it).

        Raises:
            UserError: no batched experts, an expert backend or dtype that the fake path cannot take.
        """
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            raise UserError(f"scale.dtype={name}: a forecast takes bfloat16, float16 or float32")
        implementation = _fake_implementation(experts)
        model = _on_meta(config, dtype, implementation, attention)
        _check_experts(model, config, experts)
        self._to_fake(model)
        model.train()
        model.register_forward_pre_hook(self._note_padding, with_kwargs=True)
        return model

    def adopt(self, model: nn.Module) -> nn.Module:
        """A module whose tensors are on the meta device, with fake ones in their places (tied ones stay tied)."""
        self._to_fake(model)
        return model

    def batch(self, batch_size: int, length: int, *, padded: bool = False) -> dict[str, torch.Tensor]:
        """A batch of fake int64 ``[batch_size, length]`` tensors: input_ids, attention_mask, labels.

        ``padded`` says whether any position is padding: it decides, as on CUDA, between a causal flag (flash attention)
        and a mask tensor (memory-efficient attention).
        """
        if batch_size < 1 or length < 1:
            raise UserError(f"forecast batch {batch_size} x {length}: both must be at least 1")
        with self.mode:
            names = ("input_ids", "attention_mask", "labels")
            batch = {name: torch.empty(batch_size, length, dtype=torch.long) for name in names}
        batch["attention_mask"].has_padding = padded
        return batch

    def _note_padding(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._padded = bool(getattr(kwargs.get("attention_mask"), "has_padding", False))

    def _to_fake(self, model: nn.Module) -> None:
        replaced: dict[int, torch.Tensor] = {}

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in replaced:
                new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    new.__dict__.update(tensor.__dict__)
                replaced[id(tensor)] = new
            return replaced[id(tensor)]

        # Buffers that a constructor computed under the meta device, and plain tensor attributes, are meta as well.
        with self.mode:
            for module in model.modules():
                for store in (module._parameters, module._buffers, module.__dict__):
                    for name, value in list(store.items()):
                        if isinstance(value, torch.Tensor) and value.is_meta:
                            store[name] = fake(value)


@contextmanager
def fake_environment() -> Iterator[FakeEnvironment]:
    """Run the body on fake tensors; what reads tensor values ends as one line that names the way out.

    Raises:
        UserError: an operator whose result depends on values (``eager`` experts loop over the experts that were hit).
    """
    with ExitStack() as stack:
        mode = FakeTensorMode()
        environment = FakeEnvironment(mode)
        for patch in _patches(environment):
            stack.enter_context(patch)
        stack.enter_context(mode)
        try:
            yield environment
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"forecast: {error.func} reads tensor values, which fake tensors do not have; use backend=grouped_mm,"
                " or another model class if its own forward reads them"
            ) from error
        except UnsupportedOperatorException as error:
            raise UserError(f"forecast: operator {error.func} has no fake kernel; use backend=grouped_mm") from error


def _fake_implementation(experts: str) -> str:
    if experts not in FAKE_IMPLEMENTATIONS:
        raise UserError(f"backend={experts}: no forecast for it; choose one of {', '.join(FAKE_IMPLEMENTATIONS)}")
    implementation = FAKE_IMPLEMENTATIONS[experts]
    if implementation.endswith("_footprint"):
        from . import footprints

        footprints.register()
    return implementation


def _on_meta(config: Any, dtype: torch.dtype, experts: str, attention: str | None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    def build(implementation: str) -> nn.Module:
        # from_config writes its choices into the config it is given.
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, experts_implementation=implementation, attn_implementation=attention
        )

    try:
        with unset_fake_temporarily(), torch.device("meta"):
            try:
                return build(experts)
            except ValueError as error:
                if "setting experts implementation" not in str(error):
                    raise
                # A dense class, or one with expert code of its own: _check_experts tells which.
                return build("eager")
    except ValueError as error:
        raise class_error(error, config, attention) from error


def _check_experts(model: nn.Module, config: Any, experts: str) -> None:
    name = type(model).__name__
    if not find_expert_tensors(model, include_frozen=True):
        lists = module_list_experts(model)
        why = f"its experts are one module each ({lists[0]})" if lists else "it has no experts"
        raise UserError(f"model_type={config.model_type}: {name} has no batched expert tensors: {why}")
    decorated = bool(decorated_expert_modules(model))
    if decorated and experts == "eager":
        raise UserError(
            "backend=eager: loops over the experts that were hit, which fake tensors cannot tell;"
            " use backend=grouped_mm"
        )
    if not decorated and experts != "eager":
        raise UserError(
            f"backend={experts}: {name} has expert code of its own and would ignore it;"
            " use backend=eager, which is that code"
        )


def _grouped_mm_shape(rule: Any) -> Any:
    """PyTorch's shape rule of ``grouped_mm`` for any one dtype, as ``_grouped_mm_fallback`` in ATen computes it.

    Outputs whose rows are padded to 16 bytes keep the padding that bfloat16 has.
    """

    def shape(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if a.dtype != b.dtype or a.dtype not in (torch.float32, torch.float16):
            return rule(a, b, *args, **kwargs)
        return rule(a.to(torch.bfloat16), b.to(torch.bfloat16), *args, **kwargs).to(a.dtype)

    return shape


def _patches(environment: FakeEnvironment) -> Iterator[Any]:
    import torch._meta_registrations as meta
    import transformers.masking_utils as masking

    # Fake tensors count as tracing, and under tracing the causal mask is always built. A real run first asks whether
    # anything is padded and hands SDPA a flag instead of a mask if nothing is.
    yield mock.patch.object(masking, "is_tracing", lambda tensor=None: False)
    # Positions are consecutive in every batch of ours: nothing is packed, and a real run finds that out by value.
    yield mock.patch.object(masking, "find_packed_sequence_indices", lambda position_ids: None)
    if hasattr(masking, "fast_all"):
        yield mock.patch.object(masking, "fast_all", lambda mask: not environment._padded)
    # CUDA's grouped_mm takes float32 too (a loop of mm into one output); its shape rule knows bfloat16 only.
    yield mock.patch.object(meta, "_meta_grouped_mm_common", _grouped_mm_shape(meta._meta_grouped_mm_common))
    # The 8-bit optimizers fill their quantisation maps from values: 256 fp32 entries, whatever they are.
    yield _PatchedOnImport(
        "bitsandbytes.functional", "create_dynamic_map", lambda *a, **k: torch.empty(256, dtype=torch.float32)
    )


class _PatchedOnImport(importlib.abc.MetaPathFinder):
    """Replace ``module.name`` while the context lasts, if and when the module is imported (it takes seconds)."""

    def __init__(self, module: str, name: str, value: Any) -> None:
        self.module, self.name, self.value = module, name, value
        self._patch: Any = None

    def __enter__(self) -> None:
        if self.module in sys.modules:
            self._start(sys.modules[self.module])
        else:
            sys.meta_path.insert(0, self)

    def __exit__(self, *exc: Any) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._patch is not None:
            self._patch.stop()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Called by the import system: hand over to the usual finders, and patch behind the module's execution."""
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: Any) -> None:
                execute(module)
                self._start(module)

            spec.loader.exec_module = execute_and_patch
        return spec

    def _start(self, module: Any) -> None:
        self._patch = mock.patch.object(module, self.name, self.value)
        self._patch.start()
