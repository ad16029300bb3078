"""A Minimalist Approach to Offline Reinforcement Learning (TD3+BC). Fujimoto & Gu, 2021. NeurIPS 34.

https://arxiv.org/abs/2106.06860

A gradient step is read here and in `td3`, and the files that it names.
"""

from __future__ import annotations

import chz
from torch import Tensor

from rlframe.agents import ActorAgent
from rlframe.algos import td3
from rlframe.algos.defaults import Defaults
from rlframe.core.config import count
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.types import BatchSpec
from rlframe.models import ModelConfig


@chz.chz
class Config(td3.Config):
    """Defaults are those of the paper (table 3); its states are normalised by the mean and variance of the data."""

    for_vectors = Defaults(
        ModelConfig(hidden=(256, 256), activation="relu", normalize_observation=True), BatchSpec(T=1, B=1)
    )

    q_weight: Scheduled = scheduled(2.5, "alpha: the weight of Q, in units of its mean magnitude, beside imitation")
    learning_starts: int = count(0, "env_steps before the first update", low=0)

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> TD3BC:
        return TD3BC(*self.parts(agent, batch_spec, n_steps, seed))


class TD3BC(td3.TD3):
    """TD3, whose actor also imitates the data's actions; the critics' equations stand in DDPG's file."""

    config: Config

    def actor_loss(self, q: Tensor, outputs: Tensor, action_of_data: Tensor) -> Tensor:
        """-λ mean Q_1(s, π(s)) + mean (π(s) - a)²,  λ = α / mean |Q_1(s, π(s))|, a constant   (eq. 5).

        The equation has Q of the data's actions in λ; the authors' code that of the policy's, as here. The mean in λ is
        over the rows of all ranks, and the second mean over the numbers of an action too.
        """
        ranks = self.progress.ranks
        magnitude = ranks.sum_tensor(q.detach().abs().mean()) / ranks.world_size
        scale = self.now.q_weight / magnitude.clamp(min=1e-8)
        return -scale * q.mean() + (self.policy.action(outputs) - action_of_data).square().mean()
