"""algo.discount=auto: the discount that the length of episodes gives."""

from __future__ import annotations

from typing import Any

import chz
import gymnasium

from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError
from rlframe.envs import EnvConfig
from rlframe.experiment.config import Experiment

LEAST, LARGEST, PARTS = 0.95, 0.995, 5.0


def discount_of(n_steps: int) -> float:
    """(T/5 - 1) / (T/5) within 0.95 and 0.995, for episodes of at most T = n_steps, whose fifth is then 1 / (1 - γ).

    (Hansen, Su & Wang 2024, arXiv 2310.16828; also of SimbaV2 and XQC)
    """
    return min(max(1 - PARTS / n_steps, LEAST), LARGEST)


def known_time_limit(config: EnvConfig) -> int:
    """The env steps after which an episode is truncated, as far as it is known without importing anything; else 0."""
    spec = gymnasium.registry.get(config.id) if isinstance(config.id, str) else None
    own = (spec.max_episode_steps or 0) if spec else 0
    limit = config.options.max_episode_steps or config.kwargs.get("max_episode_steps", own)
    return limit if isinstance(limit, int) and limit > 0 else 0


def with_discounts(experiment: Experiment) -> Experiment:
    """The experiment with a number for each discount that is auto.

    Raises:
        ConfigError: the time limit of the environment is not known.
    """
    return experiment.with_algos(lambda algo, name: _with_discount(algo, name, experiment))


def _with_discount(algo: Any, name: str, experiment: Experiment) -> Any:
    if getattr(algo, "discount", 1.0) != AUTO:
        return algo
    key = f"agents.policies.{name}.algo" if name else "algo"
    if not (length := known_time_limit(experiment.env_config())):
        raise ConfigError(
            f"{key}.discount=auto needs the time limit of env={experiment.env}, which is not known; give "
            f"env.max_episode_steps=T or {key}.discount=0.99"
        )
    return chz.replace(algo, discount=discount_of(length))
