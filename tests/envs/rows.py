"""An EnvStep to write into, and histories of random actions, for the tests of environments."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlframe.core import spaces
from rlframe.core.struct import map_tree
from rlframe.envs import EnvConfig, Envs, EnvStep, make_envs


def rows_for(envs: Envs) -> EnvStep:
    """An EnvStep for `envs`, filled with values that no environment writes."""

    def flags() -> np.ndarray:
        return np.ones(envs.n, np.bool_)

    def numbers() -> np.ndarray:
        return np.full(envs.n, -99, np.float32)

    observation = spaces.zeros(envs.observation_space, (envs.n,))
    return EnvStep(observation, flags(), numbers(), flags(), flags(), flags(), numbers(), flags())


@dataclass
class Walk:
    """The steps of `walk`, each a copy."""

    start: Any  # the first observation
    steps: list[EnvStep] = field(default_factory=list)

    def __getattr__(self, name: str) -> np.ndarray:
        vars(self)[name] = found = np.stack([vars(step)[name] for step in self.steps])  # [T, B]
        return found


def walk(envs: Envs, n_steps: int, seed: int = 0) -> Walk:
    """Reset, then take random canonical actions."""
    rng = np.random.default_rng(seed)
    out = rows_for(envs)
    envs.reset(out)
    assert out.first.all()
    seen = Walk(map_tree(np.copy, out.observation))
    for _ in range(n_steps):
        envs.step(spaces.random_action(envs.action_space, rng, envs.n), out)
        seen.steps.append(out.map(np.copy))
    return seen


def made(id_: Any, n: int, seeds: Any = None, backend: str = "auto", **kwargs: Any) -> Envs:
    """A batch of environments; the default seeds are 10, 11, ..."""
    return make_envs(EnvConfig(id_, kwargs, backend), n, list(seeds) if seeds is not None else list(range(10, 10 + n)))
