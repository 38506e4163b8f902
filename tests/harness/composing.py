"""Configs and commands inside the test process."""

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from sonar_repro import config as configs
from sonar_repro.__main__ import main


def composed(*overrides):
    GlobalHydra.instance().clear()
    configs.register()
    with initialize_config_dir(str(configs.conf_dir()), version_base="1.3"):
        return configs.resolve(compose("config", overrides=list(overrides)))


def run_main(capsys, *argv):
    GlobalHydra.instance().clear()
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err
