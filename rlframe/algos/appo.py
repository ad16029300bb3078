"""APPO, asynchronous PPO: PPO's clipped surrogate on V-trace's targets, for batches of an older policy.

IMPACT: Importance Weighted Asynchronous Architectures with Clipped Target Networks. Luo et al., 2020. arXiv 1912.00167,
with the policy as it was when the batch arrived in the place of the target network; clipping with V-trace under the
name of APPO is from Sample Factory (Petrenko et al., 2020, arXiv 2006.11751). Three policies: μ sampled the batch, π_k
received it, π is being learned. V-trace weighs what μ did by π_k / μ, once; the epochs clip π / π_k. So the first
gradient is IMPALA's, and with batches of the newest policy this is PPO with λ-returns.

A gradient step is read here and in `on_policy`, `agents.base`, `agents.policy`, `models.actor_critic`,
`models.encoders`, `models.network`, `models.heads`, `distributions.categorical`, `ops.policy_gradient`,
`ops.returns`, `updates.optimizer_step`, `optimizers.moments` and `core.types`.
"""

from __future__ import annotations

import chz
import torch
from torch import Tensor

from rlframe.agents import PolicyAgent
from rlframe.algos.defaults import Defaults
from rlframe.algos.on_policy import Batch, OnPolicyConfig, OnPolicyEpochs, check_trace_clips, inputs_of_rows
from rlframe.core.config import count, option
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.struct import Tree
from rlframe.core.types import BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.ops.policy_gradient import (
    clipped_surrogate,
    explained_variance,
    importance_ratio,
    kl_from_ratio,
    masked_mean,
)
from rlframe.ops.returns import v_trace


@chz.chz
class Config(OnPolicyConfig):
    """Defaults are PPO's, with V-trace's for its traces."""

    for_images = Defaults(ModelConfig(activation="relu"), BatchSpec(T=32, B=16))
    for_vectors = Defaults(
        batch=BatchSpec(T=32, B=8), own={"learning_rate": 1e-3, "epochs": 8, "minibatches": 1, "entropy_coef": 0.0}
    )

    learning_rate: Scheduled = scheduled("linear(2.5e-4,0)", "of the optimizer")
    rho_clip: Scheduled = scheduled(
        1.0, "rho-bar: most that an importance ratio weighs a TD error", above=True, infinite=True
    )
    c_clip: Scheduled = scheduled(1.0, "c-bar: most of a trace; at most rho_clip", above=True, infinite=True)
    trace_lambda: Scheduled = scheduled(0.95, "lambda: also shortens traces", high=1)
    clip: Scheduled = scheduled(
        0.2, "epsilon: the ratio of learned to receiving policy stays within 1 ± clip", above=True
    )
    epochs: int = count(2, "passes over each batch; each keeps the sampler's parameters waiting", high=10_000)
    minibatches: int = count(2, "gradient steps an epoch; of rows, or of whole sequences with memory")
    entropy_coef: Scheduled = scheduled(0.01, "weight of the entropy bonus")
    normalize_advantage: bool = option(True, "to mean 0 and variance 1 over the valid rows of each minibatch")

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> APPO:
        return APPO(agent, batch_spec, n_steps, self, seed)


class APPO(OnPolicyEpochs):
    """Epochs of minibatches on the clipped surrogate, the value error and the entropy, towards V-trace's targets."""

    agent: PolicyAgent
    config: Config

    def __init__(
        self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, config: Config | None = None, seed: int = 0
    ) -> None:
        c = config or Config()
        check_trace_clips(c, n_steps)
        super().__init__(agent, batch_spec, n_steps, c, seed)

    @torch.no_grad()
    def rows(self, samples: Samples) -> tuple[Batch, dict[str, Tensor]]:
        """Targets and advantages by V-trace, of the policy π_k and the values as they are now."""
        c, valid = self.now, samples.valid
        params, value, _ = self.agent(samples.inputs, samples.state)  # T+1 rows, for the bootstrap
        log_prob = self.agent.distribution.log_prob(params[:-1], samples.action)
        log_rho = log_prob - samples.info.log_prob  # type: ignore[attr-defined]  # PolicyInfo
        ends = (samples.terminated, samples.truncated, valid)
        vs, advantage = v_trace(log_rho, samples.reward, value, *ends, c.discount, c.rho_clip, c.c_clip, c.trace_lambda)
        log_rho = log_rho.masked_fill(~valid, 0.0)
        kl = masked_mean(kl_from_ratio(log_rho), valid)  # of μ from π_k, as both acted on the batch
        inputs = inputs_of_rows(samples, self.agent.uses_previous)
        batch = Batch(inputs, samples.action, log_prob, value[:-1], advantage, vs, valid)
        return self.ready(batch), {"kl": kl, "explained_variance": explained_variance(value[:-1], vs, valid)}

    def _learn(self, inputs: tuple[Batch, Tree]) -> dict[str, Tensor]:
        """One gradient step on a minibatch."""
        batch, state = inputs
        loss, parts = self.loss(*self.outputs(batch, state), batch)
        norm = self.optimizer.minimize(loss, batch, batch.valid)
        return {**parts, "grad_norm": norm}

    def outputs(self, batch: Batch, state: Tree) -> tuple[Tensor, Tensor]:
        """The policy's parameters and the value of a minibatch: the arguments of `loss` before the batch."""
        params, value, _ = self.agent(batch.inputs, state)
        return params, value

    def loss(self, params: Tensor, value: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """-min(r A, clip(r) A) with r = π / π_k, and A = ρ (r + γ vs' - V)   (eq. 4 of IMPACT); and its parts."""
        c, weight = self.now, batch.weight
        log_prob, entropy = self.agent.distribution.log_prob_entropy(params, batch.action)
        ratio = importance_ratio(torch.where(batch.valid, log_prob - batch.log_prob, 0.0))
        parts = {
            "policy_loss": -(weight * clipped_surrogate(ratio, batch.advantage, c.clip)).sum(),
            "value_loss": 0.5 * (weight * (value - batch.return_).square()).sum(),
            "entropy": (weight * entropy).sum(),
            "clip_fraction": (weight * ((ratio - 1).abs() > c.clip)).sum(),
        }
        loss = parts["policy_loss"] + c.value_coef * parts["value_loss"] - c.entropy_coef * parts["entropy"]
        return loss, parts
