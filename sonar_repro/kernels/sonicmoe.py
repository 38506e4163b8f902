"""SonicMoE (arXiv 2512.14080): transformers' own ``sonicmoe`` through ``kernels``, or the package ``sonic-moe``.

transformers has the adapter; where the kernels come from is decided here, before a model is built. The package, when it
is what is installed, is handed to the same adapter: its entry points have the same signatures.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import sys
from typing import Any

import torch

from ..errors import Unsupported

NAME = "sonicmoe"
PACKAGE, MODULE, PACKAGE_PYTHON = "sonic-moe", "sonicmoe", (3, 12)
CAPABILITY = 9  # Hopper, Blackwell
#: What transformers' adapter passes by name; without ``concat_layout`` gate and up rows would be taken as interleaved.
NEEDED = ("E", "activation_type", "is_inference_mode_enabled", "concat_layout", "stream_id")


def why_not(device: str) -> str | None:
    """Why no SonicMoE kernels can run on ``device``, or None: GPU generation, packages and their versions."""
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if major < CAPABILITY:
            return (
                f"its kernels need compute capability {CAPABILITY}.0 (Hopper) or newer, this card has {major}.{minor}"
            )
    hub = hub_reason()
    if hub is None:
        return None
    package = package_reason()
    return None if package is None else f"{hub}; and the package {PACKAGE} {package}"


def hub_reason() -> str | None:
    """Why transformers cannot load its kernel from the hub by the package ``kernels``, or None."""
    import transformers
    from transformers.integrations.sonicmoe import SONICMOE_DEPENDENCIES
    from transformers.utils import import_utils

    low, high = (getattr(import_utils, f"KERNELS_{end}_VERSION", None) for end in ("MIN", "MAX"))
    wanted = {"kernels": (low, high), **{name: (least, None) for name, least in SONICMOE_DEPENDENCIES.items()}}
    for name, (least, below) in wanted.items():
        spec = name + ",".join(f"{sign}{v}" for sign, v in ((">=", least), ("<", below)) if v)
        installed = _version(name)
        if installed is None:
            return f"the package {name} is not installed (pip install '{spec}', or the extra sonar_repro[sonicmoe])"
        if not _within(installed, least, below):
            return f"transformers {transformers.__version__} needs {spec} and {installed} is installed"
    return None


def package_reason() -> str | None:
    """What keeps the package sonic-moe from standing in, or None: Python, installation, the call it must offer."""
    have = sys.version_info[:2]
    if have < PACKAGE_PYTHON:
        return f"needs Python {'.'.join(map(str, PACKAGE_PYTHON))} or newer, this is {have[0]}.{have[1]}"
    if importlib.util.find_spec(MODULE) is None:
        return "is not installed"
    try:
        call = importlib.import_module(MODULE).moe_general_routing_inputs
    except Exception as error:  # its compiler back end raises errors of its own
        return f"cannot be imported ({type(error).__name__}: {next(iter(str(error).splitlines()), '')[:120]})"
    lacking = [name for name in NEEDED if name not in inspect.signature(call).parameters]
    return f"{_version(PACKAGE)} has no argument {lacking[0]}" if lacking else None


def register() -> str:
    """Load the kernels into transformers' adapter, before any model is built; returns the adapter's name.

    Raises:
        Unsupported: the kernel is neither in the cache nor to be had, or this transformers has another adapter.
    """
    from transformers.integrations import sonicmoe

    if hub_reason() is not None:
        _use_package(sonicmoe)
    try:
        sonicmoe.load_sonicmoe_kernel()
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")[:200]
        raise Unsupported(
            f"backend={NAME}: its kernel cannot be loaded ({type(error).__name__}: {first}); "
            "with a network it is taken from kernels-community/sonic-moe on the hub; or use backend=grouped_mm"
        ) from error
    return NAME


def _use_package(adapter: Any) -> None:
    if not (hasattr(adapter, "SonicMoE") and hasattr(adapter, "_SONICMOE")):
        import transformers

        raise Unsupported(
            f"backend={NAME}: transformers {transformers.__version__} takes its kernels from the hub only; "
            "pip install 'sonar_repro[sonicmoe]'"
        )
    package = importlib.import_module(MODULE)
    enums = importlib.import_module(f"{MODULE}.enums")
    adapter._SONICMOE = adapter.SonicMoE(
        activation_type_enum=enums.ActivationType, moe_general_routing_inputs=package.moe_general_routing_inputs
    )


def versions() -> dict[str, Any]:
    """What the record says about the kernels: where they come from and the versions of what compiles them."""
    from transformers.integrations import hub_kernels

    names = ("kernels", PACKAGE, "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton")
    found: dict[str, Any] = {name: _version(name) for name in names if _version(name)}
    if hub_reason() is None:
        origin = getattr(hub_kernels, "_HUB_KERNEL_MAPPING", {}).get("sonic-moe", {})
        found["source"] = f"hub: {origin.get('repo_id')} at {origin.get('revision') or origin.get('version')}"
    else:
        found["source"] = f"package {PACKAGE} {_version(PACKAGE)}"
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _within(installed: str, least: str | None, below: str | None) -> bool:
    from packaging.version import parse

    version = parse(installed)
    return (least is None or version >= parse(least)) and (below is None or version < parse(below))
