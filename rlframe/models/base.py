"""Interface of the models of agents, and the config of every network."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import chz
import numpy as np
from torch import Tensor, nn

from rlframe.core.config import choice, option, sizes
from rlframe.core.errors import ConfigError
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs

NumpyForward = Callable[[AgentInputs, Tree], tuple[np.ndarray, np.ndarray, Tree]]


class Model(nn.Module, ABC):
    """A network that an agent acts with."""

    uses_previous: bool = False  # whether it reads the previous action, the reward and `first`

    def initial_state(self, n: int) -> Tree:
        """Zero state of n environments, leaves [n, ...]; () without memory."""
        return ()

    def observe(self, observation: Tree) -> None:
        """Update running statistics from observations [..., *obs]; called once per batch, by the learner."""


class PolicyModel(Model):
    """Maps agent inputs to action-distribution parameters and a state value."""

    @abstractmethod
    def forward(self, inputs: AgentInputs, state: Tree) -> tuple[Tensor, Tensor, Tree]:
        """Parameters [..., param_size], value [...] and the next state, for inputs [B, ...] or [T, B, ...].

        `state` [B] is the state before the first row; it counts as zero where `inputs.first` is set.
        """

    def numpy_forward(self, n: int) -> NumpyForward | None:
        """`forward` for n rows of NumPy arrays, with the current parameters; None if not implemented.

        Acting on a CPU prefers it, so its results must equal those of `forward` up to rounding.
        """
        return None


@chz.chz
class ModelConfig:
    """A network: encoder, memory, normalisation. Heads follow from the agent and the action space."""

    encoder: str = option("auto", "auto | mlp | nature | impala | module:Class or ./file.py:Class, your own nn.Module")
    hidden: tuple[int, ...] = sizes((64, 64), "widths of the fully connected layers of vectors")
    image_hidden: tuple[int, ...] = sizes((512,), "widths of the fully connected layers after an image encoder")
    activation: str = choice("tanh", ("tanh", "relu", "elu", "silu"), "between fully connected layers")
    memory: str = choice("none", ("none", "lstm", "gru"), "recurrent layer after the encoder")
    memory_size: int = option(64, "width of the recurrent layer")
    feed_back: bool = option(False, "also feed the previous action and reward to the network")
    shared: bool = option(False, "one encoder and memory for policy and value; images always share")
    normalize_observation: bool = option(False, "running mean and variance of float vectors, saved with the model")
    squash: bool = option(False, "tanh-squashed instead of plain Gaussian for bounded Box actions")
    log_std: float = option(0.0, "initial log standard deviation of Gaussian policies")

    @chz.validate
    def _check(self) -> None:
        if min(*self.hidden, *self.image_hidden, self.memory_size, 1) < 1:
            raise ConfigError(
                f"model.hidden={list(self.hidden)}, model.image_hidden={list(self.image_hidden)} and "
                f"model.memory_size={self.memory_size} are widths, at least 1 each"
            )
        if not math.isfinite(self.log_std):
            raise ConfigError(f"model.log_std={self.log_std} must be finite")
