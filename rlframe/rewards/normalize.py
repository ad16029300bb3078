"""NormalizedRewards: rewards divided by the running deviation of the discounted return, `env.normalize_reward=true`.

As Gymnasium's NormalizeReward does, after Engstrom et al. 2020, "Implementation Matters in Deep RL", section 3
(https://arxiv.org/abs/2005.12729): r / sqrt(Var(G) + 1e-8) with G[t] = γ G[t-1] + r[t]. But all environments of all
ranks share the statistics, which learn from a whole batch before it is scaled, and count one return of 0 at the start,
so that the first reward of all does not become huge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlframe.agents import Agent
from rlframe.algos.base import Algorithm
from rlframe.algos.running_deviation import RunningDeviation
from rlframe.core.errors import ConfigError
from rlframe.core.schedule import at_last
from rlframe.core.types import Samples
from rlframe.envs.options import EnvOptions, clip_bounds
from rlframe.rewards.base import UNCHANGED, Rewards, UnchangedRewards
from rlframe.rewards.curiosity import Curiosity
from rlframe.samplers import Source


class NormalizedRewards(Rewards):
    """clip(scale * r / deviation), with the scale and the bounds of the options.

    The agent's previous rewards stay those of the sampler, in acting, learning and evaluation alike.
    """

    def __init__(self, discount: float, options: EnvOptions) -> None:
        self.deviation = RunningDeviation(discount)
        self._scale, self._bounds = options.reward_scale, clip_bounds(options.reward_clip)

    def __call__(self, samples: Samples) -> Samples:
        self.deviation.update(samples.reward, samples, over_ends=False)
        reward = samples.reward / self.deviation.value.float()
        return replace(samples, reward=(reward * self._scale).clamp(*self._bounds))

    def state_dict(self) -> dict[str, Any]:
        return self.deviation.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.deviation.load_state_dict(state)


def rewards_for(sampler: Source, algo: Algorithm) -> Rewards:
    """What the options of the sampler's environments ask for; the discount is that of the algorithm, in the end."""
    env = sampler.env
    if env is None or not env.options.normalize_reward:
        return UNCHANGED
    return NormalizedRewards(at_last(getattr(algo.config, "discount", 1.0)), env.options)


def check_rewards(sampler: Source, agent: Agent, algo: Algorithm, rewards: Rewards) -> None:
    """Raise ConfigError unless these rewards are what the sampler asks for, and the agent can act on them.

    An agent that reads previous rewards from a replay would find other ones there than it acted on.
    """
    normalizes = sampler.env is not None and sampler.env.options.normalize_reward
    model = agent.model_config  # a memory of ours alone sees `first`, a user's model may see the reward too
    reads_reward = agent.uses_previous if model is None else model.feed_back
    replays = getattr(algo, "replay", None) is not None
    scaled = getattr(getattr(algo.config, "replay", None), "return_range", 0)
    for key, changes, remedy in (
        ("env.normalize_reward=true", normalizes, "leave feed_back out, or use env.reward_scale"),
        ("reward.bonus", isinstance(rewards, Curiosity), "leave feed_back out, or use an algorithm without replay"),
        ("algo.replay.return_range", bool(scaled), "leave one of them out"),
    ):
        if changes and replays and reads_reward:
            raise ConfigError(
                f"{key} does not work with a replay and a model that sees the previous reward (model.feed_back=true), "
                f"which was another when it acted; {remedy}"
            )
    inner = rewards.inner if isinstance(rewards, Curiosity) else rewards
    if normalizes and isinstance(inner, UnchangedRewards):
        raise ConfigError(
            "env.normalize_reward=true: give the learner its rewards, Learner(agent, algo, rewards_for(sampler, algo))"
        )
