"""Proximal Policy Optimization Algorithms. Schulman, Wolski, Dhariwal, Radford, Klimov, 2017. arXiv 1707.06347.

A gradient step is read here and in `on_policy`, `agents.base`, `agents.policy`, `models.actor_critic`,
`models.encoders`, `models.network`, `models.heads`, `distributions.categorical`, `ops.policy_gradient`,
`ops.returns`, `updates.optimizer_step`, `optimizers.moments` and `core.types`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import chz
import torch
from torch import Tensor

from rlframe.agents import PolicyAgent
from rlframe.algos.defaults import Defaults
from rlframe.algos.on_policy import Batch, OnPolicyConfig, OnPolicyEpochs, make_batch, values
from rlframe.core.config import count, option
from rlframe.core.field_effects import idle_while
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.struct import Tree
from rlframe.core.types import BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.ops.policy_gradient import (
    clipped_surrogate,
    clipped_value_error,
    explained_variance,
    importance_ratio,
    kl_from_ratio,
)
from rlframe.ops.returns import generalized_advantage


class RowTerms(NamedTuple):  # of a minibatch, for statistics: constants
    surrogate: Tensor
    error: Tensor
    entropy: Tensor
    log_ratio: Tensor
    weight: Tensor


@chz.chz
class Config(OnPolicyConfig):
    """Defaults for images are those of the authors' code for Atari, OpenAI's baselines.

    The paper's table 5 has three epochs, a value loss of four times this weight and a clip that goes to 0.
    """

    IDLE = idle_while("kl_coef_target", kl_coef=0)
    for_vectors = Defaults(
        batch=BatchSpec(T=128, B=16),
        own={"learning_rate": 5e-4, "clip": 0.2, "epochs": 10, "minibatches": 16, "entropy_coef": 0.0},
    )
    for_continuous = replace(for_vectors, model=ModelConfig(normalize_observation=True), normalize_reward=True)

    learning_rate: Scheduled = scheduled("linear(2.5e-4,0)", "of the optimizer")
    gae_lambda: Scheduled = scheduled(0.95, "lambda of GAE", high=1)
    clip: Scheduled = scheduled(
        0.1, "epsilon: the ratio stays within 1 ± clip; inf: anywhere", above=True, infinite=True, ends_at_low=True
    )
    kl_coef: Scheduled = scheduled(0.0, "beta, at first: weight of a penalty on the KL from the policy that acted")
    kl_coef_target: Scheduled = scheduled(
        0.01,
        "nats: beta doubles after a KL above 1.5 times this, and halves below 1/1.5; inf: it stays",
        above=True,
        infinite=True,
    )
    value_clip: Scheduled = scheduled(
        math.inf, "largest move of the value from that when acting, in units of return; inf: none", above=True
    )
    epochs: int = count(4, "passes over each batch", high=10_000)
    minibatches: int = count(4, "gradient steps an epoch; of rows, or of whole sequences with memory")
    entropy_coef: Scheduled = scheduled(0.01, "weight of the entropy bonus")
    target_kl: Scheduled = scheduled(
        math.inf, "end the epochs once the mean KL passes 1.5 times this; inf: never", above=True
    )
    normalize_advantage: bool = option(True, "to mean 0 and variance 1 over the valid rows of all ranks' minibatches")
    recompute_advantage: bool = option(False, "once an epoch, with the newest values")

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> PPO:
        return PPO(agent, batch_spec, n_steps, self, seed)


class KlPenalty:
    """β KL[π_old, π], whose β follows the KL that the updates of a batch come to (section 4).

    β is `kl_coef` times a power of two, which is the state, equal on all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.ones((), device=device)  # in place: CUDA graphs read it

    def adapt(self, kl: Tensor, target: Any) -> None:
        """β <- 2 β if kl > 1.5 target, β / 2 if kl < target / 1.5, within 2^±30 of the first."""
        change = torch.where(kl > 1.5 * target, 2.0, torch.where(kl < target / 1.5, 0.5, 1.0))
        self.factor.mul_(change).clamp_(2.0**-30, 2.0**30)

    def state_dict(self) -> dict[str, Tensor]:
        """The factor of β."""
        return {"factor": self.factor.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state."""
        self.factor.copy_(state["factor"])


class PPO(OnPolicyEpochs):
    """Clipped surrogate objective, value loss and entropy bonus, in epochs of minibatches over each batch."""

    saved = (*OnPolicyEpochs.saved, "penalty")
    agent: PolicyAgent
    config: Config

    def __init__(
        self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, config: Config | None = None, seed: int = 0
    ) -> None:
        """`n_steps`: env_steps of the run, over which schedules go."""
        super().__init__(agent, batch_spec, n_steps, config or Config(), seed)
        self.penalty = KlPenalty(self.optimizer.device)

    def rows(self, samples: Samples) -> tuple[Batch, dict[str, Tensor]]:
        batch = self.batch_of(samples, values(self.agent, samples))
        return batch, {"explained_variance": explained_variance(batch.value, batch.return_, batch.valid)}

    def batch_of(self, samples: Samples, value: Tensor) -> Batch:
        """The rows to learn from, with advantages and returns by the values [T+1, B] of all observations."""
        return self.ready(make_batch(samples, *self.targets(samples, value), self.agent.uses_previous))

    def targets(self, samples: Samples, value: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns [T, B] of a batch, by the values [T+1, B]; advantages are normalised later."""
        c, ends = self.now, (samples.terminated, samples.truncated, samples.valid)
        return generalized_advantage(samples.reward, value, *ends, c.discount, c.gae_lambda)

    def learn_epochs(self, batch: Batch, samples: Samples) -> dict[str, Tensor]:
        """All epochs over the rows of a batch; returns metrics."""
        steps: list[tuple[RowTerms, Tensor]] = []
        before = self.progress.updates
        for epoch in range(self.config.epochs):
            if epoch and self.config.recompute_advantage:
                with torch.no_grad():
                    batch = self.batch_of(samples, self.agent(samples.inputs, samples.state)[1])
            if not self._epoch(batch, samples, steps):
                break
        penalty = self._adapt_penalty(samples) if self.config.kl_coef != 0 else {}
        return {**self._means(steps, self.progress.updates - before), **penalty}

    def _epoch(self, batch: Batch, samples: Samples, steps: list[tuple[RowTerms, Tensor]]) -> bool:
        """One pass over the batch; False if the KL says stop."""
        for inputs in self.minibatches(batch, samples):
            rows, norm, ends = self.learn(inputs)
            steps.append((rows, norm))
            if self.config.target_kl != math.inf and bool(ends):
                return False
            self.progress.updates += 1
        return True

    def _learn(self, inputs: tuple[Batch, Tree]) -> tuple[RowTerms, Tensor, Tensor | None]:
        """One gradient step on a minibatch, unless the KL passes its target, which is the last result."""
        batch, state = inputs
        loss, rows = self.loss(*self.outputs(batch, state), batch)
        ends = None
        if self.config.target_kl != math.inf:  # of all ranks, which stop together
            ends = self._mean_kl(rows.log_ratio, batch.valid) > 1.5 * self.now.target_kl
        return rows, self.optimizer.minimize(loss, batch, batch.valid, unless=ends), ends

    def outputs(self, batch: Batch, state: Tree) -> tuple[Tensor, Tensor]:
        """What the network gives for a minibatch and the memory before it: the arguments of `loss` before the batch."""
        params, value, _ = self.agent(batch.inputs, state)
        return params, value

    def loss(self, params: Tensor, value: Tensor, batch: Batch) -> tuple[Tensor, RowTerms]:
        """Eq. 9, to be descended: -E[L^CLIP] + c_1 E[L^VF] - c_2 E[S]; and the statistics of its rows."""
        c, weight = self.now, batch.weight
        log_prob, entropy = self.agent.distribution.log_prob_entropy(params, batch.action)
        log_ratio = torch.where(batch.valid, log_prob - batch.log_prob, 0.0)  # so that no other row's exp overflows
        surrogate = clipped_surrogate(importance_ratio(log_ratio), batch.advantage, c.clip)  # eq. 7
        error = clipped_value_error(value, batch.value, batch.return_, c.value_clip)
        loss = (weight * (c.value_coef * error - surrogate - c.entropy_coef * entropy)).sum()
        if self.config.kl_coef != 0:  # eq. 8, with the KL by samples
            loss = loss + c.kl_coef * self.penalty.factor * (weight * kl_from_ratio(log_ratio)).sum()
        return loss, RowTerms(surrogate.detach(), error.detach(), entropy.detach(), log_ratio.detach(), weight)

    @torch.no_grad()
    def _adapt_penalty(self, samples: Samples) -> dict[str, Tensor]:
        """The β of this batch; then that of the next, by the mean KL that the updates came to, over ranks."""
        coef = self.now.kl_coef * self.penalty.factor
        if self.config.kl_coef_target != math.inf:
            log_prob, _, _ = self.agent.evaluate(samples.inputs[:-1], samples.state, samples.action)
            log_ratio = torch.where(samples.valid, log_prob - samples.info.log_prob, 0.0)  # type: ignore[attr-defined]
            self.penalty.adapt(self._mean_kl(log_ratio, samples.valid), self.now.kl_coef_target)
        return {"kl_coef": coef}

    def _mean_kl(self, log_ratio: Tensor, valid: Tensor) -> Tensor:
        """Over the valid rows of all ranks; log_ratio is 0 on others."""
        sums = torch.stack([kl_from_ratio(log_ratio).sum(), valid.sum()])
        kl, n = self.progress.ranks.sum_tensor(sums).unbind()
        return kl / n.clamp(min=1)

    @torch.no_grad()
    def _means(self, steps: list[tuple[RowTerms, Tensor]], n_made: int) -> dict[str, Tensor]:
        """The statistics of all minibatches, at once; the norm is 0 where the KL forbade a step, so of those made."""
        rows, norms = zip(*steps, strict=True)
        surrogate, error, entropy, log_ratio, weight = map(torch.stack, zip(*rows, strict=True))
        found = {
            "policy_loss": -surrogate,
            "value_loss": error,
            "entropy": entropy,
            "kl": kl_from_ratio(log_ratio),
            "clip_fraction": (log_ratio.exp() - 1).abs() > self.now.clip,
        }
        means = {name: (weight * x).sum() / len(steps) for name, x in found.items()}
        return {**means, "grad_norm": torch.stack(norms).sum() / max(n_made, 1)}
