"""Learners of one run: small trainings on one replay, of one process or divided over two; a job for launch_ranks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rlframe.algos import ddpg, dqn, r2d1, sac, td3
from rlframe.core.ranks import current_ranks
from rlframe.envs import EnvConfig
from rlframe.models import ModelConfig
from rlframe.replay import InMemory
from rlframe.runners import Learner
from rlframe.runners.ranks import check_equal, learned
from rlframe.samplers import no_sampler, serial
from rlframe.system.distributed import RankInfo, join

CARTPOLE = EnvConfig("CartPole-v1", backend="python")
PENDULUM = EnvConfig("Pendulum-v1", {"max_episode_steps": 7}, backend="python")
GROWING = EnvConfig("tests.ranks.envs:Growing", backend="python")
IMAGES = EnvConfig("tests.ranks.envs:Pictures", backend="python")
PRIORITIZED = {"prioritized": True, "alpha": 0.9}
SAME: dict[str, tuple[ModuleType, EnvConfig, dict[str, Any], dict[str, Any]]] = {  # updates without noise
    "dqn": (dqn, CARTPOLE, {"batch_size": 8, "target_interval": 5}, {"normalize_observation": True}),
    "dqn, prioritized": (dqn, GROWING, {"batch_size": 8, **PRIORITIZED}, {}),
    "r2d1": (r2d1, CARTPOLE, {"batch_size": 4, "burn_in": 2, "learn_T": 4}, {"memory": "lstm", "memory_size": 8}),
    "ddpg": (ddpg, PENDULUM, {"batch_size": 8}, {"normalize_observation": True}),
}
NOISY: dict[str, tuple[ModuleType, EnvConfig, dict[str, Any], dict[str, Any]]] = {
    "dqn, images": (dqn, IMAGES, {"batch_size": 8}, {"image_hidden": (8,)}),
    "dqn, noisy": (dqn, CARTPOLE, {"batch_size": 8, "explore": "noisy"}, {}),
    "td3": (td3, PENDULUM, {"batch_size": 8}, {}),
    "sac": (sac, PENDULUM, {"batch_size": 8}, {"normalize_observation": True}),
}
N_BATCHES, INTERRUPTED = 16, 11


class Training:
    """A sampler, an agent and an algorithm; this rank has environments, or only learns."""

    def __init__(self, name: str) -> None:
        module, env, settings, model = {**SAME, **NOISY}[name]
        config = module.Config(replay=InMemory(size=1_000), replay_ratio=2.0, learning_starts=32, **settings)
        config_class = no_sampler.NoSamplerConfig if current_ranks().rank else serial.Config
        sampler = config_class(batch_T=4, batch_B=1 if env is IMAGES else 2)
        envs = sampler.make_envs(env, 5, ())
        self.agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,), **model), 5)
        self.sampler = sampler.make_sampler(envs, self.agent, 5)
        self.algo = config.make_algorithm(self.agent, self.sampler.batch_spec, 1_000, 5)

    def train(self, n_batches: int, last_updates: int = -1) -> None:
        """Collect and learn; after the last batch make so many updates, -1: all."""
        for i in range(n_batches):
            self.algo.receive(self.sampler.collect())
            due = self.algo.updates_due()
            for _ in range(last_updates if i == n_batches - 1 and last_updates >= 0 else due):
                self.algo.update()

    def results(self) -> dict[str, Any]:
        check_equal(learned(Learner(self.agent, self.algo)), current_ranks())
        return {
            "learned": {name: x.detach().clone() for name, x in learned(Learner(self.agent, self.algo)).items()},
            "counts": self.algo.progress.state_dict(),
            "counters": self.algo.counters(),
        }


def trained(name: str) -> dict[str, Any]:
    training = Training(name)
    with closing(training.sampler):
        training.train(N_BATCHES)
        return training.results()


def interrupted(name: str) -> dict[str, Any]:
    """As `trained`, but after a batch and one of its updates, everything is made anew and loaded."""
    first = Training(name)
    with closing(first.sampler):
        first.train(INTERRUPTED, last_updates=1)
        states = [part.state_dict() for part in (first.agent, first.algo, first.sampler)]
        second = Training(name)
        with closing(second.sampler):
            for part, state in zip((second.agent, second.algo, second.sampler), states, strict=True):
                part.load_state_dict(state)
            for _ in range(second.algo.updates_due()):
                second.algo.update()
            second.train(N_BATCHES - INTERRUPTED)
            return second.results()


def job(info: RankInfo, folder: Path) -> None:
    """Every training, as one of the learners; writes a file of its results."""
    torch.set_num_threads(2)
    with join(info):
        results = {name: trained(name) for name in {**SAME, **NOISY}}
        resumed = {name: interrupted(name) for name in {**SAME, **NOISY}}
        torch.save({"trained": results, "resumed": resumed}, folder / f"{info.rank}.pt")
