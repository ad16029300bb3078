"""A framework for behavioural cloning (BC). Bain & Sammut, 1995. Machine Intelligence 15, 103-129.

The policy learns to do what the data do, as first in ALVINN (Pomerleau 1988, NeurIPS 1). With memory it learns from
sequences.

A gradient step is read here and in `imitation`, `off_policy`, `agents.policy`, `models.actor_critic`,
`models.encoders`, `models.network`, `models.heads`, `distributions.categorical`, `ops.policy_gradient`,
`updates.optimizer_step`, `optimizers.moments`, `replay.buffer`, `replay.storage`, `replay.n_step`,
`replay.sequences`, `replay.select` and `core.types`.
"""

from __future__ import annotations

from typing import Any

import chz
import torch
from torch import Tensor

from rlframe.agents import PolicyAgent
from rlframe.algos.checks import check_norms
from rlframe.algos.imitation import Imitation, ImitationConfig
from rlframe.algos.off_policy import replay_of
from rlframe.core.config import choice, count
from rlframe.core.errors import ConfigError
from rlframe.core.types import BatchSpec
from rlframe.distributions.gaussian import flat
from rlframe.ops.policy_gradient import masked_mean
from rlframe.replay import FixedSequence, NStep, Replay, Sequences, Transitions


@chz.chz
class Config(ImitationConfig):
    """Defaults are those of TD3+BC's authors for their BC (see ImitationConfig)."""

    imitates = True  # so that a run without data is told

    loss: str = choice(
        "log_prob", ("log_prob", "mse"), "of the data's actions: -log pi, or the policy's mode's squared error (Box)"
    )
    learn_T: int = count(20, "rows of a sequence, with model.memory; an update learns from batch_size of them")

    def make_replay(self, agent: PolicyAgent, batch_spec: BatchSpec, seed: int = 0) -> Replay[Any]:
        if agent.recurrent:
            state = agent.initial_state(range(batch_spec.B))
            return replay_of(self, agent, batch_spec, seed, FixedSequence(self.learn_T), state=state, sampled=True)
        return replay_of(self, agent, batch_spec, seed, NStep(0.0), sampled=True)

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> BC:
        return BC(agent, self.make_replay(agent, batch_spec, seed), n_steps, self)


class BC(Imitation):
    """θ <- θ + α E[∇ log π(a|s)] over the data's (s, a); or π's mode descends the squared error to a."""

    without_loss = ("model.critic",)

    def __init__(
        self,
        agent: PolicyAgent,
        replay: Replay[Transitions] | Replay[Sequences],
        n_steps: int,
        config: Config | None = None,
    ) -> None:
        """`replay`: of sequences if the agent has memory.

        Raises:
            ConfigError: loss=mse, and the policy is not one Gaussian.
        """
        if agent.recurrent:
            check_norms(agent)
        super().__init__(agent, replay, n_steps, c := config or Config())
        if c.loss == "mse" and not agent.distribution.has_log_std:
            raise ConfigError(
                f"algo.loss=mse is for a Box with model.distribution=gaussian or squashed_gaussian, and this policy is "
                f"a {type(agent.distribution).__name__}; use loss=log_prob"
            )

    def rows_of_update(self) -> int:
        return int(self.config.batch_size * (self.config.learn_T if self.agent.recurrent else 1))

    def outputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Those of Sequences with memory, else of Transitions."""
        if not self.agent.recurrent:
            return super().outputs(batch)
        params, value, _ = self.agent(batch.inputs[:-1], self.agent.parts_of(batch.state).memory)
        return params, value

    def loss(self, params: Tensor, value: Tensor, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean of `row_loss` over valid rows."""
        rows = self.row_loss(params, batch.action)
        loss = masked_mean(rows, batch.valid) if self.agent.recurrent else rows.mean()
        return loss, {"policy_loss": loss.detach()}

    def row_loss(self, params: Tensor, action: Any) -> Tensor:
        """-log π(a|s) [...], or Σ (mode - a)² over the numbers of an action."""
        distribution = self.agent.distribution
        if self.config.loss == "log_prob":
            return -distribution.log_prob(params, action)
        mode = distribution.sample(params, torch.zeros((), device=params.device))
        shape = self.agent.action_space.shape or ()
        return (flat(mode, shape) - flat(action, shape)).square().sum(-1)
