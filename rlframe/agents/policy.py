"""PolicyAgent: a stochastic policy with a state value, for PPO, A2C and the other policy-gradient algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from rlframe.agents.base import Agent, NumpyStep
from rlframe.core.seeding import Role, seed_int
from rlframe.core.spaces import check_action_space, check_observation_space, mask_parts, without_mask
from rlframe.core.struct import Struct, Tree
from rlframe.core.types import AgentInputs, AgentStep, Array
from rlframe.distributions import Distribution, make_distribution
from rlframe.models import ModelConfig, PolicyModel
from rlframe.models.base import with_modes
from rlframe.models.masks import MaskedPolicy
from rlframe.models.parametric import make_policy_model


@dataclass(frozen=True, eq=False)
class PolicyInfo(Struct):
    """Results of acting that training reuses."""

    log_prob: Array  # [B] of the sampled, unclipped action
    value: Array  # [B]


class PolicyAgent(Agent):
    """Samples from `distribution` with parameters from `model`."""

    def __init__(self, model: PolicyModel, distribution: Distribution) -> None:
        super().__init__()
        self.model, self.distribution = with_modes(model), distribution

    @torch.inference_mode()
    def step(self, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
        params, value, state = self.model(inputs, state)
        action, log_prob = self.distribution.act(params, noise)
        return AgentStep(action=action, info=PolicyInfo(log_prob=log_prob, value=value), state=state)

    def numpy_step(self, n: int) -> NumpyStep | None:
        forward, act = self.model.numpy_forward(n), self.distribution.act_numpy
        if forward is None:
            return None

        def step(inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
            params, value, state = forward(inputs, state)
            action, log_prob = act(params, noise)
            return AgentStep(action=action, info=PolicyInfo(log_prob=log_prob, value=value), state=state)

        return step

    def forward(self, inputs: AgentInputs, state: Tree) -> tuple[Tensor, Tensor, Tree]:
        """Distribution parameters [T, B, P], value [T, B] and the next state, with gradient."""
        return self.model(inputs, state)

    def evaluate(self, inputs: AgentInputs, state: Tree, action: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of the actions taken, entropy and value [...], with gradient."""
        params, value, _ = self(inputs, state)
        log_prob, entropy = self.distribution.log_prob_entropy(params, action)
        return log_prob, entropy, value

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return self.distribution.noise(rng, lead)

    def initial_state(self, env_ids: Sequence[int]) -> Tree:
        return self.model.initial_state(len(env_ids))

    def observe(self, observation: Tree) -> None:
        self.model.observe(observation)


def make_policy_agent(observation_space: Space, action_space: Space, config: ModelConfig, seed: int = 0) -> PolicyAgent:
    """Agent and network for these spaces; `seed`, the run's root seed, decides the initial weights.

    Raises:
        ValueError, ConfigError: an unsupported space, or a model that does not fit it.
    """
    check_observation_space(observation_space)
    check_action_space(action_space)
    distribution = make_distribution(action_space, config.squash)
    masked = bool(mask_parts(observation_space, action_space))
    seen = without_mask(observation_space) if masked else observation_space
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_int(seed, Role.MODEL))
        model = make_policy_model(seen, action_space, distribution, config)
    agent = PolicyAgent(MaskedPolicy(model) if masked else model, distribution)
    agent.model_config = config
    return agent
