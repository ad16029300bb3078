"""Policy gradient with a baseline: REINFORCE (Williams 1992, Machine Learning 8) with a learned value subtracted.

Sutton & Barto 2018, section 13.4.

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
from rlframe.ops.returns import discounted_return


@chz.chz
class Config(OnPolicyConfig):
    """The return is Monte Carlo to the episode's end, completed by the baseline where the batch ends first."""

    for_vectors = Defaults(batch=BatchSpec(T=32, B=8), own={"learning_rate": 3e-3})

    learning_rate: Scheduled = scheduled(1e-3, "of the optimizer")
    entropy_coef: Scheduled = scheduled(0.0, "weight of the entropy bonus")
    normalize_advantage: bool = option(True, "to mean 0 and variance 1 over the valid rows of all ranks' batches")

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> PolicyGradient:
        return PolicyGradient(agent, n_steps, self)


class PolicyGradient(OnPolicyActorCritic):
    """One gradient step a batch: θ <- θ + α (G - b(s)) ∇ log π(a|s), and b(s) towards G."""

    config: Config

    def __init__(self, agent: PolicyAgent, n_steps: int, config: Config | None = None) -> None:
        super().__init__(agent, n_steps, config or Config())

    def targets(self, samples: Samples, value: Tensor) -> tuple[Tensor, Tensor]:
        """G - b(s), and G."""
        ends = (samples.terminated, samples.truncated, samples.valid)
        return_ = discounted_return(samples.reward, value, *ends, self.now.discount)
        return return_ - value[:-1], return_
