"""Shared by DDPG, TD3 and SAC, whose actors learn through critics: the keys of critics, scaled returns, first steps."""

from __future__ import annotations

import math
from typing import Any

import chz
import torch
from torch import Tensor, nn

from rlframe.agents import ActorAgent
from rlframe.algos.off_policy import OffPolicy, OffPolicyConfig, n_step_replay
from rlframe.algos.running_deviation import ScaledReturns
from rlframe.core.config import AUTO, choice, count, count_or_auto, option, positive
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import idle_while
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.critics import Critic, Ensemble, make_critic
from rlframe.exploration import ExplorationSchedule, ExploreConfig
from rlframe.replay import Replay, Transitions


@chz.chz
class ActorCriticConfig(OffPolicyConfig):
    """The keys of critics that DDPG, TD3 and SAC share; defaults are theirs."""

    IDLE = idle_while("drop_atoms", target_from="least") | idle_while("return_limit", normalize_return=False)

    target_interval: int = count(1, "updates of the critics for each move of the targets")
    target_clip: Scheduled = scheduled(math.inf, "largest magnitude of the critics' targets; inf: any", above=True)
    learning_starts: int = count(10_000, "env_steps before the first update", low=0)
    random_steps: int = count_or_auto("env_steps of random actions; auto: until learning_starts, none with init=")
    explore: ExploreConfig | str = "stochastic"
    n_critics: int = count(2, "critics", high=10_000)
    target_critics: bool = option(
        True, "targets are of slow copies of the critics; else of themselves, as CrossQ's, with model.norm"
    )
    n_target_critics: int = count(0, "critics that each update draws, whose values are its target; 0: all", low=0)
    target_from: str = choice(
        "least", ("least", "truncated"), "the target: of the critic with the least Q, or the pool of their quantiles"
    )
    drop_atoms: int = count(2, "of truncated: largest quantiles for each critic that the pool leaves out", low=0)
    normalize_return: bool = option(
        False, "rewards of an update are divided by the running deviation of the discounted return, as it is then"
    )

    return_limit: float = positive(
        math.inf, "of normalize_return: largest |discounted return| so far, once it is scaled; inf: any", infinite=True
    )

    @chz.validate
    def _check_critics(self) -> None:
        c = self
        given = {"huber_delta": not math.isnan(c.huber_delta), "target_clip": c.target_clip != math.inf}
        for name, is_given in given.items():
            if c.value == "categorical" and is_given:
                raise ConfigError(
                    f"algo.{name}={getattr(c, name)} is not for algo.value=categorical, whose returns are clipped to "
                    f"algo.v_min and algo.v_max; leave it out"
                )
        if c.n_target_critics > c.n_critics:
            raise ConfigError(
                f"algo.n_target_critics={c.n_target_critics} must be at most algo.n_critics={c.n_critics}; raise "
                f"algo.n_critics"
            )
        if c.target_from == "truncated" and c.value != "quantile":
            raise ConfigError(
                f"algo.target_from=truncated is of quantiles, and algo.value={c.value}; add algo.value=quantile"
            )
        if c.target_from == "truncated" and c.drop_atoms >= c.n_atoms:
            raise ConfigError(f"algo.drop_atoms={c.drop_atoms} must be below algo.n_atoms={c.n_atoms}")

    def ensemble(self) -> Ensemble:
        """How many critics there are, and how their values become one."""
        chosen = 0 if self.n_target_critics == self.n_critics else self.n_target_critics
        return Ensemble(self.n_critics, self.target_critics, chosen, self.target_from, self.drop_atoms)

    def make_replay(self, agent: ActorAgent, batch_spec: BatchSpec, seed: int = 0) -> Replay[Transitions]:
        """The replay of these keys."""
        return n_step_replay(self, agent, batch_spec, seed)

    def parts(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int) -> tuple[Any, ...]:
        """The arguments of the algorithm, an OffPolicyActorCritic."""
        _, *others = super().parts(agent, batch_spec, n_steps, seed)
        return agent, self.make_critic(agent, seed), *others

    make_actor = None
    """A method that makes a network of your own; None: it is rlframe's.

    It is given what the policy sees of observations, the action space, n_params and the ModelConfig, and returns a
    torch.nn.Module from observations [n, *obs] to numbers [n, n_params]: u [n, d] of actions tanh u for DDPG and TD3;
    means and log standard deviations [n, 2 d], or logits, for SAC. Observations are normalised, if
    model.normalize_observation says so.
    """

    def make_critic(self, agent: ActorAgent, seed: int) -> Critic:
        """Critics of the agent's spaces, with networks as the actor's but for model.critic."""
        spaces = agent.observation_space, agent.action_space
        return make_critic(*spaces, self.kind(), agent.model_config, self.ensemble(), seed)


class Temperature(nn.Module):
    """A weight that is learned, as its logarithm."""

    def __init__(self, initial: float, loss: str = "log") -> None:
        super().__init__()
        self.log, self.is_linear = nn.Parameter(torch.tensor(math.log(initial))), loss == "linear"

    def factor(self) -> Tensor:
        """What its loss multiplies: the weight itself, or its logarithm; differentiable."""
        return self.log.exp() if self.is_linear else self.log


class OffPolicyActorCritic(OffPolicy):
    """Base class of DDPG, SAC and what is made of them: acts at random first, and learns with scaled returns or not."""

    agent: ActorAgent
    saved = (*OffPolicy.saved, "scaled_returns")

    def __init__(
        self,
        agent: ActorAgent,
        critic: Critic,
        replay: Replay[Transitions],
        exploration: ExplorationSchedule,
        n_steps: int,
        config: Any,
    ) -> None:
        super().__init__(agent, replay, exploration, n_steps, config)
        self.critic = critic.to(self.device)
        self.scaled_returns = ScaledReturns(config.discount, config.return_limit, self.device)

    def receive(self, samples: Samples) -> None:
        super().receive(samples)
        if self.config.normalize_return:
            self.scaled_returns.receive(samples)

    def scaled(self, batch: Transitions) -> Transitions:
        """Rows of replay as they are learned from."""
        return self.scaled_returns(batch) if self.config.normalize_return else batch

    def normalized(self, inputs: AgentInputs) -> Tree:
        """The observation as networks take it."""
        return self.agent.model.normalized(inputs.observation)

    def explore(self) -> None:
        super().explore()
        env_steps, c = self.progress.env_steps, self.config
        from_data = self.progress.updates and env_steps <= c.learning_starts  # a sampler follows, or there is none
        random_steps = c.learning_starts if c.random_steps == AUTO else c.random_steps
        self.agent.set_random(not from_data and env_steps < random_steps)

    def observe_data(self) -> None:
        if self.config.normalize_return:
            raise ConfigError(
                "algo.normalize_return=true needs rewards in the order of their steps, which data alone do not give; "
                "leave it out"
            )
        super().observe_data()
