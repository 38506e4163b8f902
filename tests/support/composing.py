"""Configs and commands inside the test process."""

from hydra.core.global_hydra import GlobalHydra

from sonar_repro.__main__ import main
from sonar_repro.harness.compose import compose as composed  # noqa: F401


def run_main(capsys, *argv):
    GlobalHydra.instance().clear()
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err
