"""TargetPolicy: the distribution over actions of a policy whose worth is estimated, at every row of an episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import Space
from torch import Tensor

from rlframe.agents import Agent
from rlframe.core.struct import Tree, map_tree
from rlframe.core.types import AgentInputs
from rlframe.data.episodes import Episode
from rlframe.distributions import Distribution, executed

Params = Callable[[Episode], Tensor]
N_SAMPLES = 8  # actions that stand for a distribution that cannot be summed


@dataclass(frozen=True, eq=False)
class TargetPolicy:
    """A policy as parameters [T+1, P] of a distribution at each observation of an episode.

    The distribution is of canonical actions, as agents sample them: unclipped ones of a Gaussian.
    """

    params: Params
    distribution: Distribution
    observation_space: Space
    action_space: Space
    greedy: bool = False  # it takes the mode of the distribution

    def choices(self, params: Tensor, rng: np.random.Generator) -> tuple[Tree, Tensor]:
        """Actions [n, K, *act] and weights [n, K] for expectations over the policy: all Discrete ones, else samples."""
        n, A = params.shape
        if self.distribution.n_choices:
            best = F.one_hot(params.argmax(-1), A).float()
            return torch.arange(A, device=params.device).expand(n, -1), best if self.greedy else params.softmax(-1)
        k = 1 if self.greedy else N_SAMPLES
        noise = self.distribution.noise(rng, (n, k))
        drawn = map_tree(lambda x: torch.as_tensor(x * (not self.greedy), device=params.device), noise)
        actions = self.distribution.sample(params.unsqueeze(1).expand(n, k, -1), drawn)
        return executed(self.action_space, actions), torch.full((n, k), 1 / k, device=params.device)


def target_policy(
    agent: Agent, observation_space: Space, action_space: Space, explore: bool = True, epsilon: float = float("nan")
) -> TargetPolicy:
    """The policy of an agent, at its exploration of now.

    Args:
        explore: with its noise; else its greedy actions.    epsilon: see `Agent.exploring_at`.
    Raises:
        ConfigError: the probabilities of its actions with noise are not known.
    """
    device = next(agent.parameters()).device
    with agent.exploring_at(epsilon):  # an agent without epsilon is an error
        network, distribution = agent.target(explore)

    @torch.no_grad()
    def params(episode: Episode) -> Tensor:
        found = network(_inputs(episode, device))
        return found.reshape(len(found), -1).float()

    return TargetPolicy(params, distribution, observation_space, action_space, greedy=not explore)


def _inputs(episode: Episode, device: torch.device) -> AgentInputs:
    """What the agent would have seen at the rows of an episode [T+1, 1]."""

    def after(x: np.ndarray) -> Tensor:
        first = np.zeros((1, *x.shape[1:]), x.dtype)
        return torch.as_tensor(np.concatenate([first, x]), device=device).unsqueeze(1)

    observation = map_tree(lambda x: torch.as_tensor(x, device=device).unsqueeze(1), episode.observation)
    first = torch.zeros(len(episode.reward) + 1, 1, dtype=torch.bool, device=device)
    first[0] = True
    reward = after(np.asarray(episode.reward, np.float32))
    return AgentInputs(observation, map_tree(after, episode.action), reward, first)
