"""The wheel: what it installs, what its metadata may hold, and that it answers from an empty folder."""

import email
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built by the installed hatchling: no index is asked."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return next(folder.glob("*.whl"))


def test_the_wheel_takes_one_name_and_holds_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sonar_repro"}
    for needed in ("py.typed", "conf/config.yaml", "analysis/__main__.py", "forecast/hosts/amd_epyc.json"):
        assert f"sonar_repro/{needed}" in names
    assert not [name for name in names if "/output/" in name or name.endswith(".pyc")]


def test_the_metadata_has_no_direct_reference_and_names_the_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert not [need for need in metadata.get_all("Requires-Dist") if " @ " in need or "://" in need]
    assert "sonar-repro = sonar_repro.__main__:main" in scripts
    assert metadata["Description-Content-Type"] == "text/markdown" and "Typing :: Typed" in metadata.get_all(
        "Classifier"
    )


def test_an_unpacked_wheel_answers_from_another_folder(wheel, tmp_path):
    """With this environment's libraries and none of this checkout on the path."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*words):
        command = [sys.executable, "-m", "sonar_repro", *words]
        return subprocess.run(
            command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True, timeout=600
        )

    help_page = run("fit", "--help")
    assert help_page.returncode == 0 and help_page.stdout.count("sonar-repro fit ") >= 6
    known = run("fit", "nosuch")
    assert known.returncode == 2 and "olmoe" in known.stderr
    analysis = run("analysis", "--help")
    assert analysis.returncode == 0 and "tables" in analysis.stdout
    assert not list((tmp_path / "elsewhere").iterdir())
