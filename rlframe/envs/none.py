"""env=none: the spaces of a dataset, for a run that learns from it and plays nothing."""

from __future__ import annotations

from typing import Any, NoReturn

import gymnasium

from rlframe.core.errors import ConfigError

NAME = "none"
NOT_PLAYABLE = (
    "env=none cannot be played; give the environment of the dataset (env=ID, in training eval.env=ID), or "
    "estimate without playing (evaluate RUN_DIR estimate=fqe dataset=NAME)"
)


class NoEnv(gymnasium.Env[Any, Any]):
    """Has the spaces of a dataset, and cannot be played."""

    def __init__(self, dataset: str = "") -> None:
        """Raises ConfigError if there is no such dataset."""
        if not dataset:
            raise ConfigError("env=none needs env_kwargs.dataset=NAME, whose spaces it has")
        from rlframe.data.reading import open_dataset  # other environments do not need it

        found = open_dataset(dataset)
        self.observation_space, self.action_space = found.observation_space, found.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> NoReturn:
        raise ConfigError(NOT_PLAYABLE)

    def step(self, action: Any) -> NoReturn:
        raise RuntimeError("env=none cannot be played")


gymnasium.register(NAME, entry_point="rlframe.envs.none:NoEnv", disable_env_checker=True, order_enforce=False)
