"""Asynchronous Methods for Deep Reinforcement Learning, synchronously. Mnih et al., 2016. arXiv 1602.01783.

A gradient step is read here and in `on_policy`, `agents.base`, `agents.policy`, `models.actor_critic`,
`models.encoders`, `models.network`, `models.heads`, `distributions.categorical`, `ops.policy_gradient`,
`ops.returns`, `updates.optimizer_step`, `optimizers.moments` and `core.types`.
"""

from __future__ import annotations

import chz
from torch import Tensor

from rlframe.agents import PolicyAgent
from rlframe.algos.defaults import Defaults
from rlframe.algos.on_policy import OnPolicyActorCritic, OnPolicyConfig
from rlframe.core.config import option
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.types import BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.ops.returns import generalized_advantage
from rlframe.optimizers import OptimizerConfig, optimizer


@chz.chz
class Config(OnPolicyConfig):
    """Defaults follow the paper; n-step returns are λ = 1 over short batches (sampler.batch_T=5)."""

    for_images = Defaults(ModelConfig(activation="relu"), BatchSpec(T=5, B=16))
    for_vectors = Defaults(batch=BatchSpec(T=5, B=8), own={"learning_rate": 2e-3, "entropy_coef": 0.0})

    learning_rate: Scheduled = scheduled("linear(7e-4,0)", "of the optimizer")
    optimizer: OptimizerConfig | str = optimizer("rmsprop", epsilon=1e-5)
    gae_lambda: Scheduled = scheduled(1.0, "1: the paper's n-step advantage, bootstrapped at the batch's end", high=1)
    entropy_coef: Scheduled = scheduled(0.01, "beta: weight of the entropy bonus")
    normalize_advantage: bool = option(False, "to mean 0 and variance 1 over the valid rows of all ranks' batches")

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> A2C:
        return A2C(agent, n_steps, self)


class A2C(OnPolicyActorCritic):
    """One gradient step a batch on the policy gradient, the value error and the entropy."""

    config: Config

    def __init__(self, agent: PolicyAgent, n_steps: int, config: Config | None = None) -> None:
        super().__init__(agent, n_steps, config or Config())

    def targets(self, samples: Samples, value: Tensor) -> tuple[Tensor, Tensor]:
        """A = Σ_k (γλ)^k δ_{t+k},  δ_t = r_t + γ V(s_{t+1}) - V(s_t), and G = A + V; with λ = 1 the paper's."""
        c, ends = self.now, (samples.terminated, samples.truncated, samples.valid)
        return generalized_advantage(samples.reward, value, *ends, c.discount, c.gae_lambda)
