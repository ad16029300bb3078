"""Addressing Function Approximation Error in Actor-Critic Methods (TD3). Fujimoto, van Hoof, Meger, 2018.

https://arxiv.org/abs/1802.09477

A gradient step is read here and in `ddpg`, and the files that it names.
"""

from __future__ import annotations

import chz

from rlframe.agents import ActorAgent
from rlframe.algos import ddpg
from rlframe.algos.defaults import Defaults
from rlframe.core.config import count, positive
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.types import BatchSpec
from rlframe.exploration import NOISE_KINDS, ExploreConfig, explore
from rlframe.models import ModelConfig


@chz.chz
class Config(ddpg.Config):
    """Defaults are those of the paper (sections 5.2 and 6.1, and its code)."""

    for_vectors = Defaults(  # those of the paper's first version, on HalfCheetah and Ant
        ModelConfig(hidden=(256, 256), activation="relu"),
        BatchSpec(T=1, B=1),
        {"learning_rate": 1e-3, "critic_learning_rate": 1e-3, "learning_starts": 10_000},
    )

    learning_rate: Scheduled = scheduled(3e-4, "of the actor; the paper's first version used 1e-3")
    critic_learning_rate: Scheduled = scheduled(3e-4, "of the critics")
    tau: Scheduled = scheduled(0.005, "how far targets move to the online networks at each of their moves", high=1)
    n_critics: int = count(2, "critics; targets take the least of their values", high=10_000)
    policy_interval: int = count(2, "updates of the critics for each of the actor")
    target_interval: int = count(2, "updates of the critics for each move of the targets")
    target_noise: Scheduled = scheduled(0.2, "standard deviation of the noise that smooths the target policy")
    batch_size: int = count(256, "rows of an update")
    replay_ratio: float = positive(256.0, "rows learned from for each env_step: batch_size times the updates a step")
    learning_starts: int = count(25_000, "env_steps before the first update", low=0)
    explore: ExploreConfig | str = explore("gaussian", (*NOISE_KINDS, "gsde", "parameter_noise"), {"std": 0.1})

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> TD3:
        return TD3(*self.parts(agent, batch_spec, n_steps, seed))


class TD3(ddpg.DDPG):
    """DDPG with three changes (algorithm 1), whose equations stand in its file.

    Clipped double Q-learning: two critics learn y = r + γ min_i Q'_i(s', ã), and the actor follows Q_1. Target policy
    smoothing: ã = clip(π'(s') + clip(ε, -c, c), -1, 1), ε ~ N(0, σ). Delayed updates: the actor and the targets have
    their turn every `policy_interval` and `target_interval` updates of the critics.
    """
