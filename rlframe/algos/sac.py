"""Soft Actor-Critic: Off-Policy Maximum Entropy Deep RL with a Stochastic Actor. Haarnoja, Zhou, Abbeel, Levine, 2018.

https://arxiv.org/abs/1801.01290, and its second version, Soft Actor-Critic Algorithms and Applications, 2018
(https://arxiv.org/abs/1812.05905), which learns the temperature and needs no network for the state's value. For
Discrete actions: Soft Actor-Critic for Discrete Action Settings. Christodoulou, 2019 (https://arxiv.org/abs/1910.07207).

A gradient step is read here and in `off_policy`, `actor_critics`, `agents.actor`, `critics.base`, `critics.values`,
`models.actor`, `models.encoders`, `models.network`, `distributions.gaussian`, `ops.q_learning`,
`updates.optimizer_step`, `optimizers.moments`, `replay.buffer`, `replay.storage`, `replay.n_step`, `replay.select` and
`core.types`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import chz
import torch
import torch.nn.functional as F
from gymnasium import Space, spaces
from torch import Tensor

from rlframe.agents import ActorAgent, Choice, SquashedGaussian, make_actor_agent
from rlframe.algos.actor_critics import ActorCriticConfig, OffPolicyActorCritic, Temperature
from rlframe.algos.base import UpdateMetrics
from rlframe.algos.defaults import Defaults, default_model
from rlframe.algos.targets import is_due, soft_update
from rlframe.core.config import choice, count, fraction, option
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import idle_while, in_state
from rlframe.core.schedule import Schedule, Scheduled, scheduled
from rlframe.core.seeding import Role, seed_int
from rlframe.core.spaces import mask_parts
from rlframe.core.struct import Tree, fill
from rlframe.core.types import BatchSpec
from rlframe.critics import Critic, Ensemble
from rlframe.critics.values import of_actions
from rlframe.exploration import NOISE_KINDS, SAMPLE_KINDS, ExplorationSchedule, ExploreConfig, explore
from rlframe.models import ModelConfig
from rlframe.models.actor import ActorModel
from rlframe.models.base import has_modes
from rlframe.models.network import Units, frozen
from rlframe.models.views import FORBIDDEN
from rlframe.replay import Replay, Transitions
from rlframe.updates.compiled import Compiled
from rlframe.updates.graphed import Graphs
from rlframe.updates.optimizer_step import make_optimizer_step


@chz.chz
class Config(ActorCriticConfig):
    """Those of the second paper (appendix D); for vectors the critics' rate is CleanRL's, and it starts earlier."""

    IDLE = idle_while(
        "target_entropy", "target_entropy_fraction", "temperature_loss", learn_temperature=False
    ) | idle_while("tau", "target_interval", "target_interval_steps", target_critics=False)
    IN_STATE = in_state("temperature", learn_temperature=True)
    for_images = Defaults(ModelConfig(hidden=(256, 256), activation="relu"), BatchSpec(T=1, B=1))
    for_vectors = Defaults(for_images.model, for_images.batch, {"critic_learning_rate": 1e-3, "learning_starts": 1_000})

    learning_rate: Scheduled = scheduled(3e-4, "of the actor and the temperature")
    critic_learning_rate: Scheduled = scheduled(3e-4, "of the critics")
    tau: Scheduled = scheduled(0.005, "how far the target critics move to the online ones at each move", high=1)
    n_critics: int = count(2, "critics; targets and policy take the least of their values", high=10_000)
    policy_from: str = choice("least", ("least", "mean"), "of the critics' Q-values: what the policy ascends")
    policy_interval: int = count(1, "updates of the critics for each of the policy and the temperature")
    policy_first: bool = option(False, "the policy learns before the critics, and of s and s' as one batch")
    action_prior: str = choice("uniform", ("uniform", "gaussian"), "of actions in [-1, 1]: what the policy is drawn to")
    explore: ExploreConfig | str = explore("stochastic", (*SAMPLE_KINDS, *NOISE_KINDS), {"std": 0.1})
    temperature: Scheduled = scheduled(1.0, "alpha: the weight of the entropy, at first", above=True)
    learn_temperature: bool = option(True, "so that the policy's entropy comes to be the target")
    temperature_loss: str = choice("log", ("log", "linear"), "in log α or in α, which falls slower and rises faster")
    target_entropy: Scheduled = scheduled(math.nan, "nats; nan: -dim(A), or a fraction of log |A|", low=-math.inf)
    target_entropy_fraction: float = fraction(0.98, "of log |A|, for discrete actions; |A| counts allowed ones")

    @chz.validate
    def _check(self) -> None:
        if self.learn_temperature and isinstance(self.temperature, Schedule):
            raise ConfigError(
                f"algo.temperature={self.temperature} changes what is learned; add algo.learn_temperature=false"
            )

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> ActorAgent:
        is_choice = isinstance(action_space, spaces.Discrete)
        if is_choice and self.action_prior == "gaussian":
            raise ConfigError("algo.action_prior=gaussian is for Box actions, and these are Discrete; use uniform")
        if is_choice and self.value != "expected":
            raise ConfigError(f"algo.value={self.value} is for Box actions, and these are Discrete; use expected")
        masked = bool(mask_parts(observation_space, action_space))
        model = model or default_model(self, observation_space, action_space)
        policy = Choice(action_space, masked) if is_choice else SquashedGaussian(action_space, model)
        return make_actor_agent(observation_space, action_space, policy, model, self.explore, seed, self.make_actor)

    def ensemble(self) -> Ensemble:
        return replace(super().ensemble(), policy_from=self.policy_from)

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> SAC:
        return SAC(*self.parts(agent, batch_spec, n_steps, seed))


Pair = tuple[Any, Any]
Losses = tuple[Tensor, dict[str, Tensor]]


class SoftValue(ABC):
    """V(s) = E_a~π[min_i Q_i(s, a) - α log π(a|s)], whose expectation depends on the kind of actions."""

    def __init__(self, critic: Critic, policy: Any, generator: torch.Generator, now: Any) -> None:
        """`now`: the config, with the numbers as they are now; see Schedules."""
        self.critic, self.parameters, self.now = critic, critic.learned, now
        self.policy, self.generator = policy, generator

    def noise(self, n: int) -> Any:
        """What draws of n rows need, at s and at s'; () if nothing."""
        return (), ()

    @abstractmethod
    def draw(self, params: Tensor, noise: Tree) -> Any:
        """What the expectation is over, differentiable in the policy's parameters [n, P]."""

    def draw_next(self, model: ActorModel, observations: Pair, noise: Tree) -> Any:
        """What the target's expectation is over, at s'."""
        return self.draw(model.params(observations[1]), noise)

    @abstractmethod
    def default_entropy(self, drawn: Any) -> Tensor | float:
        """Target of the policy's entropy, nats."""

    @abstractmethod
    def critic_loss(self, batch: Transitions, observations: Pair, next_drawn: Any, temperature: Tensor) -> Losses:
        """Σ_i ½ mean (Q_i(s, a) - y)²,  y = r + γ V'(s')   (eq. 5-6), V' by the target critics; and metrics.

        With n_step above 1, r is the sum of that many rewards, without the entropy of the steps between.
        """

    @abstractmethod
    def policy_loss(self, observation: Tree, drawn: Any, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """-mean V(s), differentiable in the policy alone (eq. 7-9); and mean log π(a|s)."""


class Continuous(SoftValue):
    """The expectation is one sample, a function of the policy by its noise (Haarnoja et al. 2018, eq. 11-13)."""

    def noise(self, n: int) -> Any:
        """[2, n, d], standard normal."""
        return torch.randn(2, n, self.policy.size, generator=self.generator, device=self.generator.device)

    def draw(self, params: Tensor, noise: Tensor) -> Pair:
        return self.policy.distribution.sample_with_log_prob(params, noise)

    def default_entropy(self, drawn: Pair) -> float:
        return -float(self.policy.size)

    def critic_loss(self, batch: Transitions, observations: Pair, next_drawn: Pair, temperature: Tensor) -> Losses:
        next_action, next_log_prob = next_drawn
        values, target = self.critic.with_target(observations[0], batch.action, observations[1], next_action)
        soft_return = batch.return_ - batch.bootstrap * temperature * next_log_prob
        loss = self.critic.loss(values, target, soft_return, batch, self.now.target_clip)
        return loss, {"loss": loss, "q": self.critic.value.q(values.detach()).mean()}

    def policy_loss(self, observation: Tree, drawn: Pair, temperature: Tensor) -> tuple[Tensor, Tensor]:
        action, log_prob = drawn
        with frozen(self.parameters):
            q = self.critic.policy_q(observation, action)
        loss = (temperature * log_prob - q).mean()
        if self.now.action_prior == "gaussian":  # - log p(a), of a standard normal p
            loss = loss + 0.5 * (action.square().sum() / len(action) + self.policy.size * math.log(2 * math.pi))
        return loss, log_prob.mean()


class Discrete(SoftValue):
    """The expectation is exact, a sum over all actions, forbidden ones with weight 0 (Christodoulou 2019, eq. 10)."""

    def draw(self, params: Tensor, noise: Tree) -> Tensor:
        return F.log_softmax(params, -1)

    def default_entropy(self, log_prob: Tensor) -> Tensor:
        n_allowed = (log_prob > FORBIDDEN / 2).sum(-1)
        return self.now.target_entropy_fraction * n_allowed.log().mean()

    def critic_loss(self, batch: Transitions, observations: Pair, log_prob: Tensor, temperature: Tensor) -> Losses:
        of_all, next_values = self.critic.with_next(observations[:1], observations[1:])  # [k, n, A, 1]
        next_q = self.critic.value.q(next_values).amin(0)
        next_value = (log_prob.exp() * (next_q - temperature * log_prob)).sum(-1, keepdim=True).detach()
        values = of_actions(of_all, batch.action)
        loss = self.critic.loss(values, next_value, batch.return_, batch, self.now.target_clip)
        return loss, {"loss": loss, "q": self.critic.value.q(values.detach()).mean()}

    def policy_loss(self, observation: Tree, log_prob: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        with frozen(self.parameters):
            q = self.critic.policy_q(observation)
        prob = log_prob.exp()
        return (prob * (temperature * log_prob - q)).sum(-1).mean(), (prob * log_prob).sum(-1).mean()


class SAC(OffPolicyActorCritic):
    """Twin critics of the soft value, a policy that ascends it, and a temperature that holds the policy's entropy."""

    saved = (
        *OffPolicyActorCritic.saved,
        *("critic", "temperature", "critic_optimizer", "optimizer", "temperature_optimizer", "generator"),
    )

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
            critic: of (observation [n, *obs], action [n, *act]); for Discrete actions of the observation.
            n_steps: env_steps of the run, over which schedules go.
        Raises:
            TypeError: the agent's policy is not stochastic.    ValueError: a number of `config` is out of range.
        """
        if misplaced := {"policy_loss", "critic_loss"} & {*dir(self)}:
            raise ConfigError(f"{type(self).__name__}.{min(misplaced)} must be of its soft value; see make_soft_value")
        super().__init__(agent, critic, replay, exploration, n_steps, c := config or Config())
        self.generator = torch.Generator(self.device).manual_seed(seed_int(seed, Role.ALGO))
        self.soft_value = self.make_soft_value()
        self.targets, self.online = critic.target_and_online()
        self.temperature = Temperature(self.schedules.of("temperature")(0), c.temperature_loss).to(self.device)
        self.critic_optimizer, self.optimizer, self.temperature_optimizer = steps = [
            make_optimizer_step(self.soft_value.parameters, self.schedules, "critic_learning_rate", critic.units),
            make_optimizer_step(agent.parameters(), self.schedules, units=Units.of(agent.model)),
            make_optimizer_step(self.temperature.parameters(), self.schedules, decays=False),
        ]
        self.learn_critics = Compiled(self._learn_critics, self.schedules, steps[:1])
        self.learn_policy = Compiled(self._learn_policy, self.schedules, steps[1 : 2 + c.learn_temperature])
        follows = has_modes(agent.model) and c.policy_interval > 1 and not c.policy_first
        self.learn_statistics = Compiled(self._learn_statistics, self.schedules, []) if follows else None
        self.learn = Graphs(self._learn, self.device, steps)
        self.start_exploring()

    def make_soft_value(self) -> SoftValue:
        """The soft value of the agent's actions."""
        policy = self.agent.policy
        if not isinstance(policy, SquashedGaussian | Choice):
            raise TypeError(f"SAC needs an agent with a stochastic policy, got {type(policy).__name__}")
        kind = Continuous if policy.size else Discrete
        return kind(self.critic, policy, self.generator, self.now)

    def target_entropy(self, drawn: Any) -> Any:
        """What the temperature brings the policy's entropy to, nats."""
        is_given = self.config.target_entropy == self.config.target_entropy  # not NaN
        return self.now.target_entropy if is_given else self.soft_value.default_entropy(drawn)

    def update(self) -> UpdateMetrics:
        if not self.config.learn_temperature:  # that of the config, also in a run restored with another
            fill(self.temperature.log.detach(), math.log(self.schedules.of("temperature")(self.progress.scheduled)))
        batch = self.replay.sample(self.config.batch_size)
        self.critic.choose(self.generator)
        due = is_due(self.progress.updates, self.config.policy_interval), self.moves.turn(self.config.target_interval)
        metrics = self.learn(*due)((batch, self.soft_value.noise(len(batch.return_))))
        self.progress.updates += 1
        return {**metrics, "learning_rate": self.optimizer.rate}

    def _learn(self, policy_learns: bool, targets_move: bool, inputs: tuple[Transitions, Pair]) -> dict[str, Tensor]:
        """A step of the critics, and of the policy or its statistics; then targets move, if they are due."""
        functions, metrics = [self.learn_critics, self.learn_policy if policy_learns else self.learn_statistics], {}
        for learn in reversed(functions) if self.config.policy_first else functions:
            metrics |= learn(inputs) if learn else {}
        if targets_move:
            soft_update(self.targets, self.online, self.now.tau)
        return metrics

    def _learn_critics(self, inputs: tuple[Transitions, Pair]) -> dict[str, Tensor]:
        """One step of the critics."""
        batch, noise, model = self.scaled(inputs[0]), inputs[1][1], self.agent.model
        observations = self.normalized(batch.inputs), self.normalized(batch.next_inputs)
        with torch.no_grad():
            next_drawn = self.soft_value.draw_next(model, observations, noise)
        temperature = self.temperature.log.detach().exp()
        loss, found = self.soft_value.critic_loss(batch, observations, next_drawn, temperature)
        self.critic_optimizer.minimize(loss, inputs[0])
        return {**{name: x.detach() for name, x in found.items()}, "temperature": temperature}

    def _learn_statistics(self, inputs: tuple[Transitions, Pair]) -> dict[str, Tensor]:
        """Statistics of the actor's normalisation follow a batch from which its policy does not learn (XQC's code)."""
        self.agent.model.params(self.normalized(inputs[0].inputs))
        return {}

    def _learn_policy(self, inputs: tuple[Transitions, Pair]) -> dict[str, Tensor]:
        """One step of the policy, and one of the temperature."""
        (batch, (noise, _)), model = inputs, self.agent.model
        rows = [batch.inputs, batch.next_inputs] if self.config.policy_first else [batch.inputs]
        observations, temperature = [*map(self.normalized, rows)], self.temperature.log.detach().exp()
        drawn = self.soft_value.draw(model.params_as_one(*observations), noise)
        loss, log_prob = self.soft_value.policy_loss(observations[0], drawn, temperature)
        self.optimizer.minimize(loss, batch)
        entropy = -log_prob.detach()
        if self.config.learn_temperature:  # eq. 18, or in log α as in the authors' code: up below the target
            self.temperature_optimizer.minimize(self.temperature.factor() * (entropy - self.target_entropy(drawn)))
        return {"policy_loss": loss.detach(), "entropy": entropy}
