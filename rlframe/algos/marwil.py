"""Exponentially Weighted Imitation Learning for Batched Historical Data (MARWIL). Wang, Xiong, Han et al., 2018.

NeurIPS 31, https://papers.nips.cc/paper/7866. With beta=0 it is behaviour cloning.

A gradient step is read here and in `imitation`, `off_policy`, `agents.policy`, `models.actor_critic`,
`models.encoders`, `models.network`, `models.heads`, `distributions.categorical`, `ops.offline`, `ops.returns`,
`updates.optimizer_step`, `optimizers.moments`, `replay.buffer`, `replay.storage`, `replay.returns_to_go`,
`replay.select` and `core.types`.
"""

from __future__ import annotations

from collections.abc import Mapping

import chz
import torch
from gymnasium import Space
from torch import Tensor

from rlframe.agents import PolicyAgent
from rlframe.algos.defaults import default_model
from rlframe.algos.imitation import Imitation, ImitationConfig
from rlframe.algos.off_policy import check_feedforward, replay_of
from rlframe.core.config import fraction
from rlframe.core.field_effects import idle_while, in_state
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.types import BatchSpec
from rlframe.models import ModelConfig
from rlframe.ops.offline import advantage_weight
from rlframe.replay import Replay, ReturnsToGo, Transitions
from rlframe.updates.progress import Progress


@chz.chz
class Config(ImitationConfig):
    """beta is the paper's; the largest weight, and how c follows, are ours (see AdvantageNorm)."""

    IDLE = idle_while("most_weight", "norm_rate", beta=0)
    IN_STATE = in_state("discount")

    discount: float = fraction(0.99, "gamma, per env step")
    beta: Scheduled = scheduled(1.0, "of the weight exp(beta A / c) of an action; 0: behaviour cloning")
    most_weight: Scheduled = scheduled(100.0, "largest weight of an action; inf: any", above=True, infinite=True)
    norm_rate: float = fraction(
        0.01, "how far c^2, the running mean of A^2, moves to that of an update's rows", above=True
    )
    value_coef: Scheduled = scheduled(1.0, "weight of the value's squared error")

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> PolicyAgent:
        check_feedforward(model := model or default_model(self, observation_space, action_space), "marwil", "bc")
        return super().make_agent(observation_space, action_space, model, seed)

    def make_replay(self, agent: PolicyAgent, batch_spec: BatchSpec, seed: int = 0) -> Replay[Transitions]:
        return replay_of(self, agent, batch_spec, seed, ReturnsToGo(self.discount), sampled=True)

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> MARWIL:
        return MARWIL(agent, self.make_replay(agent, batch_spec, seed), n_steps, self)


class AdvantageNorm:
    """c, the root of a running mean of A² over updates, equal on all ranks: m / w with m <- m + ρ (A² - m) from 0.

    The weight w <- w + ρ (1 - w) from 0 makes c right from the first update on, whatever the scale of rewards; other
    implementations start at 10 and hardly move (ρ = 10^-8). A mean that is not finite moves nothing.
    """

    def __init__(self, rate: float, progress: Progress, device: torch.device) -> None:
        self.rate, self.progress = rate, progress
        self.mean, self.weight = torch.zeros((), device=device), torch.zeros((), device=device)  # changed in place

    def follow(self, advantage: Tensor) -> Tensor:
        """c [] once the advantages [n] of an update are in it."""
        ranks = self.progress.ranks
        square = ranks.sum_tensor(advantage.square().mean()) / ranks.world_size
        rate = self.rate * square.isfinite()
        self.mean.add_(rate * (square.where(square.isfinite(), 0.0) - self.mean))
        self.weight.add_(rate * (1 - self.weight))
        return (self.mean / self.weight).sqrt()

    def state_dict(self) -> dict[str, Tensor]:
        """The running mean and its weight."""
        return {"mean": self.mean.clone(), "weight": self.weight.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state."""
        self.mean.copy_(state["mean"])
        self.weight.copy_(state["weight"])


class MARWIL(Imitation):
    """Imitation of the data's actions with weights that grow with their advantage, and a value by their returns."""

    saved = (*Imitation.saved, "norm")

    def __init__(
        self, agent: PolicyAgent, replay: Replay[Transitions], n_steps: int, config: Config | None = None
    ) -> None:
        """`replay`: whose `return_` are returns to the end of episodes (see ReturnsToGo)."""
        super().__init__(agent, replay, n_steps, c := config or Config())
        self.norm = AdvantageNorm(c.norm_rate, self.progress, self.device)

    def loss(self, params: Tensor, value: Tensor, batch: Transitions) -> tuple[Tensor, dict[str, Tensor]]:
        """-E[exp(β A / c) log π(a|s)] + c_v E[(V(s) - R)²] / 2,  A = R - V(s)   (algorithm 1).

        R is the return to the end of the episode, and γ^k V of the last state where that was truncated.
        """
        c = self.now
        with torch.no_grad():
            return_ = batch.return_ + batch.bootstrap * self.agent(batch.next_inputs, ())[1]
            advantage = return_ - value
            scaled = advantage / self.norm.follow(advantage).clamp(min=1e-8)
        weight = advantage_weight(scaled, c.beta, c.most_weight)
        policy_loss = -(weight * self.agent.distribution.log_prob(params, batch.action)).mean()
        value_loss = 0.5 * (value - return_).square().mean()
        found = {"policy_loss": policy_loss.detach(), "value_loss": value_loss.detach()}
        return policy_loss + c.value_coef * value_loss, {**found, "advantage_weight": weight.mean()}
