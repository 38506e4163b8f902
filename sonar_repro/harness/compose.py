"""From overrides to a checked config: the schema in Hydra's store, composition, and the cross-field checks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..config.schema import Config, ModelConfig, conf_dir
from . import checks

_HYDRA = threading.Lock()  # Hydra keeps one global state per process


def compose(*overrides: str) -> Config:
    """The checked config of one arm, as the command line would compose it from the same overrides.

    Raises:
        UserError: a value or a pair of values that no run can honour.
        HydraException: an option or key that does not exist.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    with _HYDRA:
        GlobalHydra.instance().clear()
        register()
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return resolve(hydra_compose("config", overrides=list(overrides)))


def register() -> None:
    """Register the schema, the sweeper's config and the resolvers; safe to call twice."""
    from hydra.core.config_store import ConfigStore

    OmegaConf.register_new_resolver("first", _first, replace=True)
    OmegaConf.register_new_resolver("share", lambda share, whole: round(share * whole), replace=True)
    OmegaConf.register_new_resolver("final_lr", lambda lr, share: lr * share, replace=True)
    store = ConfigStore.instance()
    store.store(name="base_config", node=Config)
    sweeper = {"_target_": "hydra_plugins.sonar_repro.ArmSweeper", "max_batch_size": None, "params": None}
    store.store(group="hydra/sweeper", name="arms", node=sweeper, provider="sonar_repro")


def _first(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def resolve(cfg: DictConfig) -> Config:
    """Interpolate, convert to dataclasses and check across fields. Raises UserError naming the dotted key."""
    plain = OmegaConf.masked_copy(cfg, [k for k in cfg if k != "hydra"])
    config: Config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    if config.model.config:
        config.model = _own_model(config.model)
    checks.check(config)
    return config


def _own_model(model: ModelConfig) -> ModelConfig:
    """A user's own configuration is named after its folder or hub id, and takes nothing from the model group."""
    path = Path(str(model.config))
    name = path.parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else path.name
    own = "".join(c if c.isalnum() or c in "._" else "_" for c in name) or "own"
    return ModelConfig(name=own, model_type="own", weights="random", config=model.config, attention=model.attention)
