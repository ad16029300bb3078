"""Addressing Function Approximation Error in Actor-Critic Methods (TD3). Fujimoto, van Hoof, Meger, 2018.

https://arxiv.org/abs/1802.09477
"""

from __future__ import annotations

import copy
import math

import chz
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.agents import ActorAgent, Deterministic, make_actor_agent
from rlframe.algos.base import Progress, UpdateMetrics
from rlframe.algos.cuda_graph import graphed_by_turn
from rlframe.algos.off_policy import OffPolicy, ReplayRatio, n_step_replay, smoothed, soft_update, turns
from rlframe.algos.optimizer_step import make_step
from rlframe.algos.schedules import Schedules
from rlframe.core.config import count, fraction, positive
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import Tree
from rlframe.core.types import BatchSpec
from rlframe.kernels.mlp import frozen
from rlframe.models import ModelConfig
from rlframe.models.base import averaged, with_modes
from rlframe.models.critics import first, make_critics, with_target
from rlframe.ops.fused import squared_error
from rlframe.ops.q_learning import clip_target
from rlframe.optimizers import OptimizerConfig, optimizer
from rlframe.replay import ReplayConfig, StoredReplay, Transitions
from rlframe.replay.base import Replay


@chz.chz
class Config:
    """Defaults are those of the paper (sections 5.2 and 6.1, and its code)."""

    replay: ReplayConfig = chz.field(default_factory=ReplayConfig, doc="what replay holds, and where")
    learning_rate: Scheduled = scheduled(3e-4, "of the actor; the paper's first version used 1e-3")
    critic_learning_rate: Scheduled = scheduled(3e-4, "of the critics")
    optimizer: OptimizerConfig | str = optimizer("adam", epsilon=1e-8)
    max_grad_norm: Scheduled = scheduled(
        math.inf, "norm at which the gradient of either loss is clipped; inf: never", above=True
    )
    discount: float = fraction(0.99, "gamma, per env step")
    n_step: int = count(1, "rewards of a return before the critics take over")
    tau: Scheduled = scheduled(0.005, "how far targets move to the online networks at each of their moves", high=1)
    n_critics: int = count(2, "critics; targets take the least of their values")
    batch_size: int = count(256, "rows of an update")
    replay_ratio: float = positive(256.0, "rows learned from for each env_step: batch_size times the updates a step")
    learn_from: int = count(25_000, "env_steps of random actions before the first update", low=0)
    exploration: Scheduled = scheduled(0.1, "standard deviation of the noise on actions in [-1, 1]")
    target_noise: Scheduled = scheduled(0.2, "standard deviation of the noise that smooths the target policy")
    target_noise_clip: Scheduled = scheduled(0.5, "its largest magnitude")
    policy_interval: int = count(2, "updates of the critics for each of the actor")
    target_interval: int = count(2, "updates of the critics for each move of the targets")
    target_clip: Scheduled = scheduled(math.inf, "largest magnitude of the critics' targets; inf: any", above=True)

    def make_agent(self, observation_space: Space, action_space: Space, model: ModelConfig, seed: int) -> ActorAgent:
        return make_actor_agent(observation_space, action_space, Deterministic(action_space), model, seed)

    def make_replay(self, agent: ActorAgent, batch_spec: BatchSpec, seed: int = 0) -> StoredReplay[Transitions]:
        return n_step_replay(self, agent, batch_spec, seed)

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> TD3:
        critics = make_critics(agent.observation_space, agent.action_space, agent.network, self.n_critics, seed)
        return TD3(agent, critics, self.make_replay(agent, batch_spec, seed), n_steps, self, seed)


class TD3(OffPolicy):
    """Clipped double Q-learning, target policy smoothing, and an actor that is updated less often."""

    saved = (
        *OffPolicy.saved,
        "critics",
        "target_critics",
        "target_actor",
        "optimizer",
        "critic_optimizer",
        "generator",
    )
    agent: ActorAgent

    def __init__(
        self,
        agent: ActorAgent,
        critics: nn.Module,
        replay: Replay[Transitions],
        n_steps: int,
        config: Config | None = None,
        seed: int = 0,
    ) -> None:
        """Args:
            critics: map (observation [n, *obs], action [n, *act]) to Q_i [critics, n].
            n_steps: env_steps of the run, over which schedules go.
        Raises:
            TypeError: the policy is not deterministic.    ValueError: a number of `config` is out of range.
        """
        self.agent, self.replay, self.config = agent, replay, config or Config()
        c, self.device = self.config, agent.random.device
        if not isinstance(agent.policy, Deterministic):
            raise TypeError(f"TD3 needs an agent with a deterministic policy, got {type(agent.policy).__name__}")
        self.policy = agent.policy
        self.progress = Progress()
        self.ratio = ReplayRatio(c.replay_ratio, c.batch_size, c.learn_from)
        self.critics = with_modes(critics).to(self.device)
        self.target_critics = copy.deepcopy(critics).requires_grad_(False)
        self.target_actor = copy.deepcopy(agent.model).requires_grad_(False)
        self.online = averaged(agent.model, critics)
        self.targets = averaged(self.target_actor, self.target_critics)
        self.schedules = Schedules(c, n_steps, self.progress, self.device)
        self.now = self.schedules.now
        self.optimizer, self.critic_optimizer = (
            make_step(module.parameters(), self.schedules, rate)
            for module, rate in ((agent, "learning_rate"), (critics, "critic_learning_rate"))
        )
        self.exploration = self.schedules.of("exploration")
        self.generator = torch.Generator(self.device).manual_seed(seed_int(seed, Role.ALGO))
        steps = self.critic_optimizer, [self.optimizer]
        self.learn = graphed_by_turn(self._learn, self.device, *steps, [self.generator])
        self.explore()

    def explore(self) -> None:
        warm_up = self.progress.env_steps < self.config.learn_from
        self.agent.set_levels(float(warm_up), self.exploration(self.progress.env_steps))

    def update(self) -> UpdateMetrics:
        batch = self.replay.sample(self.config.batch_size)
        metrics = self.learn(batch, *turns(self.progress.updates, self.config))
        self.progress.updates += 1
        self.ratio.count_update()
        return {**metrics, "learning_rate": self.optimizer.rate}

    def _learn(self, batch: Transitions, policy: bool = True, targets: bool = True) -> dict[str, Tensor]:
        """One step of the critics, then those of the policy and the targets that are due."""
        observation = self.agent.model.normalized(batch.inputs.observation)
        metrics = self._update_critics(batch, observation)
        if policy:
            metrics |= self._update_actor(observation)
        if targets:
            soft_update(self.targets, self.online, self.now.tau)
        return metrics

    def _update_critics(self, batch: Transitions, observation: Tree) -> dict[str, Tensor]:
        """Descend Σ_i mean (Q_i(s, a) - y)²,  y = r + γ min_i Q'_i(s', a~)   (algorithm 1)."""
        next_observation = self.agent.model.normalized(batch.next_inputs.observation)
        q, next_q = with_target(
            self.critics,
            self.target_critics,
            observation,
            batch.action,
            next_observation,
            self._smoothed_action(next_observation),
        )
        target_q = clip_target(batch.return_ + batch.bootstrap * next_q.amin(0), self.now.target_clip)
        loss = 2 * squared_error(q, target_q)[0]
        self.critic_optimizer.minimize(loss, batch)
        return {"loss": loss.detach(), "q": q.detach().mean()}

    @torch.no_grad()
    def _smoothed_action(self, next_observation: Tree) -> Tensor:
        """a~ = clip(π'(s') + clip(ε, -c, c), -1, 1),  ε ~ N(0, σ)   (algorithm 1)."""
        action, c = self.policy.action(self.target_actor.params(next_observation)), self.now
        return smoothed(action, c.target_noise, c.target_noise_clip, self.generator)

    def _update_actor(self, observation: Tree) -> dict[str, Tensor]:
        """Ascend mean Q_1(s, π(s)): the deterministic policy gradient, mean ∇_a Q_1(s, a) ∇π(s)."""
        action = self.policy.action(self.agent.model.params(observation))
        with frozen(self.critic_optimizer.parameters):
            loss = -first(self.critics, observation, action).mean()
        self.optimizer.minimize(loss, observation)
        return {"policy_loss": loss.detach()}

    def counters(self) -> dict[str, float]:
        return {**super().counters(), "algo/exploration": float(self.agent.exploration)}
