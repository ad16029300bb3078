"""Continuous control with deep reinforcement learning (DDPG). Lillicrap, Hunt, Pritzel, Heess et al., 2016.

https://arxiv.org/abs/1509.02971

With the options of Ape-X DPG (Horgan et al. 2018, arXiv 1803.00933): n_step, prioritized and initial_priority; and
with those of TD3, each on its own.

A gradient step is read here and in `off_policy`, `actor_critics`, `agents.actor`, `critics.base`, `critics.values`,
`models.actor`, `models.encoders`, `models.network`, `ops.q_learning`, `updates.optimizer_step`, `optimizers.moments`,
`replay.buffer`, `replay.storage`, `replay.n_step`, `replay.select` and `core.types`.
"""

from __future__ import annotations

import copy

import chz
import torch
from gymnasium import Space
from torch import Tensor

from rlframe.agents import ActorAgent, Deterministic, make_actor_agent
from rlframe.algos.actor_critics import ActorCriticConfig, OffPolicyActorCritic
from rlframe.algos.base import UpdateMetrics
from rlframe.algos.defaults import Defaults, default_model
from rlframe.algos.off_policy import n_step_replay, priorities, reading_back, target_policy_smoothing
from rlframe.algos.prioritized import PRIORITIES, check_priorities, initial_priority
from rlframe.algos.targets import is_due, soft_update
from rlframe.core.config import count, fraction, option, positive
from rlframe.core.field_effects import idle_while
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import Tree
from rlframe.core.types import BatchSpec, Samples
from rlframe.critics import Critic
from rlframe.exploration import NOISE_KINDS, ExplorationSchedule, ExploreConfig, explore
from rlframe.models import ModelConfig
from rlframe.models.actor import ActorModel
from rlframe.models.base import averaged
from rlframe.models.network import Units, frozen
from rlframe.replay import Replay, Transitions
from rlframe.updates.compiled import updates_of
from rlframe.updates.optimizer_step import make_optimizer_step


@chz.chz
class Config(ActorCriticConfig):
    """Defaults are those of the paper (section 7), but for its noise, correlated in time, which is uncorrelated here
    (Fujimoto et al. 2018 found no difference), and its weight decay of the critic, which is left out.
    """

    IDLE = idle_while("target_noise_clip", target_noise=0) | idle_while("alpha", "beta", prioritized=False)
    IN_STATE = PRIORITIES
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

    learning_rate: Scheduled = scheduled(1e-4, "of the actor")
    critic_learning_rate: Scheduled = scheduled(1e-3, "of the critic")
    tau: Scheduled = scheduled(0.001, "how far targets move to the online networks at each of their moves", high=1)
    n_critics: int = count(1, "critics; the target takes the least of their values (2 in TD3)", high=10_000)
    policy_interval: int = count(1, "updates of the critic for each of the actor")
    target_noise: Scheduled = scheduled(0.0, "standard deviation of noise on the target's actions (0.2 in TD3)")
    target_noise_clip: Scheduled = scheduled(0.5, "its largest magnitude")
    batch_size: int = count(64, "rows of an update")
    replay_ratio: float = positive(64.0, "rows learned from for each env_step: batch_size times the updates a step")
    explore: ExploreConfig | str = explore("gaussian", (*NOISE_KINDS, "parameter_noise"), {"std": 0.2})
    prioritized: bool = option(False, "replay chooses by the critic's TD error")
    alpha: float = fraction(0.6, "exponent of the priorities")
    beta: Scheduled = scheduled(0.4, "exponent of the importance weights", high=1)
    initial_priority: str = initial_priority("the critic's TD error on receipt")
    unique: bool = option(False, "prioritized: no row is twice in a batch")

    @chz.validate
    def _check(self) -> None:
        check_priorities(self)

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> ActorAgent:
        model, policy = model or default_model(self, observation_space, action_space), Deterministic(action_space)
        return make_actor_agent(observation_space, action_space, policy, model, self.explore, seed, self.make_actor)

    def make_replay(self, agent: ActorAgent, batch_spec: BatchSpec, seed: int = 0) -> Replay[Transitions]:
        initial = "max" if self.initial_priority == "td" else self.initial_priority  # td: see DDPG.receive
        return n_step_replay(self, agent, batch_spec, seed, self.prioritized, initial)

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> DDPG:
        return DDPG(*self.parts(agent, batch_spec, n_steps, seed))


class DDPG(OffPolicyActorCritic):
    """Q-learning with the actor's action for the best one, and the actor following the gradient of Q."""

    saved = (*OffPolicyActorCritic.saved, "critic", "target_actor", "optimizer", "critic_optimizer", "generator")
    agent: ActorAgent

    def __init__(
        self,
        agent: ActorAgent,
        critic: Critic,
        replay: Replay[Transitions],
        exploration: ExplorationSchedule,
        n_steps: int,
        config: Config | None = None,
        seed: int = 0,
    ) -> None:
        """Args:
            critic: of (observation [n, *obs], action [n, *act]).
            n_steps: env_steps of the run, over which schedules go.
        Raises:
            TypeError: the agent's policy is not deterministic.
            ConfigError: initial_priority=td with a replay of your own.
            ValueError: a number of `config` is out of range.
        """
        c = config or Config()
        super().__init__(agent, critic, replay, exploration, n_steps, c)
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
        self.target_actor = copy.deepcopy(agent.model).requires_grad_(False)
        targets, online = critic.target_and_online()
        self.targets, self.online = averaged(self.target_actor) + targets, averaged(agent.model) + online
        self.optimizer = make_optimizer_step(agent.parameters(), self.schedules, units=Units.of(agent.model))
        self.critic_optimizer = make_optimizer_step(
            critic.learned, self.schedules, "critic_learning_rate", critic.units
        )
        self.beta = self.schedules.of("beta")
        self.generator = torch.Generator(self.device).manual_seed(seed_int(seed, Role.ALGO))
        self.learn_critics = updates_of(self._learn_critics, self.schedules, [self.critic_optimizer])
        self.learn_policy = updates_of(self._learn_policy, self.schedules, [self.optimizer])
        self.start_exploring()

    def receive(self, samples: Samples) -> None:
        super().receive(samples)
        if self.new_rows and len(index := self.new_rows.newest()):
            self.replay.update_priorities(index, self._first_priority(self.scaled(self.new_rows.read(index))))

    @torch.no_grad()
    def _first_priority(self, batch: Transitions) -> Tensor:
        """Those that an update would give these rows [n]."""
        self.critic.choose(self.generator)
        return self.priority(*self.values_and_target(batch, self.draw_noise(batch.action)), batch)

    def update(self) -> UpdateMetrics:
        beta = self.beta(self.progress.scheduled) if self.config.prioritized else 0.0
        batch = self.scaled(self.replay.sample(self.config.batch_size, beta))
        metrics, values, target = self.learn_from(batch)
        if self.moves.turn(self.config.target_interval):
            self.move_targets()
        self.progress.updates += 1
        if self.config.prioritized:
            self.replay.update_priorities(batch.index, self.priority(values, target, batch))
        return {**metrics, "learning_rate": self.optimizer.rate}

    def learn_from(self, batch: Transitions) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """A step of the critics, and of the actor if it has its turn; returns metrics, and what `priority` is of."""
        self.critic.choose(self.generator)
        metrics, values, target = self.learn_critics((batch, self.draw_noise(batch.action)))
        if is_due(self.progress.updates, self.config.policy_interval):
            metrics |= self.learn_policy(batch)
        return metrics, values, target

    def move_targets(self) -> None:
        """Move the targets towards the online networks."""
        soft_update(self.targets, self.online, self.now.tau)

    def priority(self, values: Tensor, target: Tensor, batch: Transitions) -> Tensor:
        """|Q - y| [n], or what stands for it of another kind of value, a mean over the critics."""
        clip = self.now.target_clip
        return priorities(self.critic.value.loss(values, target, batch.return_, batch.bootstrap, clip)[1].mean(0))

    def draw_noise(self, action: Tensor) -> Tree:
        """ε ~ N(0, 1) of the target policy for actions [n, *act]; () if it has none."""
        if self.config.target_noise == 0:
            return ()
        return torch.randn(action.shape, generator=self.generator, device=self.device)

    def _learn_critics(self, inputs: tuple[Transitions, Tree]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """One step of the critics. Also returns what `priority` is of."""
        batch, noise = inputs
        values, target = self.values_and_target(batch, noise)
        loss = self.critic_loss(values, target, batch)
        self.critic_optimizer.minimize(loss, batch)
        metrics = {"loss": loss.detach(), "q": self.critic.value.q(values.detach()).mean()}
        return metrics, values.detach(), target

    def _learn_policy(self, batch: Transitions) -> dict[str, Tensor]:
        """One step of the actor, whose actions a = μ(s) are what its loss is of."""
        observation = self.normalized(batch.inputs)
        outputs = self.actor_outputs(self.agent.model, observation)
        with frozen(self.critic_optimizer.parameters):
            q = self.critic.first_q(observation, self.policy.action(outputs))
            loss = self.actor_loss(q, outputs, batch.action)
        self.optimizer.minimize(loss, batch)
        return {"policy_loss": loss.detach()}

    def critic_loss(self, values: Tensor, target: Tensor, batch: Transitions) -> Tensor:
        """Σ_i mean w (Q_i(s, a) - y)²,  y = r + γ min_i Q'_i(s', a'),  w from replay   (algorithm 1).

        Of distributions, twice their loss, as this is twice that of the expected value, which has ½.

        Args:
            values: Z_i(s, a) [critics, n, n_atoms].    target: Z'(s', a') [n, n_atoms].
        """
        return 2 * self.critic.loss(values, target, batch.return_, batch, self.now.target_clip)

    def actor_loss(self, q: Tensor, outputs: Tensor, action_of_data: Tensor) -> Tensor:
        """-mean Q_1(s, μ(s)) of q [n], whose gradient is -mean ∇_a Q_1(s, a) ∇μ(s)   (eq. 6)."""
        return -q.mean()

    def values_and_target(self, batch: Transitions, noise: Tree) -> tuple[Tensor, Tensor]:
        """Z_i(s, a) [critics, n, n_atoms] and Z'(s', a') [n, n_atoms] of the least of the target critics."""
        observation, next_observation = self.normalized(batch.inputs), self.normalized(batch.next_inputs)
        next_action = self.next_action(next_observation, noise)
        return self.critic.with_target(observation, batch.action, next_observation, next_action)

    @torch.no_grad()
    def next_action(self, next_observation: Tree, noise: Tree) -> Tensor:
        """a' = μ'(s'); with target noise clip(μ'(s') + clip(σ ε, -c, c), -1, 1)."""
        action, c = self.policy.action(self.actor_outputs(self.target_actor, next_observation)), self.now
        if self.config.target_noise == 0:
            return action
        return target_policy_smoothing(action, noise, c.target_noise, c.target_noise_clip)

    def actor_outputs(self, actor: ActorModel, observation: Tree) -> Tensor:
        """u [n, d] of normalised observations, of which the actions μ(s) are the tanh."""
        return actor.params(observation)
