"""Before anything of the harness is imported: pure-Python wheels from a folder, where there is no package index."""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from pathlib import Path

NEEDED = ("hydra", "omegaconf", "antlr4", "torch", "transformers")


class Missing(Exception):
    """What the check cannot start without; one line."""


def use_wheels(folder: Path | None, target: Path) -> list[str]:
    """Unpack every wheel of ``folder`` into ``target`` and put it first on the path, for child processes too.

    Returns:
        The wheels' file names.

    Raises:
        Missing: no such folder, no wheel in it, a wheel with compiled code, or a package that is still not there.
    """
    names = []
    if folder is not None:
        wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
        if not wheels:
            raise Missing(f"--wheels {folder}: no such folder or no .whl file in it")
        target.mkdir(parents=True, exist_ok=True)
        for wheel in wheels:
            if not wheel.stem.endswith("-any"):
                raise Missing(f"--wheels {folder}: {wheel.name} has compiled code; install it with pip instead")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
            names.append(wheel.name)
        sys.path.insert(0, str(target))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))
        importlib.invalidate_caches()
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            way_out = (
                "install it" if package in ("torch", "transformers") else "give a folder of wheels with --wheels DIR"
            )
            raise Missing(f"the package {package} is not installed; {way_out}")
    return names
