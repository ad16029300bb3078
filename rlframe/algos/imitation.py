"""Shared by the algorithms that learn a policy by the actions in replay: BC, MARWIL and IQL."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import chz
from gymnasium import Space
from torch import Tensor

from rlframe.agents import PolicyAgent, make_policy_agent
from rlframe.algos.base import UpdateMetrics
from rlframe.algos.defaults import default_model
from rlframe.algos.off_policy import FromReplay, FromReplayConfig
from rlframe.core.config import count
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.exploration import POLICY_KINDS, ExploreConfig, explore
from rlframe.models import ModelConfig
from rlframe.replay import Replay
from rlframe.updates.compiled import looks_of, updates_of
from rlframe.updates.optimizer_step import make_optimizer_step


@chz.chz
class ImitationConfig(FromReplayConfig):
    """The keys that BC, MARWIL and IQL share. Network, batch size and learning rate are those of IQL and TD3+BC."""

    learning_rate: Scheduled = scheduled(3e-4, "of the policy, and of the state's value if there is one")
    learning_starts: int = count(0, "env_steps before the first update", low=0)
    explore: ExploreConfig | str = explore("stochastic", POLICY_KINDS)

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> PolicyAgent:
        model = model or default_model(self, observation_space, action_space)
        return make_policy_agent(observation_space, action_space, model, seed, self.explore)


class Imitation(FromReplay):
    """Base class of those that make one gradient step an update, on the agent's policy and value."""

    saved = (*FromReplay.saved, "optimizer")
    agent: PolicyAgent

    def __init__(self, agent: PolicyAgent, replay: Replay[Any], n_steps: int, config: Any) -> None:
        """`n_steps`: env_steps of the run, over which schedules go."""
        super().__init__(agent, replay, n_steps, config)
        self.optimizer = make_optimizer_step(agent.parameters(), self.schedules)
        self.learn = updates_of(self._learn, self.schedules, [self.optimizer], looks_of(agent.model))

    def update(self) -> UpdateMetrics:
        metrics = self.learn(self.replay.sample(self.config.batch_size))
        self.progress.updates += 1
        return {**metrics, "learning_rate": self.optimizer.rate}

    def _learn(self, batch: Any) -> dict[str, Tensor]:
        """One gradient step; see Compiled."""
        loss, metrics = self.loss(*self.outputs(batch), batch)
        norm = self.optimizer.minimize(loss, batch, batch.valid if self.agent.recurrent else None)
        return {**metrics, "grad_norm": norm}

    def outputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The policy's parameters and the value of a batch: the arguments of `loss` before the batch."""
        params, value, _ = self.agent(batch.inputs, ())
        return params, value

    @abstractmethod
    def loss(self, params: Tensor, value: Tensor, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [] and metrics."""
