"""Policy gradient with a baseline: REINFORCE (Williams 1992, Machine Learning 8) with a learned value subtracted.

Sutton & Barto 2018, section 13.4.

A gradient step is read here and in `on_policy`, `agents.base`, `agents.policy`, `models.actor_critic`,
`models.encoders`, `models.network`, `models.heads`, `distributions.categorical`, `ops.policy_gradient`, `ops.returns`,
`optimizer_step`, `optimizers.moments` and `core.types`. Skip `compiled`, `cuda_graph` and `kernels`, which only make it
fast, `schedules`, which change numbers during a run, and `models.views`, which says what a network sees.
"""

from __future__ import annotations

import chz
from torch import Tensor

from rlframe.agents import PolicyAgent
from rlframe.algos.defaults import Defaults
from rlframe.algos.on_policy import OnPolicy, OnPolicyConfig, actor_critic_loss, values
from rlframe.core.config import option
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.types import BatchSpec, Samples
from rlframe.ops.policy_gradient import explained_variance, masked_normalize
from rlframe.ops.returns import discounted_return


@chz.chz
class Config(OnPolicyConfig):
    """The return is Monte Carlo to the episode's end, completed by the baseline where the batch ends first."""

    for_vectors = Defaults(batch=BatchSpec(T=32, B=8), own={"learning_rate": 3e-3})

    learning_rate: Scheduled = scheduled(1e-3, "of the optimizer")
    discount: Scheduled = scheduled(0.99, "gamma, per env step", high=1)
    entropy_coef: Scheduled = scheduled(0.0, "weight of the entropy bonus")
    value_coef: Scheduled = scheduled(0.5, "weight of the baseline's squared error")
    max_grad_norm: Scheduled = scheduled(
        0.5, "global norm at which gradients are clipped; inf: never", above=True, infinite=True
    )
    normalize_advantage: bool = option(True, "to mean 0 and variance 1 over the valid rows of all ranks' batches")

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> PolicyGradient:
        return PolicyGradient(agent, n_steps, self)


class PolicyGradient(OnPolicy):
    """One gradient step a batch: θ <- θ + α (G - b(s)) ∇ log π(a|s), and b(s) towards G."""

    saved = ("progress", "optimizer")
    agent: PolicyAgent
    config: Config

    def __init__(self, agent: PolicyAgent, n_steps: int, config: Config | None = None) -> None:
        super().__init__(agent, n_steps, config or Config())

    def _learn(self, samples: Samples) -> dict[str, Tensor]:
        """One gradient step on the whole batch."""
        c = self.now
        valid, baseline = samples.valid, values(self.agent, samples)
        ends = (samples.terminated, samples.truncated, valid)
        return_ = discounted_return(samples.reward, baseline, *ends, c.discount)
        advantage = return_ - baseline[:-1]
        if c.normalize_advantage:
            advantage = masked_normalize(advantage, valid, self.progress.ranks.sum_tensor)
        loss, metrics = self.loss(samples, advantage, return_)
        grad_norm = self.optimizer.minimize(loss, samples, valid)
        fit = explained_variance(baseline[:-1], return_, valid)
        return {**metrics, "grad_norm": grad_norm, "explained_variance": fit}

    def loss(self, samples: Samples, advantage: Tensor, return_: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [] of a batch and its parts, from constants [T, B]; see actor_critic_loss."""
        c = self.now
        return actor_critic_loss(self.agent, samples, advantage, return_, c.value_coef, c.entropy_coef)
