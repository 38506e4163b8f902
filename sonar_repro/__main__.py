"""``python -m sonar_repro``: the Hydra entry. Imports no torch, so ``--help`` and configuration errors are instant."""

from __future__ import annotations

import os
import sys
from typing import Any

PARENT_TASKS = {"doctor": "sonar_repro.tasks.doctor", "fetch": "sonar_repro.tasks.fetch"}  # not arms: no record


def run_one(cfg: Any) -> dict[str, Any] | None:
    """Hydra's task function: one arm, in a sweep or alone. Its return value survives a launcher's process boundary."""
    from omegaconf.errors import OmegaConfBaseException

    from .errors import Unsupported, UserError
    from .harness.compose import register, resolve
    from .harness.plan import Command

    register()
    try:
        return _run_one(resolve(cfg))
    except (UserError, Unsupported, OmegaConfBaseException) as error:
        Command.current().mistake = error  # raised here, Hydra would print lines of its own first
    return None


def _run_one(config: Any) -> dict[str, Any] | None:
    import importlib

    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from .harness.plan import Command, preflight
    from .harness.runner import make_arm

    command = Command.current()
    hydra_config = HydraConfig.get()
    if config.task.name in PARENT_TASKS:
        importlib.import_module(PARENT_TASKS[config.task.name]).run(config)
        return None
    arm = make_arm(config, list(hydra_config.overrides.task))
    if hydra_config.mode == RunMode.MULTIRUN:
        return command.run(arm)
    command.arms = [arm]
    preflight([config])
    if config.dry_run:
        command.print_plan()
        return None
    with command.progress():
        return command.run(arm)


def _fit(words: list[str]) -> int:
    """``sonar-repro fit``: a mistake is one line and exit code 2, as everywhere."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from .config.messages import one_line_of
    from .errors import Unsupported, UserError
    from .harness import fit_command
    from .harness.progress import fail

    try:
        return fit_command.main(words)
    except (UserError, Unsupported) as error:
        fail(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        fail(one_line_of(error))
    return 2


def _analysis(words: list[str]) -> int:
    """``sonar-repro analysis``: beside the package in a checkout, inside it in a wheel."""
    import importlib

    try:
        analysis = importlib.import_module(".analysis.__main__", __package__)
    except ModuleNotFoundError:
        analysis = importlib.import_module("analysis.__main__")
    return analysis.main(words)


def main(argv: list[str] | None = None) -> int:
    """Compose, run, and turn a user's mistake into one line and exit code 2."""
    if (sys.argv[1:] if argv is None else argv) in (["--help"], ["-h"]):
        from .config import help

        print(help.text())
        return 0
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["fit"]:
        return _fit(words[1:])
    if words[:1] == ["analysis"]:
        return _analysis(words[1:])
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting with 1
    import hydra
    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from .config.messages import one_line_of
    from .config.schema import conf_dir
    from .errors import Unsupported, UserError
    from .harness.compose import register
    from .harness.plan import Command
    from .harness.progress import fail

    register()
    Plugins.instance()  # scans and re-executes Hydra's own plugin modules: our subclass must be made after that
    from .harness.sweep import register as register_sweeper

    register_sweeper()
    command = Command.begin()
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(run_one)()
        if command.mistake:
            raise command.mistake
    except (UserError, Unsupported) as error:
        fail(str(error))
        return 2
    except (HydraException, OmegaConfBaseException) as error:
        fail(one_line_of(error))
        return 2
    except KeyboardInterrupt:
        fail("interrupted; finished arms are recorded, run the same command to go on")
        return 130
    return command.exit_code()


if __name__ == "__main__":
    sys.exit(main())
