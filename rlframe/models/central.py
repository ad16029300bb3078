"""CentralView: what critics and mixing networks see of all agents of a policy."""

from __future__ import annotations

import torch
from gymnasium import Space, spaces
from torch import Tensor

from rlframe.core.multi_agent import side_by_side
from rlframe.core.spaces import PRIVILEGED
from rlframe.core.struct import Tree, map_tree
from rlframe.models.views import View, has_privileged, mask_entries


class CentralView:
    """The state of the environment, or without one all that the agents observe; and which of them are present."""

    def __init__(self, observation_space: Space, action_space: Space, n_agents: int) -> None:
        """`observation_space`: of one agent, whose entry `privileged` is the state."""
        self.has_state = has_privileged(observation_space)
        self._own = View(observation_space, *mask_entries(observation_space, action_space))
        seen = observation_space[PRIVILEGED] if self.has_state else side_by_side(self._own.space, n_agents, True)  # type: ignore[index]
        self.space = spaces.Dict({"present": spaces.MultiBinary(n_agents), "state": seen})

    def __call__(self, observation: Tree, present: Tensor) -> Tree:
        """What it is in each row, an element of `space`; agents that are not present observe zeros.

        Args:
            observation: [N, n, ...] of the agents side by side.    present: [N, n] bool.
        """
        if self.has_state:  # it is in the rows of those that are present
            rows, which = torch.arange(len(present), device=present.device), present.byte().argmax(-1)
            return {"present": present, "state": map_tree(lambda x: x[rows, which], observation[PRIVILEGED])}
        return {"present": present, "state": map_tree(lambda x: where_present(x, present), self._own(observation))}


def where_present(x: Tensor, present: Tensor) -> Tensor:
    """x [N, n, ...] with zeros for agents that are not present [N, n]."""
    return x * present.reshape(*present.shape, *[1] * (x.dim() - 2))
