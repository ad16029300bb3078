"""Continuous control with deep reinforcement learning (DDPG). Lillicrap, Hunt, Pritzel, Heess et al., 2016.

https://arxiv.org/abs/1509.02971

With the options of Ape-X DPG (Horgan et al. 2018, arXiv 1803.00933): n_step, prioritized and initial_priority; and
with those of TD3, each on its own.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import chz
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.agents import ActorAgent, Deterministic, make_actor_agent
from rlframe.algos.base import Progress, UpdateMetrics
from rlframe.algos.cuda_graph import graphed_by_turn
from rlframe.algos.defaults import Defaults, default_model
from rlframe.algos.off_policy import (
    OffPolicy,
    ReplayRatio,
    n_step_replay,
    priorities,
    random_until,
    reading_back,
    smoothed,
    soft_update,
    turns,
)
from rlframe.algos.optimizer_step import make_optimizer_step
from rlframe.algos.schedules import Schedules
from rlframe.core.config import choice, count, count_or_auto, fraction, option, positive
from rlframe.core.errors import ConfigError
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import Tree
from rlframe.core.types import BatchSpec, Samples
from rlframe.exploration import NOISE_KINDS, ExplorationSchedule, ExploreConfig, explore
from rlframe.kernels.mlp import frozen
from rlframe.models import ModelConfig
from rlframe.models.base import averaged, with_modes
from rlframe.models.critics import first, make_critics, with_target
from rlframe.ops.fused import squared_error
from rlframe.ops.q_learning import clip_target
from rlframe.optimizers import OptimizerConfig, optimizer
from rlframe.replay import Replay, ReplayConfig, Transitions, replay


@chz.chz
class Config:
    """Defaults are those of the paper (section 7), but for its noise, correlated in time, which is uncorrelated here
    (Fujimoto et al. 2018 found no difference), and its weight decay of the critic, which is left out.
    """

    learns_from = "replay"
    for_images = Defaults(ModelConfig(hidden=(256, 256), activation="relu"), BatchSpec(T=1, B=1))
    for_vectors = Defaults(  # those of TD3's authors for their DDPG, with an earlier start
        for_images.model,
        for_images.batch,
        {
            "learning_rate": 1e-3,
            "tau": 0.005,
            "batch_size": 256,
            "replay_ratio": 256.0,
            "learning_starts": 1_000,
            "explore.std": 0.1,
        },
    )

    replay: ReplayConfig | str = replay()
    learning_rate: Scheduled = scheduled(1e-4, "of the actor")
    critic_learning_rate: Scheduled = scheduled(1e-3, "of the critic")
    optimizer: OptimizerConfig | str = optimizer("adam", epsilon=1e-8)
    max_grad_norm: Scheduled = scheduled(
        math.inf, "norm at which the gradient of either loss is clipped; inf: never", above=True
    )
    discount: float = fraction(0.99, "gamma, per env step")
    n_step: int = count(1, "rewards of a return before the critic takes over")
    tau: Scheduled = scheduled(0.001, "how far targets move to the online networks at each of their moves", high=1)
    n_critics: int = count(1, "critics; the target takes the least of their values (2 in TD3)", high=10_000)
    policy_interval: int = count(1, "updates of the critic for each of the actor")
    target_interval: int = count(1, "updates of the critic for each move of the targets")
    target_clip: Scheduled = scheduled(math.inf, "largest magnitude of the critic's targets; inf: any", above=True)
    target_noise: Scheduled = scheduled(0.0, "standard deviation of noise on the target's actions (0.2 in TD3)")
    target_noise_clip: Scheduled = scheduled(0.5, "its largest magnitude")
    batch_size: int = count(64, "rows of an update")
    replay_ratio: float = positive(64.0, "rows learned from for each env_step: batch_size times the updates a step")
    learning_starts: int = count(10_000, "env_steps before the first update", low=0)
    random_steps: int = count_or_auto("env_steps of random actions at first; auto: until learning_starts")
    explore: ExploreConfig | str = explore("gaussian", (*NOISE_KINDS, "parameter_noise"), {"std": 0.2})
    prioritized: bool = option(False, "replay chooses by the critic's TD error")
    alpha: float = fraction(0.6, "exponent of the priorities")
    beta: Scheduled = scheduled(0.4, "exponent of the importance weights", high=1)
    initial_priority: str = choice(
        "max", ("max", "td"), "of new rows: the highest so far, or the critic's TD error on receipt"
    )

    @chz.validate
    def _check(self) -> None:
        if self.initial_priority == "td" and not self.prioritized:
            raise ConfigError("algo.initial_priority=td needs algo.prioritized=true; set both, or use max")

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> ActorAgent:
        model, policy = model or default_model(self, observation_space), Deterministic(action_space)
        return make_actor_agent(observation_space, action_space, policy, model, self.explore, seed)

    def make_replay(self, agent: ActorAgent, batch_spec: BatchSpec, seed: int = 0) -> Replay[Transitions]:
        return n_step_replay(self, agent, batch_spec, seed, self.alpha if self.prioritized else 0.0)

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> DDPG:
        return DDPG(*self.parts(agent, batch_spec, n_steps, seed))

    def parts(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int) -> tuple[Any, ...]:
        """The arguments of DDPG."""
        critics = make_critics(agent.observation_space, agent.action_space, agent.network, self.n_critics, seed)
        exploration = ExplorationSchedule(self.explore, n_steps, batch_spec.B)
        return agent, critics, self.make_replay(agent, batch_spec, seed), exploration, n_steps, self, seed


class DDPG(OffPolicy):
    """Q-learning with the actor's action for the best one, and the actor following the gradient of Q."""

    networks = ("critics", "target_critics", "target_actor")
    saved = (*OffPolicy.saved, *networks, "optimizer", "critic_optimizer", "generator")
    agent: ActorAgent

    def __init__(
        self,
        agent: ActorAgent,
        critics: nn.Module,
        replay: Replay[Transitions],
        exploration: ExplorationSchedule,
        n_steps: int,
        config: Config | None = None,
        seed: int = 0,
    ) -> None:
        """Args:
            critics: map (observation [n, *obs], action [n, *act]) to Q_i [critics, n].
            n_steps: env_steps of the run, over which schedules go.
        Raises:
            TypeError: the agent's policy is not deterministic.
            ConfigError: initial_priority=td with a replay of your own.
            ValueError: a number of `config` is out of range.
        """
        self.agent, self.replay, self.exploration, self.config = agent, replay, exploration, config or Config()
        c, self.device = self.config, agent.random.device
        if not isinstance(agent.policy, Deterministic):
            raise TypeError(
                f"{type(self).__name__} needs an agent with a deterministic policy, got {type(agent.policy).__name__}"
            )
        self.new_rows = (  # whose priorities are computed on receipt
            reading_back(replay, "algo.initial_priority=td", "initial_priority=max")
            if c.initial_priority == "td"
            else None
        )
        self.policy = agent.policy
        self.progress = Progress()
        self.ratio = ReplayRatio(c.replay_ratio, c.batch_size, c.learning_starts)
        self.critics = with_modes(critics).to(self.device)
        self.target_critics = copy.deepcopy(critics).requires_grad_(False)
        self.target_actor = copy.deepcopy(agent.model).requires_grad_(False)
        self.online = averaged(agent.model, critics)
        self.targets = averaged(self.target_actor, self.target_critics)
        self.schedules = Schedules(c, n_steps, self.progress, self.device)
        self.now = self.schedules.now
        self.optimizer, self.critic_optimizer = (
            make_optimizer_step(module.parameters(), self.schedules, rate)
            for module, rate in ((agent, "learning_rate"), (critics, "critic_learning_rate"))
        )
        self.beta = self.schedules.of("beta")
        self.generator = torch.Generator(self.device).manual_seed(seed_int(seed, Role.ALGO))
        steps = self.critic_optimizer, [self.optimizer]
        self.learn = graphed_by_turn(self._learn, self.device, *steps, [self.generator] if c.target_noise != 0 else [])
        self.start_exploring()

    def explore(self) -> None:
        super().explore()
        self.agent.set_random(self.progress.env_steps < random_until(self.config))

    def receive(self, samples: Samples) -> None:
        super().receive(samples)
        if self.new_rows and len(index := self.new_rows.newest()):
            self.replay.update_priorities(index, self._priorities(self.new_rows.read(index)))

    @torch.no_grad()
    def _priorities(self, batch: Transitions) -> Tensor:
        """Those that an update would give these rows [n]."""
        q, target_q = self._q_and_target(batch, *self._observations(batch))
        return priorities((q - target_q).abs().mean(0))

    def update(self) -> UpdateMetrics:
        batch = self.replay.sample(
            self.config.batch_size, self.beta(self.progress.scheduled) if self.config.prioritized else 0.0
        )
        metrics, error = self.learn(batch, *turns(self.progress.updates, self.config))
        self.progress.updates += 1
        if self.config.prioritized:
            self.replay.update_priorities(batch.index, priorities(error.abs().mean(0)))
        self.ratio.count_update()
        return {**metrics, "learning_rate": self.optimizer.rate}

    def _learn(self, batch: Transitions, policy: bool = True, targets: bool = True) -> tuple[dict[str, Tensor], Tensor]:
        """One step of the critics, and those that are due of the actor and the targets; also Q_i - y [critics, n]."""
        observation, next_observation = self._observations(batch)
        metrics, error = self._update_critics(batch, observation, next_observation)
        if policy:
            metrics |= self._update_actor(observation)
        if targets:
            soft_update(self.targets, self.online, self.now.tau)
        return metrics, error

    def _observations(self, batch: Transitions) -> tuple[Tree, Tree]:
        """s and s', normalised."""
        normalized = self.agent.model.normalized
        return normalized(batch.inputs.observation), normalized(batch.next_inputs.observation)

    def _q_and_target(self, batch: Transitions, observation: Tree, next_observation: Tree) -> tuple[Tensor, Tensor]:
        """Q_i(s, a) [critics, n] and y = r + γ min_i Q'_i(s', a') [n]."""
        next_action = self._next_action(next_observation)
        q, next_q = with_target(
            self.critics, self.target_critics, observation, batch.action, next_observation, next_action
        )
        return q, clip_target(batch.return_ + batch.bootstrap * next_q.amin(0), self.now.target_clip)

    def _update_critics(
        self, batch: Transitions, observation: Tree, next_observation: Tree
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Descend Σ_i mean w (Q_i(s, a) - y)²,  w from replay   (algorithm 1)."""
        q, target_q = self._q_and_target(batch, observation, next_observation)
        loss = 2 * squared_error(q, target_q, batch.weight)[0]
        self.critic_optimizer.minimize(loss, batch)
        q = q.detach()
        return {"loss": loss.detach(), "q": q.mean()}, q - target_q

    @torch.no_grad()
    def _next_action(self, next_observation: Tree) -> Tensor:
        """a' = μ'(s'); with target noise clip(μ'(s') + clip(ε, -c, c), -1, 1),  ε ~ N(0, σ)."""
        action, c = self.policy.action(self.target_actor.params(next_observation)), self.now
        if self.config.target_noise == 0:
            return action
        return smoothed(action, c.target_noise, c.target_noise_clip, self.generator)

    def _update_actor(self, observation: Tree) -> dict[str, Tensor]:
        """Ascend mean Q_1(s, μ(s)), along mean ∇_a Q_1(s, a) ∇μ(s)   (eq. 6)."""
        action = self.policy.action(self.agent.model.params(observation))
        with frozen(self.critic_optimizer.parameters):
            loss = -first(self.critics, observation, action).mean()
        self.optimizer.minimize(loss, observation)
        return {"policy_loss": loss.detach()}
