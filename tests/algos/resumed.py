"""A process that goes on with runs from their snapshots: python -m tests.algos.resumed DIRECTORY (see test_resume)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rlframe.algos import ddpg, dqn, r2d1, sac, td3
from rlframe.envs import EnvConfig, make_envs
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.record.snapshot import load_snapshot, resolve_snapshot
from rlframe.replay import ReplayConfig
from rlframe.runners import MinibatchRl
from rlframe.samplers import SerialSampler

BATCH_T, B = 8, 2
HALF, WHOLE = 20 * (BATCH_T - 1) * B, 40 * (BATCH_T - 1) * B  # env_steps: the last row of an episode is not one
COMMON: dict[str, Any] = {"replay": ReplayConfig(size=400), "batch_size": 16, "learn_from": 28, "replay_ratio": 4.0}
RAINBOW: dict[str, Any] = {
    "double": True,
    "dueling": True,
    "noisy": True,
    "n_step": 3,
    "prioritized": True,
    "value": "categorical",
    "target_interval": 10,
}
SEQUENCES: dict[str, Any] = {"batch_size": 4, "burn_in": 2, "learn_T": 5, "target_interval": 10}
CASES: dict[str, tuple[Any, bool, dict[str, Any], dict[str, Any]]] = {  # module, discrete actions, settings, model
    "dqn": (dqn, True, {**COMMON, "target_interval": 10}, {}),
    "rainbow": (dqn, True, {**COMMON, **RAINBOW}, {}),
    "r2d1": (r2d1, True, {**COMMON, **SEQUENCES}, {"memory": "lstm", "memory_size": 8}),
    "ddpg": (ddpg, False, COMMON, {"normalize_observation": True}),
    "td3": (td3, False, COMMON, {}),
    "sac": (sac, False, COMMON, {}),
    "sac_discrete": (sac, True, COMMON, {}),
}


class Clockwork(gymnasium.Env):
    """Episodes of as many steps as a batch has, less the row of their end: each batch begins with new ones."""

    def __init__(self, discrete: bool) -> None:
        self.observation_space = gymnasium.spaces.Box(-2, 2, (3,), np.float32)
        self.action_space: Any = (
            gymnasium.spaces.Discrete(3) if discrete else gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        )
        self.t, self.last = 0, 0.0

    def _observation(self) -> np.ndarray:
        return np.array([np.sin(self.t), np.cos(self.t), self.last], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.t, self.last = 0, 0.0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t, self.last = self.t + 1, float(np.asarray(action).item()) / 2
        return self._observation(), float(np.sin(self.t) * self.last), False, self.t == BATCH_T - 1, {}


def train(case: str, directory: Path, until: int, resume: bool) -> None:
    """Train to `until` env_steps of a run of WHOLE, from the run's snapshot or from the start."""
    module, discrete, settings, model = CASES[case]
    config = module.Config(**settings)
    envs = make_envs(EnvConfig(Clockwork, {"discrete": discrete}), B, list(range(B)))
    network = ModelConfig(hidden=(16,), **model)
    agent = config.make_agent(envs.observation_space, envs.action_space, network, 0)
    sampler = SerialSampler(envs, agent, BATCH_T)
    algo = config.make_algorithm(agent, sampler.batch_spec, WHOLE, 0)
    with MinibatchRl(sampler, agent, algo, until, 100) as runner, logger_context(directory, resume=resume):
        if resume:
            runner.resume(load_snapshot(resolve_snapshot(directory))[0])
        runner.train()


if __name__ == "__main__":
    for name in CASES:
        train(name, Path(sys.argv[1]) / name / "run_0", WHOLE, resume=True)
