"""Policy acts with an agent on observations of its environment, one or a batch: `policy.act(observation)`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces

from rlframe.agents import Agent
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.rollout.greedy import GreedyPolicy


class Policy:
    """Acts on observations of the environment, one or a batch; a policy with memory keeps its state between calls."""

    def __init__(self, agent: Agent, observation_space: Space, action_space: Space, seed: int = 0) -> None:
        """`seed`: of the exploration noise."""
        self.observation_space, self.action_space = observation_space, action_space
        self._agent = agent
        self._device = next(agent.parameters()).device
        self._greedy = GreedyPolicy(agent, observation_space, action_space).to(self._device)
        self._rng = np.random.default_rng(seed)
        self._state: Tree = ()
        self._exploring: Tree = ()  # state of the exploration
        self._n = 0  # rows of the state; 0: an episode starts

    def reset(self) -> None:
        """Start an episode: forget the previous one. A policy without memory needs no reset."""
        self._n = 0

    @torch.inference_mode()
    def act(self, observation: Any, reward: Any = 0.0, explore: bool = False) -> Any:
        """The action for an observation [*obs], or the actions for a batch of them [B, *obs].

        Args:
            reward: of the previous action, a number or [B]; only a policy with model.feed_back uses it.
            explore: act with the exploration noise of training.
        Raises:
            ValueError: the observation does not fit the observation space.
        """
        single = not _is_batch(observation, self.observation_space)
        rows = map_tree(lambda x: torch.as_tensor(np.asarray(x)).to(self._device), observation)
        rows = map_tree(lambda x: x.unsqueeze(0), rows) if single else rows
        n = len(leaves(rows)[0])
        if n != self._n:
            self._state, self._n = self._greedy.initial_state(n), n
            self._exploring = self._greedy.exploration_state(n)
        rewards = torch.as_tensor(np.broadcast_to(np.asarray(reward, np.float32), (n,)).copy()).to(self._device)
        call = self._explore if explore else self._greedy
        actions, self._state = call(rows, self._state, rewards)
        return map_tree(lambda x: as_numpy(x)[0] if single else as_numpy(x), actions)

    def _explore(self, rows: Tree, state: Tree, rewards: torch.Tensor) -> tuple[Tree, Tree]:
        noise = map_tree(lambda x: torch.from_numpy(x).to(self._device), self._agent.noise(self._rng, (len(rewards),)))
        action, state, self._exploring = self._greedy.step(rows, state, rewards, noise, self._exploring)
        return self._greedy.decode(action), state


def _is_batch(observation: Any, space: Space) -> bool:
    """Whether an observation has one more leading dimension than its space.

    Raises:
        ValueError: it has neither that shape nor the space's.
    """
    match space:
        case spaces.Dict():
            return all(_is_batch(observation[key], sub) for key, sub in space.spaces.items())
        case spaces.Tuple():
            return all(_is_batch(x, sub) for x, sub in zip(observation, space.spaces, strict=True))
    shape, own = np.shape(observation), tuple(space.shape or ())
    if own not in (shape, shape[1:]):
        raise ValueError(f"an observation of shape {shape} is neither one of {space} nor a batch of them")
    return shape != own
