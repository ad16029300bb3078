"""Continuous control with deep reinforcement learning (DDPG). Lillicrap, Hunt, Pritzel, Heess et al., 2016.

https://arxiv.org/abs/1509.02971

With two options of Ape-X DPG (Horgan et al. 2018, arXiv 1803.00933): n_step and prioritized.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import chz
import torch
from gymnasium import Space
from torch import Tensor

from rlframe.agents import ActorAgent, Deterministic, make_actor_agent
from rlframe.algos.base import Algorithm, Progress, UpdateMetrics
from rlframe.algos.cuda_graph import graphed
from rlframe.algos.optimizer_step import Updater
from rlframe.algos.replay_ratio import UpdateDebt, priorities
from rlframe.algos.targets import soft_update
from rlframe.core.config import choice, count, fraction, option
from rlframe.core.schedule import Linear, annealed
from rlframe.core.struct import Tree
from rlframe.core.types import BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.models.critics import CriticPasses, make_critics
from rlframe.replay import NStep, ReplayConfig, Transitions, make_replay


@chz.chz
class Config:
    """Defaults are those of the paper (section 7), but for its noise, correlated in time, which is uncorrelated here
    (Fujimoto et al. 2018 found no difference), and its weight decay of the critic, which is left out.
    """

    replay: ReplayConfig
    learning_rate: float = option(1e-4, "Adam, of the actor")
    critic_learning_rate: float = option(1e-3, "Adam, of the critic")
    learning_rate_schedule: str = choice("constant", ("linear", "constant"), "of both, over runner.n_steps")
    max_grad_norm: float = option(math.inf, "norm at which the gradient of either loss is clipped; inf: never")
    discount: float = fraction(0.99, "gamma, per env step")
    n_step: int = count(1, "rewards of a return before the critic takes over")
    tau: float = fraction(0.001, "how far targets move to the online networks at each update")
    batch_size: int = count(64, "rows of an update")
    replay_ratio: float = option(64.0, "rows learned from for each env_step: batch_size times the updates a step")
    learn_from: int = count(10_000, "env_steps, over all environments, of random actions before the first update")
    exploration: float = option(0.2, "standard deviation of the noise on actions in [-1, 1]")
    exploration_final: float = option(0.2, "the same at the end of runner.n_steps, reached linearly")
    prioritized: bool = option(False, "replay chooses by the critic's TD error")
    alpha: float = fraction(0.6, "exponent of the priorities")
    beta: float = fraction(0.4, "exponent of the importance weights")

    def make_agent(self, observation_space: Space, action_space: Space, model: ModelConfig, seed: int) -> ActorAgent:
        return make_actor_agent(observation_space, action_space, Deterministic(action_space), model, seed)

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int) -> DDPG:
        return DDPG(agent, batch_spec, n_steps, self, seed)


class DDPG(Algorithm):
    """Q-learning with the actor's action for the best one, and the actor following the gradient of Q."""

    def __init__(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, config: Config, seed: int = 0) -> None:
        self.agent, self.config = agent, config
        space = agent.observation_space
        if not isinstance(agent.policy, Deterministic):
            raise TypeError(f"DDPG needs an agent with a deterministic policy, got {type(agent.policy).__name__}")
        self.policy = agent.policy
        self.device = agent.random.device
        self.progress = Progress()
        self.debt = UpdateDebt(config.replay_ratio, config.batch_size, config.learn_from)
        self.replay = make_replay(
            config.replay,
            space,
            agent.action_space,
            batch_spec,
            NStep(config.discount, config.n_step),
            alpha=config.alpha if config.prioritized else 0.0,
            device=self.device,
            seed=seed,
        )
        self.critic = make_critics(space, agent.action_space, agent.network, 1, seed).to(self.device)
        self.target_critic = self.critic.make_target()
        self.target_actor = copy.deepcopy(agent.model).requires_grad_(False)
        rates = [
            annealed(config.learning_rate_schedule, rate, n_steps)
            for rate in (config.learning_rate, config.critic_learning_rate)
        ]
        self.actor_updater = Updater(agent.parameters(), "adam", rates[0], config.max_grad_norm, self.progress, 1e-8)
        self.critic_updater = Updater(
            self.critic.parameters(), "adam", rates[1], config.max_grad_norm, self.progress, 1e-8
        )
        self.online = [*agent.model.parameters(), *self.critic.parameters()]
        self.targets = [*self.target_actor.parameters(), *self.target_critic.parameters()]
        self.exploration = Linear(config.exploration, config.exploration_final, n_steps)
        self.learn = graphed(self._learn, self.device, [self.critic_updater, self.actor_updater])
        self._explore()

    def _explore(self) -> None:
        warm_up = self.progress.env_steps < self.config.learn_from
        self.agent.set_levels(float(warm_up), self.exploration(self.progress.env_steps))

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)
        self.replay.append(samples)
        self.agent.observe(samples.observation)
        self.debt.receive(self.progress.scheduled, self.progress.env_steps)
        self._explore()

    def updates_due(self) -> int:
        return self.debt.due(self.replay.n_choices)

    def update(self) -> UpdateMetrics:
        batch = self.replay.sample(self.config.batch_size, self.config.beta if self.config.prioritized else 0.0)
        metrics, error = self.learn(batch)
        self.progress.updates += 1
        if self.config.prioritized:
            self.replay.update_priorities(batch.index, priorities(error.abs()))
        self.debt.pay()
        return {**metrics, "learning_rate": self.actor_updater.rate}

    @torch.no_grad()
    def _learn(self, batch: Transitions) -> tuple[dict[str, Tensor], Tensor]:
        """One step each of critic and actor, and of their targets after them; also returns the errors Q - y [n]."""
        observation = self.agent.model.normalized(batch.inputs.observation)
        metrics, error = self._update_critic(batch, observation)
        metrics |= self._update_actor(observation)
        soft_update(self.targets, self.online, self.config.tau)
        return metrics, error

    def _evaluate(self, batch: Transitions, observation: Tree) -> tuple[CriticPasses, Tensor]:
        """Q(s, a), and y = r + γ Q'(s', μ'(s')) [n]   (algorithm 1)."""
        next_observation = self.agent.model.normalized(batch.next_inputs.observation)
        next_action = self.policy.action(self.target_actor.params(next_observation))
        critic, next_q = self.critic.run_beside(
            self.target_critic, observation, batch.action, next_observation, next_action
        )
        return critic, batch.return_ + batch.bootstrap * next_q[0]

    def _update_critic(self, batch: Transitions, observation: Tree) -> tuple[dict[str, Tensor], Tensor]:
        """Descend mean w (Q(s, a) - y)²: its gradient in Q is 2 w (Q - y) / n. Without priorities, w is 1.

        Also returns Q - y [n].
        """
        critic, target_q = self._evaluate(batch, observation)
        q = critic.q  # [1, n]
        error = q - target_q
        critic.to_parameters(error * (batch.weight * (2 / len(target_q))))
        loss = error.square().mean()
        self.critic_updater.follow(loss, batch)
        return {"loss": loss, "q": q.mean()}, error[0]

    def _update_actor(self, observation: Tree) -> dict[str, Tensor]:
        """Ascend mean Q(s, μ(s)): the deterministic policy gradient, mean ∇_a Q(s, a) ∇μ(s)   (eq. 6)."""
        actor = self.agent.model.run(observation)
        action = self.policy.action(actor.output)
        critic = self.critic.first(observation, action)
        of_action = critic.to_action(torch.full_like(critic.q, -1 / len(critic.q)))
        actor.to_parameters(self.policy.gradient(action, of_action))
        loss = -critic.q.mean()
        self.actor_updater.follow(loss, observation)
        return {"policy_loss": loss}

    def facts(self) -> dict[str, str]:
        return {"replay": self.replay.size}

    def counters(self) -> dict[str, float]:
        return {
            **self.debt.counters(self.progress),
            "replay/rows": self.replay.n_rows,
            "algo/exploration": float(self.agent.exploration),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "progress": self.progress.state_dict(),
            "debt": self.debt.state_dict(),
            "replay": self.replay.state_dict(),
            "critic": self.critic.state_dict(),
            "target_critic": self.target_critic.state_dict(),
            "target_actor": self.target_actor.state_dict(),
            "actor_updater": self.actor_updater.state_dict(),
            "critic_updater": self.critic_updater.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.progress.load_state_dict(state["progress"])
        self.debt.load_state_dict(state["debt"])
        self.replay.load_state_dict(state["replay"])
        self.critic.load_state_dict(state["critic"])
        self.target_critic.load_state_dict(state["target_critic"])
        self.target_actor.load_state_dict(state["target_actor"])
        self.actor_updater.load_state_dict(state["actor_updater"])
        self.critic_updater.load_state_dict(self.critic.moments(state["critic_updater"]))
