"""IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures. Espeholt et al., 2018.

https://arxiv.org/abs/1802.01561. Made for AsyncRl, whose batches come from parameters some updates old; with a runner
that samples and learns in turn, every ratio is 1 and this is A2C with n-step returns.

A gradient step is read here and in `on_policy`, `agents.base`, `agents.policy`, `models.actor_critic`,
`models.encoders`, `models.network`, `models.heads`, `distributions.categorical`, `ops.policy_gradient`,
`ops.returns`, `updates.optimizer_step`, `optimizers.moments` and `core.types`.
"""

from __future__ import annotations

import chz
import torch
from torch import Tensor

from rlframe.agents import PolicyAgent
from rlframe.algos import fields
from rlframe.algos.defaults import Defaults
from rlframe.algos.on_policy import OnPolicy, OnPolicyConfig, check_trace_clips
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.types import BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.ops.policy_gradient import explained_variance, kl_from_ratio, masked_mean
from rlframe.ops.returns import v_trace
from rlframe.optimizers import OptimizerConfig, optimizer


@chz.chz
class Config(OnPolicyConfig):
    """Defaults are the paper's (table D.3), for losses that are means over rows where the paper's are sums."""

    for_images = Defaults(ModelConfig(activation="relu"), BatchSpec(T=20, B=32))
    for_vectors = Defaults(batch=BatchSpec(T=5, B=8), own={"learning_rate": 2e-3, "entropy_coef": 0.0})  # A2C's

    learning_rate: Scheduled = scheduled("linear(6e-4,0)", "of the optimizer; the paper searched 5e-6 to 5e-3")
    # The paper: RMSProp without momentum, and 0.1 under the root, for sums over 640 rows.
    optimizer: OptimizerConfig | str = optimizer("rmsprop", epsilon=5e-4)
    rho_clip: Scheduled = scheduled(
        1.0, "rho-bar: most that a ratio weighs a TD error, or a gradient", above=True, infinite=True
    )
    c_clip: Scheduled = scheduled(1.0, "c-bar: most of a trace; at most rho_clip", above=True, infinite=True)
    trace_lambda: Scheduled = scheduled(1.0, "lambda: also shortens traces (remark 2)", high=1)
    entropy_coef: Scheduled = scheduled(0.01, "weight of the entropy bonus; the paper searched 5e-5 to 1e-2")
    max_grad_norm: Scheduled = fields.grad_norm(0.5, "norm at which gradients are clipped (paper: 40, of sums)")

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> IMPALA:
        return IMPALA(agent, n_steps, self)


class IMPALA(OnPolicy):
    """One gradient step a batch, on V-trace's value targets and policy gradient."""

    agent: PolicyAgent
    config: Config

    def __init__(self, agent: PolicyAgent, n_steps: int, config: Config | None = None) -> None:
        c = config or Config()
        check_trace_clips(c, n_steps)
        super().__init__(agent, n_steps, c)

    def _learn(self, samples: Samples) -> dict[str, Tensor]:
        """One gradient step on the whole batch."""
        loss, metrics = self.loss(*self.outputs(samples), samples)
        return {**metrics, "grad_norm": self.optimizer.minimize(loss, samples, samples.valid)}

    def outputs(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """The policy's parameters and the value [T+1, B]: the arguments of `loss` before the batch."""
        params, value, _ = self.agent(samples.inputs, samples.state)
        return params, value

    def loss(self, params: Tensor, value: Tensor, samples: Samples) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy gradient, baseline and entropy (section 4.2), of the policy and values as they are now."""
        c, valid = self.now, samples.valid
        log_prob, entropy = self.agent.distribution.log_prob_entropy(params[:-1], samples.action)
        log_rho = log_prob.detach() - samples.info.log_prob  # type: ignore[attr-defined]  # PolicyInfo
        ends = (samples.terminated, samples.truncated, valid)
        vs, advantage = v_trace(
            log_rho, samples.reward, value.detach(), *ends, c.discount, c.rho_clip, c.c_clip, c.trace_lambda
        )
        policy_loss = -masked_mean(log_prob * advantage, valid)  # ρ (r + γ vs' - V) ∇log π
        value_loss = masked_mean(0.5 * (vs - value[:-1]).square(), valid)
        entropy = masked_mean(entropy, valid)
        loss = policy_loss + c.value_coef * value_loss - c.entropy_coef * entropy
        with torch.no_grad():
            log_rho = log_rho.masked_fill(~valid, 0.0)
            kl = masked_mean(kl_from_ratio(log_rho), valid)  # of the policy that sampled from the one now
            clip_fraction = masked_mean((log_rho.exp() > c.rho_clip).to(log_rho.dtype), valid)
            fit = explained_variance(value[:-1], vs, valid)
        names = {"policy_loss": policy_loss.detach(), "value_loss": value_loss.detach(), "entropy": entropy.detach()}
        return loss, {**names, "kl": kl, "clip_fraction": clip_fraction, "explained_variance": fit}
