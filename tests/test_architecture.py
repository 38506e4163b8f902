"""The rooms and their floors: who may import whom, and how large a file or a function may be."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sonar_repro"
#: From the ground up; a room imports those before it. The ground floor's modules count as one room.
FLOORS = [
    "ground", "config", "data", "models", "kernels", "methods", "optim", "instruments", "training", "forecast", "tasks",
    "harness", "front",
]  # fmt: skip
GROUND, FRONT = {"__init__", "errors", "records", "machine"}, {"__main__", "refresh", "gpu_check"}
FILES = sorted(PACKAGE.rglob("*.py"))
EVERYWHERE = sorted([*FILES, *(ROOT / "analysis").rglob("*.py")])


def room(module: str) -> str:
    first = module.split(".")[1] if "." in module else "__init__"
    return "ground" if first in GROUND else "front" if first in FRONT else first


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[str]:
    """The modules of ours that a file imports, in functions too; imports for annotations only do not count."""
    own = path.relative_to(ROOT).parts[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    typing_only = {id(node) for guard in guards for node in guard.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in typing_only:
            base = [*own[: len(own) - node.level + 1], *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                full = ROOT.joinpath(*base, alias.name)
                is_module = full.with_suffix(".py").exists() or (full / "__init__.py").exists()
                target = ".".join([*base, alias.name] if is_module else base)
                found.append(target)
    return found


GRAPH = {name_of(path): imports(path) for path in FILES}


def test_every_room_has_its_floor():
    assert {room(name) for name in GRAPH} <= set(FLOORS)


def test_imports_point_down():
    """No statement imports a higher floor. Two arrows go up by name: forecast("olmoe") and what a rank runs."""
    up = [
        (name, target)
        for name, found in GRAPH.items()
        for target in found
        if FLOORS.index(room(target)) > FLOORS.index(room(name))
    ]
    assert not up


def test_no_circle_of_modules():
    edges = {name: set(found) for name, found in GRAPH.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in edges.get(name, ()):
                if target != name:
                    visit(target, (*trail, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_the_package_imports_itself_relatively():
    for path in FILES:
        if "downstream_data" in path.parts:  # lm-eval runs this file by its path
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[0] == "sonar_repro"], (path, node.lineno)


def test_at_most_seven_modules_lie_flat():
    assert len(list(PACKAGE.glob("*.py"))) + (PACKAGE / "gpu_check").is_dir() <= 7


@pytest.mark.parametrize("path", EVERYWHERE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno + 1 <= 60, node.name
