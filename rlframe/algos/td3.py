"""Addressing Function Approximation Error in Actor-Critic Methods (TD3). Fujimoto, van Hoof, Meger, 2018.

https://arxiv.org/abs/1802.09477
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
from rlframe.algos.replay_ratio import UpdateDebt
from rlframe.algos.targets import load_torch_generator, soft_update
from rlframe.core.config import choice, count, fraction, option
from rlframe.core.schedule import Linear, annealed
from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import Tree
from rlframe.core.types import BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.models.critics import CriticPasses, make_critics
from rlframe.replay import NStep, ReplayConfig, Transitions, make_replay


@chz.chz
class Config:
    """Defaults are those of the paper (sections 5.2 and 6.1, and its code)."""

    replay: ReplayConfig
    learning_rate: float = option(3e-4, "Adam, of the actor; the paper's first version used 1e-3")
    critic_learning_rate: float = option(3e-4, "Adam, of the critics")
    learning_rate_schedule: str = choice("constant", ("linear", "constant"), "of both, over runner.n_steps")
    max_grad_norm: float = option(math.inf, "norm at which the gradient of either loss is clipped; inf: never")
    discount: float = fraction(0.99, "gamma, per env step")
    n_step: int = count(1, "rewards of a return before the critics take over")
    tau: float = fraction(0.005, "how far targets move to the online networks at each of the actor's updates")
    batch_size: int = count(256, "rows of an update")
    replay_ratio: float = option(256.0, "rows learned from for each env_step: batch_size times the updates a step")
    learn_from: int = count(25_000, "env_steps, over all environments, of random actions before the first update")
    exploration: float = option(0.1, "standard deviation of the noise on actions in [-1, 1]")
    exploration_final: float = option(0.1, "the same at the end of runner.n_steps, reached linearly")
    target_noise: float = option(0.2, "standard deviation of the noise that smooths the target policy")
    target_noise_clip: float = option(0.5, "its largest magnitude")
    policy_delay: int = count(2, "updates of the critics for each of the actor and the targets")

    def make_agent(self, observation_space: Space, action_space: Space, model: ModelConfig, seed: int) -> ActorAgent:
        return make_actor_agent(observation_space, action_space, Deterministic(action_space), model, seed)

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int) -> TD3:
        return TD3(agent, batch_spec, n_steps, self, seed)


class TD3(Algorithm):
    """Clipped double Q-learning, target policy smoothing, and an actor that is updated less often."""

    def __init__(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, config: Config, seed: int = 0) -> None:
        self.agent, self.config = agent, config
        space = agent.observation_space
        if not isinstance(agent.policy, Deterministic):
            raise TypeError(f"TD3 needs an agent with a deterministic policy, got {type(agent.policy).__name__}")
        self.policy = agent.policy
        if config.policy_delay < 1:
            raise ValueError(f"algo.policy_delay={config.policy_delay} must be at least 1")
        self.device = agent.random.device
        self.progress = Progress()
        self.debt = UpdateDebt(config.replay_ratio, config.batch_size, config.learn_from)
        self.replay = make_replay(
            config.replay,
            space,
            agent.action_space,
            batch_spec,
            NStep(config.discount, config.n_step),
            device=self.device,
            seed=seed,
        )
        self.critics = make_critics(space, agent.action_space, agent.network, 2, seed).to(self.device)
        self.target_critics = self.critics.make_target()
        self.target_actor = copy.deepcopy(agent.model).requires_grad_(False)
        rates = [
            annealed(config.learning_rate_schedule, rate, n_steps)
            for rate in (config.learning_rate, config.critic_learning_rate)
        ]
        self.actor_updater = Updater(agent.parameters(), "adam", rates[0], config.max_grad_norm, self.progress, 1e-8)
        self.critic_updater = Updater(
            self.critics.parameters(), "adam", rates[1], config.max_grad_norm, self.progress, 1e-8
        )
        self.online = [*agent.model.parameters(), *self.critics.parameters()]
        self.targets = [*self.target_actor.parameters(), *self.target_critics.parameters()]
        self.exploration = Linear(config.exploration, config.exploration_final, n_steps)
        self.generator = torch.Generator(self.device).manual_seed(seed_int(seed, Role.ALGO))
        of_critics, of_all = [self.critic_updater], [self.critic_updater, self.actor_updater]
        self.learn_critics = graphed(self._learn_critics, self.device, of_critics, [self.generator])
        self.learn_all = graphed(self._learn_all, self.device, of_all, [self.generator])
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
        batch = self.replay.sample(self.config.batch_size)
        delayed = (self.progress.updates + 1) % self.config.policy_delay != 0
        metrics = self.learn_critics(batch) if delayed else self.learn_all(batch)
        self.progress.updates += 1
        self.debt.pay()
        return {**metrics, "learning_rate": self.actor_updater.rate}

    @torch.no_grad()
    def _learn_critics(self, batch: Transitions) -> dict[str, Tensor]:
        """One step of the critics; the policy and the targets wait."""
        return self._update_critics(batch, self.agent.model.normalized(batch.inputs.observation))

    @torch.no_grad()
    def _learn_all(self, batch: Transitions) -> dict[str, Tensor]:
        """One step of the critics, then one of the policy, and the targets after them."""
        observation = self.agent.model.normalized(batch.inputs.observation)
        metrics = self._update_critics(batch, observation) | self._update_actor(observation)
        soft_update(self.targets, self.online, self.config.tau)
        return metrics

    def _evaluate(self, batch: Transitions, observation: Tree) -> tuple[CriticPasses, Tensor]:
        """Q_i(s, a), and y = r + γ min_i Q'_i(s', a~) [n]."""
        next_observation = self.agent.model.normalized(batch.next_inputs.observation)
        next_action = self._smoothed(self.policy.action(self.target_actor.params(next_observation)))
        critics, next_q = self.critics.run_beside(
            self.target_critics, observation, batch.action, next_observation, next_action
        )
        return critics, batch.return_ + batch.bootstrap * next_q.amin(0)

    def _update_critics(self, batch: Transitions, observation: Tree) -> dict[str, Tensor]:
        """Descend Σ_i mean (Q_i(s, a) - y)²: its gradient in Q_i is 2 (Q_i - y) / n."""
        critics, target_q = self._evaluate(batch, observation)
        q = critics.q  # [2, n]
        error = q - target_q
        critics.to_parameters(error * (2 / len(target_q)))
        loss = error.square().mean() * 2
        self.critic_updater.follow(loss, batch)
        return {"loss": loss, "q": q.mean()}

    def _smoothed(self, action: Tensor) -> Tensor:
        """a~ = clip(π'(s') + clip(ε, -c, c), -1, 1),  ε ~ N(0, σ)   (algorithm 1); in place."""
        noise = torch.empty_like(action).normal_(0.0, self.config.target_noise, generator=self.generator)
        noise.clamp_(-self.config.target_noise_clip, self.config.target_noise_clip)
        return action.add_(noise).clamp_(-1, 1)

    def _update_actor(self, observation: Tree) -> dict[str, Tensor]:
        """Ascend mean Q_1(s, π(s)): the deterministic policy gradient, mean ∇_a Q_1(s, a) ∇π(s)."""
        actor = self.agent.model.run(observation)
        action = self.policy.action(actor.output)
        critic = self.critics.first(observation, action)
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
            "critics": self.critics.state_dict(),
            "target_critics": self.target_critics.state_dict(),
            "target_actor": self.target_actor.state_dict(),
            "actor_updater": self.actor_updater.state_dict(),
            "critic_updater": self.critic_updater.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.progress.load_state_dict(state["progress"])
        self.debt.load_state_dict(state["debt"])
        self.replay.load_state_dict(state["replay"])
        self.critics.load_state_dict(state["critics"])
        self.target_critics.load_state_dict(state["target_critics"])
        self.target_actor.load_state_dict(state["target_actor"])
        self.actor_updater.load_state_dict(state["actor_updater"])
        self.critic_updater.load_state_dict(self.critics.moments(state["critic_updater"]))
        load_torch_generator(self.generator, state["generator"])
