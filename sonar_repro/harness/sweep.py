"""The Hydra sweeper of this harness: compose and check every arm before the first starts, launch the unrecorded."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins

from ..config.schema import Config
from ..errors import UserError
from .compose import resolve
from .plan import Command, preflight
from .runner import Arm, forget_weights, make_arm


class ArmSweeper(BasicSweeper):
    """BasicSweeper with all arms checked up front, duplicates dropped, and recorded arms not launched.

    Launchers are Hydra's own (basic, joblib, submitit); each job runs ``sonar_repro.__main__.run_one``.
    """

    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None and self.launcher is not None and self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        for override in overrides:
            if override.get_key_element() == "scale" and override.is_sweep_override():
                raise UserError(f"{override.input_line}: one scale a sweep; run the command once for each")
        [jobs] = self.split_arguments(overrides, None)
        arms = self._arms(jobs)
        command = Command.current()
        command.arms = list(arms)
        preflight([arm.config for arm in arms])
        if command.arms[0].config.dry_run:
            command.print_plan()
            return []
        with command.progress():
            todo = command.report_recorded()
            launched = [jobs_of for arm, jobs_of in arms.items() if arm in todo]
            if launched:
                command.collect(self.launcher.launch(launched, initial_job_idx=0))
        forget_weights(list(arms))
        return []

    def _arms(self, jobs: list[list[str]]) -> dict[Arm, list[str]]:
        """Compose and check each job. The same arm twice in a sweep is one arm."""
        arms: dict[str, tuple[Arm, list[str]]] = {}
        for job in jobs:
            loader = self.hydra_context.config_loader  # type: ignore[union-attr]
            config: Config = resolve(loader.load_sweep_config(self.config, list(job)))
            arm = make_arm(config, list(job))
            twin = arms.get(arm.arm_id)
            if twin and twin[0].fingerprint != arm.fingerprint:
                raise UserError(
                    f"arm {arm.arm_id}: two arms of this sweep differ but share this name; "
                    "sweep the difference as an axis"
                )
            arms.setdefault(arm.arm_id, (arm, list(job)))
        return dict(arms.values())


def register() -> None:
    """Show the sweeper to Hydra, which instantiates plugins only from its own namespace package.

    The namespace is entered in ``sys.modules``: a folder of that name at our top level would be one more thing to ship.
    """
    try:
        namespace = importlib.import_module("hydra_plugins")
    except ImportError:  # no plugin is installed
        namespace = sys.modules["hydra_plugins"] = types.ModuleType("hydra_plugins")
        namespace.__path__ = []
    namespace.sonar_repro = sys.modules["hydra_plugins.sonar_repro"] = sys.modules[__name__]
    ArmSweeper.__module__ = "hydra_plugins.sonar_repro"
    Plugins.instance().register(ArmSweeper)
