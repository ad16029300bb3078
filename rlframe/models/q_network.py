"""Q-networks of the DQN family, for agents.q: a trunk with a plain, dueling or noisy head, and value kinds.

A value kind says how the head's numbers become a Q-value: expected, categorical or quantile.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import chz
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from rlframe.core.struct import Tree, as_numpy
from rlframe.core.types import AgentInputs
from rlframe.kernels.device import to_device
from rlframe.kernels.matmul import linear
from rlframe.kernels.mlp import layers_of
from rlframe.models import numpy_inference
from rlframe.models.actor_critic import Trunk
from rlframe.models.base import Model, ModelConfig
from rlframe.models.encoders import has_images, orthogonal
from rlframe.models.normalize import ObservationNorm
from rlframe.ops.q_learning import categorical_loss, expected_loss, quantile_loss


class QValue(ABC):
    """How `n_atoms` numbers for each action become its Q-value; stateless."""

    n_atoms: int

    @abstractmethod
    def q(self, values: Tensor) -> Tensor:
        """Q [..., A] from the head's output [..., A, n_atoms]."""

    @abstractmethod
    def q_numpy(self, values: np.ndarray) -> np.ndarray:
        """The same in NumPy."""

    def of_best(self, values: Tensor, chooser: Tensor) -> Tensor:
        """Values [n, n_atoms] of the action that is best in `chooser`; both [n, A, n_atoms]."""
        return of_actions(values, self.q(chooser).argmax(-1))

    @abstractmethod
    def loss(
        self, values: Tensor, action: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, error and Q-value [n] of the actions taken; only the loss has a gradient (see ops.q_learning).

        Args:
            values: [n, A, n_atoms].    action: [n] int64.    target: [n, n_atoms] of the next action.
            return_, bootstrap: [n].
        """


def of_actions(values: Tensor, action: Tensor) -> Tensor:
    """Values [n, n_atoms] of one action [n] per row, from the values of all actions [n, A, n_atoms]."""
    index = action.view(-1, 1, 1).expand(-1, 1, values.shape[-1])
    return values.gather(1, index).squeeze(1)


class ExpectedValue(QValue):
    """The expected return itself (Mnih et al. 2015)."""

    n_atoms = 1

    def __init__(self, huber_delta: float = 1.0) -> None:
        """`huber_delta`: |error| above which the loss is linear."""
        self.huber_delta = huber_delta

    def q(self, values: Tensor) -> Tensor:
        return values.squeeze(-1)

    def q_numpy(self, values: np.ndarray) -> np.ndarray:
        return values[..., 0]

    def of_best(self, values: Tensor, chooser: Tensor) -> Tensor:
        return values.amax(1) if chooser is values else super().of_best(values, chooser)

    def loss(
        self, values: Tensor, action: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return expected_loss(values, action, target.squeeze(-1), return_, bootstrap, self.huber_delta)


class CategoricalValue(QValue):
    """Logits of a distribution over `n_atoms` returns spaced evenly from v_min to v_max (Bellemare et al. 2017).

    Raises:
        ValueError: fewer than two atoms, or an empty range.
    """

    def __init__(self, n_atoms: int, v_min: float, v_max: float) -> None:
        if n_atoms < 2 or not v_min < v_max:
            raise ValueError(
                f"algo.n_atoms={n_atoms} must be at least 2 and algo.v_min={v_min} below algo.v_max={v_max}"
            )
        self.n_atoms, self.v_min, self.v_max = n_atoms, v_min, v_max
        self.support = torch.linspace(v_min, v_max, n_atoms)  # z

    def q(self, values: Tensor) -> Tensor:
        if values.is_cpu:
            return values.softmax(-1) @ self.support
        # Made on the GPU: a copy would make each update wait.
        return values.softmax(-1) @ torch.linspace(self.v_min, self.v_max, self.n_atoms, device=values.device)

    def q_numpy(self, values: np.ndarray) -> np.ndarray:
        weights = np.exp(values - values.max(-1, keepdims=True))
        return (weights * self.support.numpy()).sum(-1) / weights.sum(-1)

    def loss(
        self, values: Tensor, action: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        taken = of_actions(values, action)
        losses = categorical_loss(taken, target, return_, bootstrap, self.v_min, self.v_max)
        return *losses, self.q(taken.detach())


class QuantileValue(QValue):
    """Returns at the quantile midpoints (2i + 1) / 2N, N = n_atoms >= 1 (Dabney et al. 2018)."""

    def __init__(self, n_atoms: int, huber_delta: float = 1.0) -> None:
        if n_atoms < 1:
            raise ValueError(f"algo.n_atoms={n_atoms} must be at least 1")
        self.n_atoms, self.huber_delta = n_atoms, huber_delta

    def q(self, values: Tensor) -> Tensor:
        return values.mean(-1)

    def q_numpy(self, values: np.ndarray) -> np.ndarray:
        return values.mean(-1)

    def loss(
        self, values: Tensor, action: Tensor, target: Tensor, return_: Tensor, bootstrap: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        taken = of_actions(values, action)
        losses = quantile_loss(taken, target, return_, bootstrap, self.huber_delta)
        return *losses, self.q(taken.detach())


NumpyQ = Callable[[AgentInputs, Tree, np.ndarray], tuple[np.ndarray, Tree]]
_SIGMA = 0.5  # sigma_0 of Fortunato et al. 2018, section 3.2


class QModel(Model):
    """Maps agent inputs to `n_atoms` numbers for each action (see QValue)."""

    @abstractmethod
    def forward(self, inputs: AgentInputs, state: Tree, noisy: Tensor | float = 1.0) -> tuple[Tensor, Tree]:
        """Values [..., A, n_atoms] and the next state, for inputs [B, ...] or [T, B, ...].

        `noisy` [..., 1] or a number: scale of the noise of noisy layers in each row, 0 for none.
        """

    def resample(self, generator: torch.Generator) -> None:
        """Draw new noise for noisy layers."""

    def numpy_forward(self, n: int) -> NumpyQ | None:
        """`forward` for n rows of NumPy arrays, `noisy` [n]; None if not implemented (see PolicyModel)."""
        return None


class NoisyLinear(nn.Module):
    """y = (μ + σ⊙ε) x with factorised ε_ij = f(ε_i) f(ε_j), f(x) = sign(x) √|x| (Fortunato et al. 2018, eq. 9-11)."""

    noise_in: Tensor
    noise_out: Tensor

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(n_in)
        self.weight = nn.Parameter(torch.empty(n_out, n_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(n_out).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((n_out, n_in), _SIGMA * bound))
        self.bias_sigma = nn.Parameter(torch.full((n_out,), _SIGMA * bound))
        self.register_buffer("noise_in", torch.zeros(n_in))
        self.register_buffer("noise_out", torch.zeros(n_out))

    def resample(self, generator: torch.Generator) -> None:
        """Draw new ε, on the CPU."""
        for noise in (self.noise_in, self.noise_out):
            drawn = torch.randn(noise.shape, generator=generator)
            noise.copy_(to_device(drawn.sign() * drawn.abs().sqrt(), noise.device))

    def forward(self, x: Tensor, noisy: Tensor | float) -> Tensor:
        # (σ ⊙ f(ε_i) f(ε_j)) x = f(ε_i) ⊙ σ (f(ε_j) ⊙ x), without a second weight matrix
        noise = linear(x * self.noise_in, self.weight_sigma, self.bias_sigma) * self.noise_out
        return linear(x, self.weight, self.bias) + noisy * noise


class Stream(nn.Module):
    """The layers from features to the values or advantages, with or without hidden layers."""

    def __init__(self, n_in: int, hidden: tuple[int, ...], n_out: int, noisy: bool, layer_norm: bool = False) -> None:
        super().__init__()
        pairs = itertools.pairwise([n_in, *hidden, n_out])
        self.layers = nn.ModuleList(
            NoisyLinear(*pair) if noisy else orthogonal(nn.Linear(*pair), 1.0) for pair in pairs
        )
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in hidden if layer_norm)
        self.linears_only = None if noisy else layers_of(self.layers, (*["relu"] * len(hidden), "none"), self.norms)

    def forward(self, x: Tensor, noisy: Tensor | float) -> Tensor:
        if self.linears_only:
            return self.linears_only(x)
        for index, layer in enumerate(self.layers):
            x = self.norms[index - 1](x) if index and self.norms else x
            x = layer(F.relu(x) if index else x, noisy)
        return x

    def numpy_forward(self) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """`forward` in NumPy, for blocks of rows."""
        layers = [_layer_on_numpy(layer) for layer in self.layers]
        norms = [numpy_inference.layer_norm(norm.weight, norm.bias) for norm in self.norms]  # type: ignore[arg-type]

        def forward(x: np.ndarray, noisy: np.ndarray) -> np.ndarray:
            for index, layer in enumerate(layers):
                x = norms[index - 1](x) if index and norms else x
                x = layer(np.maximum(x, 0) if index else x, noisy)
            return x

        return forward


def _layer_on_numpy(layer: nn.Module) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    if not isinstance(layer, NoisyLinear):
        affine = numpy_inference.head(layer)
        return lambda x, noisy: affine(x)
    mean = numpy_inference.affine(layer.weight, layer.bias)
    sigma = numpy_inference.affine(layer.weight_sigma, layer.bias_sigma)
    noise_in, noise_out = as_numpy(layer.noise_in), as_numpy(layer.noise_out)
    return lambda x, noisy: mean(x) + noisy * (sigma(x * noise_in) * noise_out)


class QNetwork(QModel):
    """Trunk and head; the streams of dueling (Wang et al. 2016) and noisy heads contain the last hidden layer."""

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Discrete,
        n_atoms: int,
        config: ModelConfig,
        dueling: bool = False,
        noisy: bool = False,
    ) -> None:
        super().__init__()
        self.norm = ObservationNorm(observation_space) if config.normalize_observation else None
        name = "image_hidden" if has_images(observation_space) else "hidden"
        widths: tuple[int, ...] = getattr(config, name)
        hidden = widths[-1:] if dueling or noisy else ()
        if hidden and config.memory == "none":
            config = chz.replace(config, **{name: widths[:-1]})
        self.trunk = Trunk(observation_space, action_space, config)
        self.uses_previous = config.feed_back or config.memory != "none"
        self.n_actions, self.n_atoms = int(action_space.n), n_atoms
        self.advantage = Stream(self.trunk.size, hidden, self.n_actions * n_atoms, noisy, config.layer_norm)
        self.value = Stream(self.trunk.size, hidden, n_atoms, noisy, config.layer_norm) if dueling else None
        trunk, head = self.trunk.layers, self.advantage.linears_only
        # A network of linear layers alone is evaluated as one autograd node:
        self._linear_network = trunk.then(head) if trunk and head and not dueling else None
        self.noisy_layers = [module for module in self.modules() if isinstance(module, NoisyLinear)]

    def initial_state(self, n: int) -> Tree:
        return self.trunk.initial_state(n)

    def forward(self, inputs: AgentInputs, state: Tree, noisy: Tensor | float = 1.0) -> tuple[Tensor, Tree]:
        observation = self.norm(inputs.observation) if self.norm else inputs.observation
        if self._linear_network:
            return self._by_action(self._linear_network(self.trunk.vectors(observation))), state
        features, state = self.trunk(observation, inputs, state)
        values = self._by_action(self.advantage(features, noisy))
        if self.value:  # V(s) + A(s, a) - mean A(s, ·)   (Wang et al. 2016, eq. 9)
            values = self.value(features, noisy).unsqueeze(-2) + values - values.mean(-2, keepdim=True)
        return values, state

    def _by_action(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.n_actions, self.n_atoms)

    def observe(self, observation: Tree) -> None:
        if self.norm:
            self.norm.update(observation)

    def resample(self, generator: torch.Generator) -> None:
        for layer in self.noisy_layers:
            layer.resample(generator)

    def numpy_forward(self, n: int) -> NumpyQ | None:
        trunk = self.trunk.numpy_forward(n)
        if trunk is None:
            return None
        norm = numpy_inference.normalizer(self.norm) if self.norm else None
        advantage = self.advantage.numpy_forward()
        value = self.value.numpy_forward() if self.value else None
        shape, has_noise = (self.n_actions, self.n_atoms), bool(self.noisy_layers)

        def forward(inputs: AgentInputs, state: Tree, noisy: np.ndarray) -> tuple[np.ndarray, Tree]:
            observation, state = numpy_inference.in_blocks(inputs.observation, n), numpy_inference.in_blocks(state, n)
            features, state = trunk(norm(observation) if norm else observation, inputs, state)
            rows = numpy_inference.in_blocks(noisy[:, None], n) if has_noise else noisy
            values = advantage(features, rows).reshape(n, *shape)
            if value:
                values = value(features, rows).reshape(n, 1, -1) + values - values.mean(-2, keepdims=True)
            return values, numpy_inference.in_rows(state, n)

        return forward
