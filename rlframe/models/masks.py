"""Action masks: the entry `action_mask` of an observation, which says which actions are allowed (see core.spaces).

The networks do not see it. Logits of forbidden actions become FORBIDDEN, so their probability is 0, and the greedy
choice by Q-values is made among the allowed ones. A mask that forbids everything, which only the last observation of an
episode may have, counts as one that allows everything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.core.spaces import ACTION_MASK
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs
from rlframe.models.base import NumpyForward, PolicyModel, nameless
from rlframe.models.q_network import NumpyQ, QModel

# Finite, so that p log p is 0 and not NaN. Added noise disappears in it, so logits that are all forbidden are equal.
FORBIDDEN = -1e9


def split_mask(observation: Tree) -> tuple[Tree, Any]:
    """What networks see of an observation with a mask, and the mask."""
    return split(observation, ACTION_MASK)


def split(observation: Tree, entry: str) -> tuple[Tree, Any]:
    """An observation without an entry (see core.spaces.without), and the entry."""
    rest = {key: x for key, x in observation.items() if key != entry}
    return next(iter(rest.values())) if len(rest) == 1 else rest, observation[entry]


def split_inputs(inputs: AgentInputs, entry: str) -> tuple[AgentInputs, Any]:
    """Inputs without an entry of their observation, and the entry."""
    rest, found = split(inputs.observation, entry)
    return AgentInputs(rest, inputs.prev_action, inputs.prev_reward, inputs.first), found


def masked_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """The logits [..., n], FORBIDDEN where the mask [..., n] is 0."""
    return logits.masked_fill(mask == 0, FORBIDDEN)


def masked_logits_numpy(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The same in NumPy."""
    return np.where(mask != 0, logits, np.float32(FORBIDDEN))


def allowed(mask: Any) -> Any:
    """The allowed actions [..., n] as bools, of a mask of Discrete actions in NumPy or torch."""
    some = mask != 0
    return some | ~some.any(-1)[..., None]


def nth_allowed(mask: Any, drawn: Any) -> Any:
    """The allowed action with the number drawn modulo the number of allowed ones; [...] of masks [..., n]."""
    counts = allowed(mask).cumsum(-1)  # of allowed actions up to each
    return (counts <= (drawn % counts[..., -1])[..., None]).sum(-1)


def best_allowed(q: Tensor, observation: Tree) -> Tensor:
    """The best allowed action [...] by Q-values [..., n]."""
    return q.masked_fill(~allowed(observation[ACTION_MASK]), -torch.inf).argmax(-1)


class MaskedPolicy(PolicyModel):
    """A policy model of observations without the mask, whose logits are masked."""

    def __init__(self, model: PolicyModel) -> None:
        super().__init__()
        self.model, self.uses_previous = model, model.uses_previous
        nameless(self, "model")

    def initial_state(self, n: int) -> Tree:
        return self.model.initial_state(n)

    def forward(self, inputs: AgentInputs, state: Tree) -> tuple[Tensor, Tensor, Tree]:
        inputs, mask = split_inputs(inputs, ACTION_MASK)
        params, value, state = self.model(inputs, state)
        return masked_logits(params, mask), value, state

    def numpy_forward(self, n: int) -> NumpyForward | None:
        forward = self.model.numpy_forward(n)
        if forward is None:
            return None

        def masked(inputs: AgentInputs, state: Tree) -> tuple[np.ndarray, np.ndarray, Tree]:
            inputs, mask = split_inputs(inputs, ACTION_MASK)
            params, value, state = forward(inputs, state)
            return masked_logits_numpy(params, mask), value, state

        return masked

    def observe(self, observation: Tree) -> None:
        self.model.observe(split_mask(observation)[0])


class MaskedQ(QModel):
    """A Q-network of observations without the mask; the agent applies the mask where it chooses."""

    def __init__(self, model: QModel) -> None:
        super().__init__()
        self.model, self.uses_previous = model, model.uses_previous
        nameless(self, "model")

    def initial_state(self, n: int) -> Tree:
        return self.model.initial_state(n)

    def forward(self, inputs: AgentInputs, state: Tree, noisy: Tensor | float = 1.0) -> tuple[Tensor, Tree]:
        return self.model(split_inputs(inputs, ACTION_MASK)[0], state, noisy)

    def resample(self, generator: torch.Generator) -> None:
        self.model.resample(generator)

    def numpy_forward(self, n: int) -> NumpyQ | None:
        forward = self.model.numpy_forward(n)
        if forward is None:
            return None
        return lambda inputs, state, noisy: forward(split_inputs(inputs, ACTION_MASK)[0], state, noisy)

    def observe(self, observation: Tree) -> None:
        self.model.observe(split_mask(observation)[0])
