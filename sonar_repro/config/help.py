"""``--help`` without delay: Hydra's own copies its whole configuration once a group to list them."""

from __future__ import annotations

from pathlib import Path

import yaml

from .schema import conf_dir

TEMPLATE = Path("hydra") / "help" / "sonar_repro.yaml"  # Hydra reads the same file for --help with overrides


def groups(root: Path) -> dict[str, list[str]]:
    """Each group of the tree and its options, without Hydra's own."""
    found: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.yaml")):
        place = path.relative_to(root)
        if len(place.parts) > 1 and place.parts[0] != "hydra":
            found.setdefault("/".join(place.parts[:-1]), []).append(path.stem)
    return found


def text() -> str:
    """What Hydra prints for ``--help``, from the same template."""
    root = conf_dir()
    parts = yaml.safe_load((root / TEMPLATE).read_text(encoding="utf-8"))
    listed = "\n".join(f"{group}: {', '.join(options)}" for group, options in sorted(groups(root).items()))
    filled = parts["template"].replace("$APP_CONFIG_GROUPS", listed + "\n")
    for name in ("header", "footer"):
        filled = filled.replace(f"${{hydra.help.{name}}}", parts[name])
    return filled
