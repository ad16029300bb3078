"""NormalizedRewards: rewards divided by the running deviation of the discounted return, `env.normalize_reward=true`.

As Gymnasium's NormalizeReward does, after Engstrom et al. 2020, "Implementation Matters in Deep RL", section 3
(https://arxiv.org/abs/2005.12729): r / sqrt(Var(G) + 1e-8) with G[t] = γ G[t-1] + r[t]. But all environments of all
ranks share the statistics, which learn from a whole batch before it is scaled, and count one return of 0 at the start,
so that the first reward of all does not become huge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlframe.agents import Agent
from rlframe.algos.base import Algorithm
from rlframe.core.errors import ConfigError
from rlframe.core.ranks import current_ranks
from rlframe.core.schedule import at_last
from rlframe.core.struct import as_numpy
from rlframe.core.types import Samples
from rlframe.envs.options import EnvOptions
from rlframe.envs.rewards import reward_transform
from rlframe.rewards.curiosity import Curiosity
from rlframe.samplers import Source

_EPSILON = 1e-8  # of the variance


class Rewards(ABC):
    """What becomes of a batch's rewards between the sampler and the algorithm, in the learner's process."""

    @abstractmethod
    def __call__(self, samples: Samples) -> Samples:
        """The samples with the rewards to learn from."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """For snapshots."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], reasons: Sequence[str]) -> None:
        """Continue from a saved state; `reasons`: why each environment's episode was restarted, or ""."""


class UnchangedRewards(Rewards):
    """The rewards that the sampler wrote."""

    def __call__(self, samples: Samples) -> Samples:
        return samples

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], reasons: Sequence[str]) -> None:
        """There is none."""


UNCHANGED = UnchangedRewards()


class NormalizedRewards(Rewards):
    """clip(scale * r / deviation), with the scale and the bounds of the options.

    The agent's previous rewards stay those of the sampler, in acting, learning and evaluation alike.
    """

    def __init__(self, n_envs: int, discount: float, options: EnvOptions) -> None:
        """`n_envs`: of this rank's sampler, 0 if it has none."""
        self.discount, self._transform, self._ranks = discount, reward_transform(options), current_ranks()
        self.returns = np.zeros(n_envs)  # G of each environment, discounted from its episode's start
        self.count, self.mean, self.squares = 1.0, 0.0, 0.0  # of all G: squares is the sum of squared differences
        self._reward = np.zeros((0, n_envs), np.float32)

    @property
    def deviation(self) -> float:
        return float(np.sqrt(self.squares / self.count + _EPSILON))

    def __call__(self, samples: Samples) -> Samples:
        reward = as_numpy(samples.reward)
        ends = as_numpy(samples.terminated) | as_numpy(samples.truncated)
        self._learn(self._discounted(reward, ends)[as_numpy(samples.valid)])
        if reward.shape != self._reward.shape:
            self._reward = np.zeros(reward.shape, np.float32)
        self._transform(reward / np.float32(self.deviation), self._reward)
        return replace(samples, reward=torch.from_numpy(self._reward))

    def _discounted(self, reward: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """G [T, B] of every row."""
        found, running = np.empty(reward.shape), self.returns
        for t in range(len(reward)):
            np.add(self.discount * running, reward[t], out=found[t])
            running = np.where(ends[t], 0.0, found[t])
        self.returns = running
        return found

    def _learn(self, returns: np.ndarray) -> None:
        """Add the returns [n] of all ranks, in rank order, so that every rank has the same statistics."""
        mean = returns.mean() if len(returns) else 0.0
        own = [len(returns), float(mean), float(np.square(returns - mean).sum())]
        for count, mean, squares in self._ranks.gather(own):
            if count:  # Chan et al. 1979, eq. 2.1
                total, difference = self.count + count, mean - self.mean
                self.mean += difference * count / total
                self.squares += squares + difference**2 * self.count * count / total
                self.count = total

    def state_dict(self) -> dict[str, Any]:
        return {"returns": self.returns.copy(), "count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, Any], reasons: Sequence[str]) -> None:
        self.count, self.mean, self.squares = (float(state[name]) for name in ("count", "mean", "squares"))
        self.returns = np.where([bool(reason) for reason in reasons], 0.0, state["returns"]).astype(float)


def rewards_for(sampler: Source, algo: Algorithm) -> Rewards:
    """What the options of the sampler's environments ask for; the discount is that of the algorithm, in the end."""
    env, ranks = sampler.env, current_ranks()
    if env is None or not env.options.normalize_reward:
        return UNCHANGED
    n_envs = sampler.batch_spec.B if ranks.rank < ranks.n_samplers else 0
    return NormalizedRewards(n_envs, at_last(getattr(algo.unwrapped.config, "discount", 1.0)), env.options)


def check_rewards(sampler: Source, agent: Agent, algo: Algorithm, rewards: Rewards) -> None:
    """Raise ConfigError unless these rewards are what the sampler asks for, and the agent can act on them.

    An agent that reads previous rewards from a replay would find other ones there than it acted on.
    """
    normalizes = sampler.env is not None and sampler.env.options.normalize_reward
    replays = getattr(algo.unwrapped, "replay", None) is not None
    reads_replayed = replays and _reads_reward(agent)
    for key, changes, remedy in (
        ("env.normalize_reward=true", normalizes, "leave feed_back out, or use env.reward_scale"),
        ("reward.bonus", isinstance(algo, Curiosity), "leave feed_back out, or use an algorithm without replay"),
    ):
        if changes and reads_replayed:
            raise ConfigError(
                f"{key} does not work with a replay and a model that sees the previous reward (model.feed_back=true), "
                f"which was another when it acted; {remedy}"
            )
    if normalizes and isinstance(rewards, UnchangedRewards):
        raise ConfigError(
            "env.normalize_reward=true: give the learner its rewards, Learner(agent, algo, rewards_for(sampler, algo))"
        )


def _reads_reward(agent: Agent) -> bool:
    """Whether the network sees the previous reward; a memory of ours alone sees `first`, a user's model may do both."""
    config, reads = agent.model_config, bool(getattr(agent, "model", agent).uses_previous)
    return reads if config is None else bool(config.feed_back)
