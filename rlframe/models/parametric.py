"""Parametric actions: Q-values and logits of actions that the observation describes.

The entry `available_actions` [A, d] of an observation describes each action by d numbers, which may change from row to
row (see core.spaces). With an embedding u(s) of the state and w(a) of each action, both of width E, Q(s, a) or the
logit of a is the inner product of u(s) and w(a) (He et al. 2016, arXiv 1511.04636, DRRN). The value of a policy is that
of the state alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rlframe.core.spaces import AVAILABLE_ACTIONS
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs
from rlframe.models import numpy_inference
from rlframe.models.base import NumpyForward, PolicyModel
from rlframe.models.masks import split, split_inputs
from rlframe.models.network import Network
from rlframe.models.q_network import NumpyQ, QModel


def _products(actions: Network) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Inner products [n, A, k] in NumPy, of the embeddings of actions [n, A, d] and of states [n, E, k]."""
    embed = numpy_inference.mlp(actions.layers)
    return lambda available, state: np.matmul(embed(available.astype(np.float32, copy=False)), state)


class ParametricPolicy(PolicyModel):
    """The logits are inner products of the parameters that `model` gives, and of the embeddings of actions."""

    def __init__(self, model: PolicyModel, actions: Network) -> None:
        super().__init__()
        self.model, self.actions, self.uses_previous = model, actions, model.uses_previous

    def initial_state(self, n: int) -> Tree:
        return self.model.initial_state(n)

    def forward(self, inputs: AgentInputs, state: Tree) -> tuple[Tensor, Tensor, Tree]:
        inputs, available = split_inputs(inputs, AVAILABLE_ACTIONS)
        embedding, value, state = self.model(inputs, state)
        return (self.actions(available.float()) @ embedding.unsqueeze(-1)).squeeze(-1), value, state

    def numpy_forward(self, n: int) -> NumpyForward | None:
        forward, products = self.model.numpy_forward(n), _products(self.actions)
        if forward is None:
            return None

        def parametric(inputs: AgentInputs, state: Tree) -> tuple[np.ndarray, np.ndarray, Tree]:
            inputs, available = split_inputs(inputs, AVAILABLE_ACTIONS)
            embedding, value, state = forward(inputs, state)
            return products(available, embedding[..., None])[..., 0], value, state

        return parametric

    def observe(self, observation: Tree) -> None:
        self.model.observe(split(observation, AVAILABLE_ACTIONS)[0])


class ParametricQ(QModel):
    """The values [..., A, n_atoms] are inner products of those that `model` gives [..., E, n_atoms], and of actions."""

    def __init__(self, model: QModel, actions: Network) -> None:
        super().__init__()
        self.model, self.actions, self.uses_previous = model, actions, model.uses_previous

    def initial_state(self, n: int) -> Tree:
        return self.model.initial_state(n)

    def forward(self, inputs: AgentInputs, state: Tree, noisy: Tensor | float = 1.0) -> tuple[Tensor, Tree]:
        inputs, available = split_inputs(inputs, AVAILABLE_ACTIONS)
        embedding, state = self.model(inputs, state, noisy)
        return self.actions(available.float()) @ embedding, state

    def resample(self, generator: torch.Generator) -> None:
        self.model.resample(generator)

    def numpy_forward(self, n: int) -> NumpyQ | None:
        forward, products = self.model.numpy_forward(n), _products(self.actions)
        if forward is None:
            return None

        def parametric(inputs: AgentInputs, state: Tree, noisy: np.ndarray) -> tuple[np.ndarray, Tree]:
            inputs, available = split_inputs(inputs, AVAILABLE_ACTIONS)
            embedding, state = forward(inputs, state, noisy)
            return products(available, embedding), state

        return parametric

    def observe(self, observation: Tree) -> None:
        self.model.observe(split(observation, AVAILABLE_ACTIONS)[0])
