"""Soft Actor-Critic: Off-Policy Maximum Entropy Deep RL with a Stochastic Actor. Haarnoja, Zhou, Abbeel, Levine, 2018.

https://arxiv.org/abs/1801.01290, and its second version, Soft Actor-Critic Algorithms and Applications, 2018
(https://arxiv.org/abs/1812.05905), which learns the temperature and needs no network for the state's value. For
Discrete actions: Soft Actor-Critic for Discrete Action Settings. Christodoulou, 2019 (https://arxiv.org/abs/1910.07207).
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import chz
import torch
import torch.nn.functional as F
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.agents import ActorAgent, Choice, SquashedGaussian, make_actor_agent
from rlframe.algos.base import Algorithm, Progress, UpdateMetrics
from rlframe.algos.cuda_graph import graphed
from rlframe.algos.optimizer_step import Updater
from rlframe.algos.replay_ratio import UpdateDebt
from rlframe.algos.targets import load_torch_generator, soft_update
from rlframe.core.config import choice, count, fraction, option
from rlframe.core.schedule import annealed
from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import Struct, Tree
from rlframe.core.types import BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.models.critics import Critics, DiscreteCritics, make_critics, make_discrete_critics
from rlframe.replay import NStep, ReplayConfig, Transitions, make_replay


@chz.chz
class Config:
    """Defaults are those of the second paper (appendix D)."""

    replay: ReplayConfig
    learning_rate: float = option(3e-4, "Adam, of the actor and the temperature")
    critic_learning_rate: float = option(3e-4, "Adam, of the critics")
    learning_rate_schedule: str = choice("constant", ("linear", "constant"), "of both, over runner.n_steps")
    max_grad_norm: float = option(math.inf, "norm at which the gradient of each loss is clipped; inf: never")
    discount: float = fraction(0.99, "gamma, per env step")
    n_step: int = count(1, "rewards of a return before the critics take over")
    tau: float = fraction(0.005, "how far the target critics move to the online ones at each update")
    batch_size: int = count(256, "rows of an update")
    replay_ratio: float = option(256.0, "rows learned from for each env_step: batch_size times the updates a step")
    learn_from: int = count(10_000, "env_steps, over all environments, of random actions before the first update")
    temperature: float = option(1.0, "alpha: the weight of the entropy, at first")
    learn_temperature: bool = option(True, "so that the policy's entropy comes to be the target")
    target_entropy: float = option(
        math.nan, "nats; nan: -dim(A), or for discrete actions target_entropy_fraction of the most there can be"
    )
    target_entropy_fraction: float = fraction(0.98, "of log |A|, for discrete actions")

    def make_agent(self, observation_space: Space, action_space: Space, model: ModelConfig, seed: int) -> ActorAgent:
        is_choice = isinstance(action_space, spaces.Discrete)
        policy = Choice(action_space) if is_choice else SquashedGaussian(action_space)
        return make_actor_agent(observation_space, action_space, policy, model, seed)

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int) -> SAC:
        return SAC(agent, batch_spec, n_steps, self, seed)


class SoftValue(ABC):
    """What kinds of actions differ in: their critics, and the expectation over the policy's actions.

    V(s) = E_a~π[min_i Q_i(s, a) - α log π(a|s)]
    """

    critics: Critics | DiscreteCritics
    target_critics: Critics | DiscreteCritics
    default_target: float  # entropy in nats

    @abstractmethod
    def draw(self, params: Tensor) -> Any:
        """What the expectation is taken over: a tree [n, ...] from the policy's parameters [n, P]."""

    @abstractmethod
    def descend_error(
        self, batch: Transitions, observation: Tree, next_observation: Tree, drawn: Any, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Set the critics' gradients of Σ_i ½ mean (Q_i(s, a) - y)²,  y = r + γ V'(s')   (eq. 5-6).

        V' is by the target critics, and what is `drawn` after s'. Returns this loss and the mean Q.
        """

    @abstractmethod
    def gradient(self, observation: Tree, drawn: Any, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The policy's loss and mean log π(a|s), and the loss's gradient in the policy's parameters [n, P].

        The loss is -mean V(s) by the critics, which stay as they are (eq. 7-9).
        """


@dataclass(frozen=True, eq=False)
class Drawn(Struct):
    """Actions of a policy, and how they came about."""

    params: Tensor  # [n, P]
    noise: Tensor  # [n, d]
    action: Tensor  # [n, *act]
    log_prob: Tensor  # [n]


class Continuous(SoftValue):
    """The expectation is one sample, a function of the policy by its noise (Haarnoja et al. 2018, eq. 11-13)."""

    critics: Critics
    target_critics: Critics

    def __init__(self, agent: ActorAgent, policy: SquashedGaussian, generator: torch.Generator, seed: int) -> None:
        self.policy, self.generator = policy, generator
        self.critics = make_critics(agent.observation_space, agent.action_space, agent.network, 2, seed)
        self.critics.to(generator.device)
        self.target_critics = self.critics.make_target()
        self.default_target = -float(policy.size)

    def draw(self, params: Tensor) -> Drawn:
        noise = torch.randn((len(params), self.policy.size), generator=self.generator, device=params.device)
        return Drawn(params, noise, *self.policy.sample(params, noise))

    def descend_error(
        self, batch: Transitions, observation: Tree, next_observation: Tree, drawn: Drawn, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        critics, next_q = self.critics.run_beside(
            self.target_critics, observation, batch.action, next_observation, drawn.action
        )
        target_q = batch.return_ + batch.bootstrap * (next_q.amin(0) - temperature * drawn.log_prob)
        q = critics.q  # [2, n]
        error = q - target_q
        critics.to_parameters(error / len(target_q))
        return error.square().mean(), q.mean()  # of two critics, each with ½

    def gradient(self, observation: Tree, drawn: Drawn, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        critics, n = self.critics.least(observation, drawn.action), len(drawn.log_prob)
        of_action = critics.to_action(torch.full_like(critics.q, -1 / n))
        gradient = self.policy.gradient(drawn.params, drawn.noise, drawn.action, of_action, temperature / n)
        return (temperature * drawn.log_prob - critics.q).mean(), drawn.log_prob.mean(), gradient


class Discrete(SoftValue):
    """The expectation is exact, a sum over all actions (Christodoulou 2019, eq. 10-12)."""

    critics: DiscreteCritics
    target_critics: DiscreteCritics

    def __init__(self, agent: ActorAgent, policy: Choice, target_fraction: float, seed: int) -> None:
        n_actions, device = policy.param_size, agent.random.device
        self.critics = make_discrete_critics(agent.observation_space, n_actions, agent.network, 2, seed).to(device)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.default_target = target_fraction * math.log(n_actions)

    def draw(self, params: Tensor) -> Tensor:
        """log π(·|s) [n, A]."""
        return F.log_softmax(params, -1)

    def descend_error(
        self, batch: Transitions, observation: Tree, next_observation: Tree, log_prob: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        next_q = self.target_critics(next_observation).amin(0)
        next_value = (log_prob.exp() * (next_q - temperature * log_prob)).sum(-1)
        target_q = batch.return_ + batch.bootstrap * next_value
        taken, passes = batch.action.unsqueeze(-1), self.critics.run(observation)
        q = torch.stack([each.output.gather(-1, taken).squeeze(-1) for each in passes])  # [2, n]
        error = q - target_q
        for each, row in zip(passes, error / len(target_q), strict=True):
            each.to_parameters(torch.zeros_like(each.output).scatter_(-1, taken, row.unsqueeze(-1)))
        return error.square().mean(), q.mean()  # of two critics, each with ½

    def gradient(self, observation: Tree, log_prob: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """∂V/∂x_j = π_j (Q_j - α log π_j - V) in the logits x."""
        q = self.critics(observation).amin(0)
        prob, soft_q = log_prob.exp(), q - temperature * log_prob
        value = (prob * soft_q).sum(-1, keepdim=True)
        return -value.mean(), (prob * log_prob).sum(-1).mean(), prob * (soft_q - value) / -len(prob)


def _soft_value(agent: ActorAgent, config: Config, generator: torch.Generator, seed: int) -> SoftValue:
    match agent.policy:
        case SquashedGaussian():
            return Continuous(agent, agent.policy, generator, seed)
        case Choice():
            return Discrete(agent, agent.policy, config.target_entropy_fraction, seed)
    raise TypeError(f"SAC needs an agent with a stochastic policy, got {type(agent.policy).__name__}")


class SAC(Algorithm):
    """Twin critics of the soft value, a policy that ascends it, and a temperature that holds the policy's entropy."""

    def __init__(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, config: Config, seed: int = 0) -> None:
        self.agent, self.config = agent, config
        self.device = agent.random.device
        if config.temperature <= 0:
            raise ValueError(f"algo.temperature={config.temperature} must be above 0; a small one is nearly greedy")
        self.progress = Progress()
        self.debt = UpdateDebt(config.replay_ratio, config.batch_size, config.learn_from)
        self.replay = make_replay(
            config.replay,
            agent.observation_space,
            agent.action_space,
            batch_spec,
            NStep(config.discount, config.n_step),
            device=self.device,
            seed=seed,
        )
        self.generator = torch.Generator(self.device).manual_seed(seed_int(seed, Role.ALGO))
        self.soft_value = _soft_value(agent, config, self.generator, seed)
        self.critics, self.target_critics = self.soft_value.critics, self.soft_value.target_critics
        self.online, self.targets = list(self.critics.parameters()), list(self.target_critics.parameters())
        self.log_temperature = nn.Parameter(torch.tensor(math.log(config.temperature), device=self.device))
        given = config.target_entropy
        self.target_entropy = self.soft_value.default_target if math.isnan(given) else given

        schedule, clip = config.learning_rate_schedule, config.max_grad_norm
        rate = annealed(schedule, config.learning_rate, n_steps)
        critic_rate = annealed(schedule, config.critic_learning_rate, n_steps)
        self.actor_updater = Updater(agent.parameters(), "adam", rate, clip, self.progress, 1e-8)
        self.critic_updater = Updater(self.critics.parameters(), "adam", critic_rate, clip, self.progress, 1e-8)
        self.temperature_updater = Updater([self.log_temperature], "adam", rate, clip, self.progress, 1e-8)
        updaters = [self.critic_updater, self.actor_updater, self.temperature_updater]
        self.learn = graphed(self._learn, self.device, updaters, [self.generator])
        self._explore()

    def _explore(self) -> None:
        self.agent.set_levels(float(self.progress.env_steps < self.config.learn_from), 0.0)

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)
        self.replay.append(samples)
        self.agent.observe(samples.observation)
        self.debt.receive(self.progress.scheduled, self.progress.env_steps)
        self._explore()

    def updates_due(self) -> int:
        return self.debt.due(self.replay.n_choices)

    def update(self) -> UpdateMetrics:
        metrics = self.learn(self.replay.sample(self.config.batch_size))
        self.progress.updates += 1
        self.debt.pay()
        return {**metrics, "learning_rate": self.actor_updater.rate}

    @torch.no_grad()
    def _learn(self, batch: Transitions) -> dict[str, Tensor]:
        """One step each of the critics, the policy and the temperature, and of the target critics after them."""
        model, n = self.agent.model, len(batch.return_)
        observation, next_observation = (
            model.normalized(inputs.observation) for inputs in (batch.inputs, batch.next_inputs)
        )
        actor, params = model.run_beside(observation, next_observation)
        drawn = self.soft_value.draw(params)
        temperature = self.log_temperature.exp()
        loss, q = self.soft_value.descend_error(batch, observation, next_observation, drawn[n:], temperature)
        self.critic_updater.follow(loss, batch)
        policy_loss, log_prob, gradient = self.soft_value.gradient(observation, drawn[:n], temperature)
        actor.to_parameters(gradient)
        self.actor_updater.follow(policy_loss, batch)
        if self.config.learn_temperature:
            self._update_temperature(log_prob)
        soft_update(self.targets, self.online, self.config.tau)
        return {
            "loss": loss,
            "q": q,
            "policy_loss": policy_loss,
            "entropy": -log_prob,
            "temperature": temperature,
        }

    def _update_temperature(self, log_prob: Tensor) -> None:
        """Descend -log α (log π + H): up while the entropy is below H (eq. 18, in log α as in the authors' code)."""
        self.log_temperature.grad = -(log_prob + self.target_entropy)
        self.temperature_updater.follow(log_prob)

    def facts(self) -> dict[str, str]:
        return {"replay": self.replay.size}

    def counters(self) -> dict[str, float]:
        return {
            **self.debt.counters(self.progress),
            "replay/rows": self.replay.n_rows,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "progress": self.progress.state_dict(),
            "debt": self.debt.state_dict(),
            "replay": self.replay.state_dict(),
            "critics": self.critics.state_dict(),
            "target_critics": self.target_critics.state_dict(),
            "log_temperature": self.log_temperature.detach().clone(),
            "actor_updater": self.actor_updater.state_dict(),
            "critic_updater": self.critic_updater.state_dict(),
            "temperature_updater": self.temperature_updater.state_dict(),
            "generator": self.generator.get_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.progress.load_state_dict(state["progress"])
        self.debt.load_state_dict(state["debt"])
        self.replay.load_state_dict(state["replay"])
        self.critics.load_state_dict(state["critics"])
        self.target_critics.load_state_dict(state["target_critics"])
        self.log_temperature.copy_(state["log_temperature"])
        self.actor_updater.load_state_dict(state["actor_updater"])
        self.critic_updater.load_state_dict(self.critics.moments(state["critic_updater"]))
        self.temperature_updater.load_state_dict(state["temperature_updater"])
        load_torch_generator(self.generator, state["generator"])
