"""Proximal Policy Optimization Algorithms. Schulman, Wolski, Dhariwal, Radford, Klimov, 2017. arXiv 1707.06347."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import chz
import torch
from gymnasium import Space
from torch import Tensor

from rlframe.agents import PolicyAgent, make_policy_agent
from rlframe.algos.base import Algorithm, Progress, UpdateMetrics
from rlframe.algos.cuda_graph import graphed
from rlframe.algos.on_policy import Batch, check_minibatches, make_batch, minibatches, values
from rlframe.algos.optimizer_step import Updater
from rlframe.algos.targets import load_generator
from rlframe.core.config import choice, count, fraction, option
from rlframe.core.schedule import annealed
from rlframe.core.seeding import Role, generator
from rlframe.core.struct import Tree
from rlframe.core.types import BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.ops.masked import explained_variance, masked_normalize
from rlframe.ops.returns import generalized_advantage


class Rows(NamedTuple):
    """What a minibatch tells: each of its rows, and the norm of their gradient."""

    surrogate: Tensor
    error: Tensor
    entropy: Tensor
    log_ratio: Tensor
    weight: Tensor
    norm: Tensor


@chz.chz
class Config:
    """Defaults are those of the paper's Atari runs; the presets have tuned ones for each environment."""

    learning_rate: float = option(2.5e-4, "Adam")
    learning_rate_schedule: str = choice("linear", ("linear", "constant"), "over runner.n_steps")
    discount: float = fraction(0.99, "gamma, per env step")
    gae_lambda: float = fraction(0.95, "lambda of GAE")
    clip: float = option(0.1, "epsilon: the ratio stays within 1 ± clip")
    clip_schedule: str = choice("constant", ("linear", "constant"), "over runner.n_steps")
    value_clip: float = option(
        math.inf, "largest move of the value from that when acting, in units of return; inf: none"
    )
    epochs: int = count(4, "passes over each batch")
    minibatches: int = count(4, "gradient steps an epoch; of rows, or of whole sequences with memory")
    entropy_coef: float = option(0.01, "weight of the entropy bonus")
    value_coef: float = option(0.5, "weight of the value loss")
    max_grad_norm: float = option(0.5, "global norm at which gradients are clipped")
    target_kl: float = option(math.inf, "end the epochs once the mean KL passes 1.5 times this; inf: never")
    normalize_advantage: bool = option(True, "to mean 0 and variance 1 over the valid rows of all ranks' minibatches")
    recompute_advantage: bool = option(False, "once an epoch, with the newest values")

    def make_agent(self, observation_space: Space, action_space: Space, model: ModelConfig, seed: int) -> PolicyAgent:
        return make_policy_agent(observation_space, action_space, model, seed)

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int) -> PPO:
        return PPO(agent, batch_spec, n_steps, self, seed)


class PPO(Algorithm):
    """Clipped surrogate objective, value loss and entropy bonus, in epochs of minibatches over each batch."""

    def __init__(
        self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, config: Config | None = None, seed: int = 0
    ) -> None:
        self.agent, self.config = agent, config or Config()
        check_minibatches(self.config.minibatches, batch_spec, agent.recurrent)
        if self.config.epochs < 1:
            raise ValueError(f"algo.epochs={self.config.epochs} must be at least 1")
        self.progress = Progress()
        self.rng = generator(seed, Role.ALGO)
        self.clip = annealed(self.config.clip_schedule, self.config.clip, n_steps)
        rate = annealed(self.config.learning_rate_schedule, self.config.learning_rate, n_steps)
        self.updater = Updater(agent.parameters(), "adam", rate, self.config.max_grad_norm, self.progress)
        looks = agent.recurrent or math.isfinite(self.config.target_kl)  # at where episodes begin, or at the KL
        self.learn = graphed(self._learn, next(agent.parameters()).device, [self.updater], looks=looks)
        self.samples: list[Samples] = []  # at most one: the batch to learn from

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)
        self.samples = [samples.to(next(self.agent.parameters()).device)]

    def updates_due(self) -> int:
        return len(self.samples)

    def update(self) -> UpdateMetrics:
        samples = self.samples.pop()
        batch = self._evaluate(samples, values(self.agent, samples))
        fit = explained_variance(batch.value, batch.return_, batch.valid)
        rows: list[Rows] = []
        for epoch in range(self.config.epochs):
            if epoch and self.config.recompute_advantage:
                batch = self._reevaluate(samples)
            if not self._epoch(batch, samples.state, rows):
                break
        self.agent.observe(samples.observation)  # after learning: acting and learning saw the same statistics
        return {**self._means(rows), "explained_variance": fit, "learning_rate": self.updater.rate}

    def _evaluate(self, samples: Samples, value: Tensor) -> Batch:
        advantage, return_ = generalized_advantage(
            samples.reward,
            value,
            samples.terminated,
            samples.truncated,
            samples.valid,
            self.config.discount,
            self.config.gae_lambda,
        )
        return make_batch(samples, advantage, return_, self.agent.model.uses_previous)

    def _reevaluate(self, samples: Samples) -> Batch:
        with torch.no_grad():
            value = self.agent(samples.inputs, samples.state)[1]
        return self._evaluate(samples, value)

    def _epoch(self, batch: Batch, state: Tree, rows: list[Rows]) -> bool:
        """One pass over the batch; False if the KL says stop."""
        parts = minibatches(batch, state, self.config.minibatches, self.agent.recurrent, self.rng, self._prepared)
        return all(self._descend(minibatch, minibatch_state, rows) for minibatch, minibatch_state in parts)

    def _descend(self, batch: Batch, state: Tree, rows: list[Rows]) -> bool:
        """Learn from a minibatch; False if the KL says stop instead."""
        found, goes_on = self.learn((batch, state, self.clip(self.progress.scheduled)))
        self.progress.updates += goes_on
        rows.append(found)
        return goes_on

    def _prepared(self, advantage: Tensor, valid: Tensor) -> Tensor:
        """The advantages [minibatches, rows] to learn from."""
        if not self.config.normalize_advantage:
            return advantage
        return masked_normalize(advantage, valid, self.progress.ranks.total, dim=1)

    def _learn(self, inputs: tuple[Batch, Tree, float]) -> tuple[Rows, bool]:
        """One gradient step on eq. 9, its gradient written out for each row; False if the KL says stop instead.

        From a minibatch, the state before it and the clip of now.
        """
        batch, state, clip = inputs
        c, weight, advantage = self.config, batch.weight, batch.advantage
        run = self.agent.run(batch.inputs, state, batch.action)
        log_ratio = torch.where(batch.valid, run.log_prob - batch.log_prob, 0.0)  # so that no other row's exp overflows
        ratio = log_ratio.exp()
        free, clipped = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
        surrogate = torch.min(free, clipped)  # eq. 7
        error, of_value = self._value_error(run.value, batch)
        loss = (weight * (c.value_coef * error - surrogate - c.entropy_coef * run.entropy)).sum()
        goes_on, norm = not self._moved_too_far(ratio, log_ratio, weight), torch.zeros_like(loss)
        if goes_on:
            run.back(
                -weight * torch.where(free <= clipped, free, 0.0),  # d r / d log π = r, and what is clipped stays
                -c.entropy_coef * weight,
                c.value_coef * weight * of_value,
            )
            norm = self.updater.follow(loss, batch, batch.valid)
        return Rows(surrogate, error, run.entropy, log_ratio, weight, norm), goes_on

    def _moved_too_far(self, ratio: Tensor, log_ratio: Tensor, weight: Tensor) -> bool:
        """Whether the mean KL over ranks, which stop together, passes the target."""
        target, ranks = self.config.target_kl, self.progress.ranks
        if not math.isfinite(target):
            return False
        return bool(ranks.total((weight * _kl(ratio, log_ratio)).sum()) / ranks.world_size > 1.5 * target)

    def _value_error(self, value: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Half the squared error and its derivative; with `value_clip`, the larger of that and of the clipped value's.

        So a value may always return towards the target, and only moves beyond the clip lose their gradient.
        """
        difference, clip = value - batch.return_, self.config.value_clip
        error = 0.5 * difference.square()
        if math.isfinite(clip):
            moved = batch.value + (value - batch.value).clamp(-clip, clip)
            clipped = 0.5 * (moved - batch.return_).square()
            difference = torch.where(clipped > error, 0.0, difference)
            error = torch.max(error, clipped)
        return error, difference

    @torch.no_grad()
    def _means(self, rows: list[Rows]) -> dict[str, Tensor]:
        """The statistics of all minibatches, at once."""
        surrogate, error, entropy, log_ratio, weight, norm = (torch.stack(each) for each in zip(*rows, strict=True))
        ratio, clip = log_ratio.exp(), self.clip(self.progress.scheduled)
        found = {
            "policy_loss": -surrogate,
            "value_loss": error,
            "entropy": entropy,
            "kl": _kl(ratio, log_ratio),
            "clip_fraction": (ratio - 1).abs() > clip,
        }
        return {name: (weight * x).sum() / len(rows) for name, x in found.items()} | {"grad_norm": norm.mean()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.updater.state_dict(),
            "progress": self.progress.state_dict(),
            "generator": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updater.load_state_dict(state["optimizer"])
        self.progress.load_state_dict(state["progress"])
        load_generator(self.rng, state["generator"])


def _kl(ratio: Tensor, log_ratio: Tensor) -> Tensor:
    """Of the new policy from the old, row by row: r - 1 - log r, unbiased and never negative."""
    return ratio - 1 - log_ratio
