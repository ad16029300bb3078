"""Evolution, the base class of ES and ARS: a population told by seeds, and a step along the estimated gradient."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import chz
import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from rlframe.agents import ActorAgent, Agent, Choice, Deterministic, make_actor_agent
from rlframe.algos import fields
from rlframe.algos.base import Algorithm, UpdateMetrics
from rlframe.algos.defaults import Defaults, default_model
from rlframe.core.config import count
from rlframe.core.errors import ConfigError, ReadableError
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.seeding import Role, generator
from rlframe.core.struct import Struct, Tree, as_numpy
from rlframe.core.types import Array, Samples
from rlframe.models import ModelConfig
from rlframe.models.network import OF_BATCH
from rlframe.models.normalize import RunningNorm
from rlframe.ops.evolution import merged_moments, weighted_sum
from rlframe.updates.optimizer_step import make_optimizer_step
from rlframe.updates.progress import Progress
from rlframe.updates.schedules import Schedules


@chz.chz
class EvolutionConfig:
    """Base class of the Configs of evolution strategies."""

    learns_from = "episodes"
    for_images = Defaults(ModelConfig(activation="relu"))

    directions: int = count(32, "perturbations of an update; each is played twice, added and subtracted", high=2**20)
    noise_std: Scheduled = scheduled(0.05, "standard deviation of the perturbations of the parameters", above=True)
    max_grad_norm: Scheduled = fields.grad_norm(float("inf"))

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> ActorAgent:
        """A deterministic policy: tanh for a Box, the largest output for a Discrete action."""
        model = model or default_model(self, observation_space, action_space)
        model.check_no_critic("evolution strategies have none")
        unsupported = {
            "model.action_embedding=0": model.action_embedding > 0,
            "model.memory=none": model.memory != "none",
            "model.feed_back=false": model.feed_back,
            "model.shared=auto": model.shared is True,
            "model.distribution=auto": model.distribution != "auto",
            "model.state_dependent_std=false": model.state_dependent_std,
            "model.norm=layer": model.norm in OF_BATCH,
        }
        if remedies := [remedy for remedy, wrong in unsupported.items() if wrong]:
            raise ConfigError(
                f"evolution strategies have one network, which sees one observation at a time: set "
                f"{' and '.join(remedies)}"
            )
        if model.unit_rows or model.unit_gains:
            raise ConfigError(
                "a step of evolution strategies does not bring weights back to unit length: set model.unit_rows=false "
                "and model.unit_gains=false"
            )
        discrete = isinstance(action_space, spaces.Discrete)
        if not discrete and not (isinstance(action_space, spaces.Box) and action_space.is_bounded()):
            raise ConfigError(f"evolution strategies need one Discrete action or bounded Box, not {action_space}")
        policy = Choice(action_space) if discrete else Deterministic(action_space)
        return make_actor_agent(observation_space, action_space, policy, model, "none", seed)


@dataclass(frozen=True, eq=False)
class Generation(Struct):
    """A generation: the policies θ + σ ε and θ - σ ε of every seed, so that a worker needs θ and a few numbers.

    Column 2 d of the batch is seed d's first policy, column 2 d + 1 its mirror image. Both play the same episode.
    """

    policy: Array  # [n] float32: θ, all parameters in the order of `agent.parameters()`
    buffers: Tree  # of the agent by name, as running statistics of observations
    seeds: Array  # [D] int64, of ε
    noise_std: Array  # [1] float32: σ
    generation: Array  # [1] int64, from 0


@dataclass(frozen=True, eq=False)
class EvaluationInfo(Struct):
    """`Samples.info` of a population's batch."""

    length: Array  # [1, P] int64, env_steps of each episode
    moments: Tree  # of its observations, tuple of [1, P, 3, *shape]


def flat_parameters(agent: Agent) -> Tensor:
    """All parameters [n] in one copy."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in agent.parameters()])


def population_of(agent: Agent, seeds: np.ndarray, noise_std: float, generation: int) -> Generation:
    buffers = {name: buffer.detach() for name, buffer in agent.named_buffers()}
    numbers = np.array([noise_std], np.float32), np.array([generation], np.int64)
    return Generation(flat_parameters(agent), buffers, np.asarray(seeds, np.int64), *numbers)


class ReturnsTooLarge(ReadableError):
    """Returns of a generation are infinite as float32: no gradient can be estimated from them."""


class Evolution(Algorithm):
    """Asks for a population's returns, and steps along the gradient that they tell; subclasses add `weights`.

    A generation is one batch [1, P] and one update. Its seeds follow from the run's seed and its number, so that it is
    the same after a resume.
    """

    saved = ("progress", "optimizer")

    def __init__(self, agent: ActorAgent, n_steps: int, config: Any, seed: int) -> None:
        """`n_steps`: env_steps of the run, over which schedules go.    config: that of the algorithm."""
        self.agent, self.config, self.progress, self.seed = agent, config, Progress(), seed
        self.samples: list[Samples] = []  # at most one: the generation to learn from
        self.schedules = Schedules(config, n_steps, self.progress)
        self.now = self.schedules.now
        self.optimizer = make_optimizer_step(agent.parameters(), self.schedules)

    def ask(self) -> Generation:
        """The policies to be played now."""
        self.progress.schedule(self.progress.env_steps)
        return population_of(self.agent, self._seeds(), self.now.noise_std, self.progress.updates)

    def _seeds(self) -> np.ndarray:
        return generator(self.seed, Role.ALGO, self.progress.updates).integers(2**63, size=self.config.directions)

    def receive(self, samples: Samples) -> None:
        """Raises:
        ConfigError: they are not a population's.    ReturnsTooLarge: a return is beyond float32.
        """
        if not isinstance(samples.info, EvaluationInfo):
            raise ConfigError(f"{type(self).__name__} learns from whole episodes of a population: use runner=evolution")
        self.progress.env_steps += samples.n_env_steps
        if n := int(np.count_nonzero(~np.isfinite(as_numpy(samples.reward)))):
            raise ReturnsTooLarge(
                f"at env_steps {self.progress.env_steps:,} {n} of {samples.reward.numel()} returns are beyond float32, "
                f"{np.finfo(np.float32).max:.3g}, and cannot be compared; make rewards smaller: env.reward_scale"
            )
        self.samples = [samples]

    def can_receive(self) -> bool:
        return not self.samples

    def updates_due(self) -> int:
        return len(self.samples)

    def counters(self) -> dict[str, float]:
        return self.schedules.metrics()

    def update(self) -> UpdateMetrics:
        samples = self.samples.pop()
        returns = as_numpy(samples.reward).astype(np.float64).reshape(-1, 2)  # of θ + σ ε and θ - σ ε
        weights, metrics = self.weights(returns)
        gradient = weighted_sum(weights, self._seeds(), sum(p.numel() for p in self.agent.parameters()))
        grad_norm = self.optimizer.minimize(self._loss(gradient), samples)
        self._observe(samples)
        self.progress.updates += 1
        return {
            **metrics,
            "fitness_mean": float(returns.mean()),
            "fitness_std": float(returns.std()),
            "fitness_max": float(returns.max()),
            "grad_norm": grad_norm,
            "learning_rate": self.optimizer.rate,
        }

    @abstractmethod
    def weights(self, returns: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
        """The weight [D] of each perturbation in the gradient, from the returns [D, 2] of its pair; and metrics."""

    def _loss(self, gradient: np.ndarray) -> Tensor:
        """-<g, θ>: descending its gradient, -g, ascends the returns."""
        parameters = list(self.agent.parameters())
        parts = torch.from_numpy(gradient).to(parameters[0].device).split([p.numel() for p in parameters])
        return -torch.stack([(g.view_as(p) * p).sum() for g, p in zip(parts, parameters, strict=True)]).sum()

    def _observe(self, samples: Samples) -> None:
        """Merge the observations of all episodes into the running statistics of the next generation."""
        assert isinstance(samples.info, EvaluationInfo)
        norms = [module for module in self.agent.modules() if isinstance(module, RunningNorm)]
        for norm, moments in zip(norms, samples.info.moments, strict=True):
            n, mean, variance = merged_moments(as_numpy(moments)[0])
            norm.merge(*(torch.as_tensor(x, device=norm.mean.device) for x in (n, mean, variance)))
