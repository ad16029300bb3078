"""QAgent for the DQN family: acts by the highest Q-value, or as its exploration chooses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from rlframe.agents.base import AgentState, ModelAgent, NumpyStep, Target
from rlframe.core.arguments import checked
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, seed_int
from rlframe.core.spaces import ACTION_MASK, allowed, check_observation_space, mask_parts
from rlframe.core.struct import Struct, Tree, as_numpy, fill
from rlframe.core.types import AgentInputs, AgentStep, Array, Samples
from rlframe.critics import Value
from rlframe.data.cutting import Behaviour, as_acted
from rlframe.distributions import Categorical
from rlframe.exploration import ExploreConfig, QExploration, config_of
from rlframe.exploration.base import ExploreState, unknown_probabilities
from rlframe.exploration.q import Greedy
from rlframe.models import ModelConfig
from rlframe.models.base import with_modes
from rlframe.models.initial import redrawn
from rlframe.models.network import initial_weights
from rlframe.models.q_network import MakeQNetwork, OwnQNetwork, QModel, QNetwork


@dataclass(frozen=True, eq=False)
class QInfo(Struct):
    """Results of acting."""

    q: Array  # [B, A]


@dataclass(frozen=True, eq=False)
class QNoise(Struct):
    """Noise of one row; zeros act greedily."""

    explore: Tree  # of the exploration
    noisy: Array  # [B] float32, scale of the noise of noisy layers


class QAgent(ModelAgent):
    """Acts by the Q-values of `model`: the best action, or what `exploration` chooses."""

    model: QModel
    exploration: QExploration

    def __init__(
        self,
        model: QModel,
        kind: Value,
        exploration: QExploration,
        observation_space: Space,
        action_space: spaces.Discrete,
    ) -> None:
        super().__init__()
        self.model, self.kind, self.exploration = with_modes(model), kind, exploration
        self.observation_space, self.action_space = observation_space, action_space
        self.masked = exploration.masked

    @contextmanager
    def exploring_at(self, epsilon: float) -> Iterator[None]:
        if math.isnan(epsilon) or self.exploration.scale != "epsilon":
            with super().exploring_at(epsilon):
                yield
            return
        level = self.exploration.level
        before = level.clone()
        fill(level[:2], epsilon)
        try:
            yield
        finally:
            level.copy_(before)

    @torch.inference_mode()
    def step(self, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
        values, memory = self.model(inputs, state.memory, noise.noisy.unsqueeze(-1))
        q = self.kind.q(values)
        known, level = self.of_allowed(q, inputs), self.exploration.level
        action, explore = self.exploration.choose(known, inputs, noise.explore, state.explore, level, torch)
        return AgentStep(action=action, info=QInfo(q=q), state=AgentState(explore, memory))

    def numpy_step(self, n: int) -> NumpyStep | None:
        forward, q_of, choose = self.model.numpy_forward(n), self.kind.q_numpy, self.exploration.choose
        if forward is None:
            return None
        level, masked = as_numpy(self.exploration.level), self.masked

        def step(inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
            values, memory = forward(inputs, state.memory, noise.noisy)
            q = q_of(values)
            known = np.where(allowed(inputs.observation[ACTION_MASK]), q, -np.inf) if masked else q
            action, explore = choose(known, inputs, noise.explore, state.explore, level, np)
            return AgentStep(action=action, info=QInfo(q=q), state=AgentState(explore, memory))

        return step

    def behaviour(self, env: int = 0, ahead: bool = False) -> Behaviour:
        if ahead:
            return as_acted
        explores, level = self.exploration, as_numpy(self.exploration.level).copy()

        def log_prob(samples: Samples) -> np.ndarray | None:
            info: Any = samples.info
            q, (T, B) = info.q, samples.valid.shape
            if self.masked:
                q = np.where(allowed(samples.inputs.observation[ACTION_MASK][:-1]), q, -np.inf)
            of_envs = explores.level_of(level, ExploreState(env + np.arange(B, dtype=np.float32), ()), np)
            of_all = explores.log_probabilities(q.astype(np.float64), np.broadcast_to(of_envs, (T, B)), np)
            return None if of_all is None else np.take_along_axis(of_all, samples.action[..., None], -1)[..., 0]

        return log_prob

    def best(self, q: Tensor, inputs: AgentInputs) -> Tensor:
        """The action [...] of the highest Q-value [..., A] among those that the inputs' mask allows."""
        return self.of_allowed(q, inputs).argmax(-1)

    def of_allowed(self, q: Tensor, inputs: AgentInputs) -> Tensor:
        """Q-values [..., A], -inf for the actions that the inputs' mask forbids."""
        return q.masked_fill(~allowed(inputs.observation[ACTION_MASK]), -torch.inf) if self.masked else q

    def forward(self, inputs: AgentInputs, memory: Tree, *tau: Tensor) -> tuple[Tensor, Tree]:
        """The head's numbers [..., A, n_atoms] and the next memory, with gradient and the noise of noisy layers.

        `tau` [..., n_atoms]: fractions of implicit quantiles; the midpoints if not given.
        """
        return self.model(inputs, memory, 1.0, *tau)

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return QNoise(self.exploration.noise(rng, lead), np.ones(lead, np.float32))

    def initial_state(self, env_ids: Sequence[int]) -> Tree:
        return AgentState(self.exploration.initial_state(env_ids), self.memory(len(env_ids)))

    def joined(self, parts: AgentState) -> Tree:
        return parts

    def greedy(self, inputs: AgentInputs, memory: Tree) -> tuple[Tree, Tree]:
        values, memory = self.model(inputs, memory, 0.0)
        return self.best(self.kind.q(values), inputs), memory

    def target(self, explore: bool) -> Target:
        n_actions, level = int(self.action_space.n), self.exploration.level[0].clone()
        chooses: Any = self.exploration if explore else Greedy(n_actions, self.masked)
        if chooses.log_probabilities(level.new_zeros(2), level, torch) is None:
            raise unknown_probabilities(f"explore={chooses.kind}")

        def params(inputs: AgentInputs) -> Tensor:
            values, _ = self.model(inputs, self.memory(1), 0.0)
            return chooses.log_probabilities(self.of_allowed(self.kind.q(values), inputs), level, torch)

        return params, Categorical(n_actions)


def _check_own(explore: ExploreConfig, kind: Value, config: ModelConfig, dueling: bool) -> None:
    """Raise ConfigError if a setting is about the layers of rlframe's Q-network, and there is another."""
    for given, is_given in {
        f"algo.explore={explore.kind()}": explore.noisy_layers,
        "algo.value=implicit": kind.n_cosines,
        "algo.dueling=true": dueling,
        f"model.memory={config.memory}": config.memory != "none",
        "model.feed_back=true": config.feed_back,
        f"model.action_embedding={config.action_embedding}": config.action_embedding,
    }.items():
        if is_given:
            raise ConfigError(f"{given} is for rlframe's Q-network, and make_q_network gives another; leave it out")


@checked
def make_q_agent(
    observation_space: Space,
    action_space: Space,
    config: ModelConfig,
    kind: Value,
    explore: ExploreConfig | str,
    seed: int = 0,
    dueling: bool = False,
    make_network: MakeQNetwork | None = None,
) -> QAgent:
    """Agent and network for these spaces; `seed`, the run's root seed, decides the initial weights.

    `make_network`: of a network of the user's, see `make_q_network` of algos.dqn.Config; None: it is rlframe's.

    Raises:
        ConfigError: the actions are not Discrete, or `config` is for policies.
        ValueError: an unsupported observation space.
    """
    check_observation_space(observation_space)
    for given, is_given in {
        f"log_std={config.log_std:g}": config.log_std,
        "shared=true": config.shared is True,
        f"distribution={config.distribution}": config.distribution != "auto",
        "state_dependent_std=true": config.state_dependent_std,
    }.items():
        if is_given:
            raise ConfigError(f"model.{given} is for policies; the DQN family has none, so leave it out")
    if not isinstance(action_space, spaces.Discrete):
        others = "sac, td3 or ppo" if isinstance(action_space, spaces.Box) else "ppo or a2c"
        raise ConfigError(f"the DQN family needs Discrete actions, got {action_space}; use {others}")
    masked, part = bool(mask_parts(observation_space, action_space)), config_of(explore)
    with initial_weights(seed_int(seed, Role.MODEL)):
        given = observation_space, action_space, kind.n_atoms, config
        if make_network is None:
            model: QModel = redrawn(QNetwork(*given, dueling, part.noisy_layers, kind.n_cosines), config.init)
        else:
            _check_own(part, kind, config, dueling)
            model = OwnQNetwork(make_network, *given)
    exploration = part.make_q(int(action_space.n), masked)
    exploration.kind = part.kind()
    agent = QAgent(model, kind, exploration, observation_space, action_space)
    agent.model_config = config
    return agent
