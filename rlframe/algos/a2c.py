"""Asynchronous Methods for Deep Reinforcement Learning, synchronously. Mnih et al., 2016. arXiv 1602.01783."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chz
from gymnasium import Space
from torch import Tensor

from rlframe.agents import PolicyAgent, make_policy_agent
from rlframe.algos.base import Algorithm, Progress, UpdateMetrics
from rlframe.algos.cuda_graph import graphed
from rlframe.algos.on_policy import policy_gradient, values
from rlframe.algos.optimizer_step import Updater
from rlframe.core.config import choice, fraction, option
from rlframe.core.schedule import annealed
from rlframe.core.types import BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.ops.masked import explained_variance, masked_normalize
from rlframe.ops.returns import generalized_advantage


@chz.chz
class Config:
    """Defaults follow the paper; n-step returns are λ = 1 over short batches (sampler.batch_T=5)."""

    learning_rate: float = option(7e-4, "of the optimizer")
    learning_rate_schedule: str = choice("linear", ("linear", "constant"), "over runner.n_steps")
    optimizer: str = choice("rmsprop", ("rmsprop", "adam"), "the paper uses RMSProp")
    discount: float = fraction(0.99, "gamma, per env step")
    gae_lambda: float = fraction(1.0, "1: the paper's n-step advantage, bootstrapped at the batch's end")
    entropy_coef: float = option(0.01, "beta: weight of the entropy bonus")
    value_coef: float = option(0.5, "weight of the value loss")
    max_grad_norm: float = option(0.5, "global norm at which gradients are clipped")
    normalize_advantage: bool = option(False, "to mean 0 and variance 1 over the valid rows of all ranks' batches")

    def make_agent(self, observation_space: Space, action_space: Space, model: ModelConfig, seed: int) -> PolicyAgent:
        return make_policy_agent(observation_space, action_space, model, seed)

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int) -> A2C:
        return A2C(agent, batch_spec, n_steps, self)


class A2C(Algorithm):
    """One gradient step a batch on the policy gradient, the value error and the entropy."""

    def __init__(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, config: Config | None = None) -> None:
        self.agent, self.config = agent, config or Config()
        self.progress = Progress()
        rate = annealed(self.config.learning_rate_schedule, self.config.learning_rate, n_steps)
        self.updater = Updater(
            agent.parameters(), self.config.optimizer, rate, self.config.max_grad_norm, self.progress
        )
        device = next(agent.parameters()).device
        self.learn = graphed(self._learn, device, [self.updater], looks=agent.recurrent)  # at where episodes begin
        self.samples: list[Samples] = []  # at most one: the batch to learn from

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)
        self.samples = [samples.to(next(self.agent.parameters()).device)]

    def updates_due(self) -> int:
        return len(self.samples)

    def update(self) -> UpdateMetrics:
        samples = self.samples.pop()
        metrics = self.learn(samples)
        self.progress.updates += 1
        self.agent.observe(samples.observation)
        return {**metrics, "learning_rate": self.updater.rate}

    def _learn(self, samples: Samples) -> dict[str, Tensor]:
        """One gradient step on the whole batch."""
        config = self.config
        old_value = values(self.agent, samples)
        ends = (samples.terminated, samples.truncated, samples.valid)
        advantage, return_ = generalized_advantage(samples.reward, old_value, *ends, config.discount, config.gae_lambda)
        if config.normalize_advantage:
            advantage = masked_normalize(advantage, samples.valid, self.progress.ranks.total)

        run = self.agent.run(samples.inputs[:-1], samples.state, samples.action)
        loss, metrics = policy_gradient(run, samples, advantage, return_, config.value_coef, config.entropy_coef)
        grad_norm = self.updater.follow(loss, samples, samples.valid)
        fit = explained_variance(old_value[:-1], return_, samples.valid)
        return {**metrics, "grad_norm": grad_norm, "explained_variance": fit}

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.updater.state_dict(), "progress": self.progress.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updater.load_state_dict(state["optimizer"])
        self.progress.load_state_dict(state["progress"])
