"""Q-networks of the DQN family, for agents.q: a trunk with a plain, dueling or noisy head; fractions of quantiles."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import chz
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from rlframe.core.errors import ConfigError, naming
from rlframe.core.spaces import PRIVILEGED, zeros
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs
from rlframe.kernels.matmul import linear
from rlframe.kernels.transfer import to_device
from rlframe.models import numpy_inference
from rlframe.models.actor_critic import Trunk
from rlframe.models.base import Model, ModelConfig, with_modes
from rlframe.models.encoders import activation_after, convolves, with_leading
from rlframe.models.network import ACTIVATIONS, Network, Norm
from rlframe.models.normalize import normalization_of
from rlframe.models.views import ActionOutputs, View, mask_entries, special_entries

MakeQNetwork = Callable[[spaces.Space, spaces.Discrete, int, ModelConfig], nn.Module]  # spaces, n_atoms, the config
NumpyQ = Callable[[AgentInputs, Tree, np.ndarray], tuple[np.ndarray, Tree]]
_SIGMA = 0.5  # sigma_0 of Fortunato et al. 2018, section 3.2


class QModel(Model):
    """Maps agent inputs to `n_atoms` numbers for each action (see critics.values)."""

    @abstractmethod
    def forward(
        self, inputs: AgentInputs, state: Tree, noisy: Tensor | float = 1.0, *tau: Tensor
    ) -> tuple[Tensor, Tree]:
        """Values [..., A, n_atoms] and the next state, for inputs [B, ...] or [T, B, ...].

        Args:
            noisy: [..., 1] or a number: scale of the noise of noisy layers in each row, 0 for none.
            tau: fractions [..., n_atoms] of the quantiles that an implicit network is asked for, or none.
        """

    def resample(self, generator: torch.Generator) -> None:
        """Draw new noise for noisy layers, if there are any."""

    def made_with(self) -> dict[str, Any]:
        """The settings of an algorithm's Config that decided its layers, by name."""
        return {}


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


class NoisyLayers(nn.Module):
    """The layers from features to values or advantages, all noisy."""

    def __init__(self, sizes: Sequence[int], norm: str, activation: str) -> None:
        super().__init__()
        self.activation = activation  # between them
        self.linears = nn.ModuleList(NoisyLinear(*pair) for pair in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(Norm(norm, size, 0) for size in sizes[1:-1] if norm != "none")

    def forward(self, x: Tensor, noisy: Tensor | float) -> Tensor:
        for index, layer in enumerate(self.linears):
            x = self.norms[index - 1](x) if index and self.norms else x
            x = layer(ACTIVATIONS[self.activation](x) if index else x, noisy)
        return x

    def numpy_forward(self) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """`forward` in NumPy, for blocks of rows."""
        layers = [_noisy_on_numpy(layer) for layer in self.linears]
        between = numpy_inference.ACTIVATIONS[self.activation]
        norms = [numpy_inference.normalization(norm) for norm in self.norms]

        def forward(x: np.ndarray, noisy: np.ndarray) -> np.ndarray:
            for index, layer in enumerate(layers):
                x = norms[index - 1](x) if index and norms else x
                x = layer(between(x) if index else x, noisy)
            return x

        return forward


def _noisy_on_numpy(layer: Any) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    mean = numpy_inference.affine(layer.weight, layer.bias)
    sigma = numpy_inference.affine(layer.weight_sigma, layer.bias_sigma)
    noise_in, noise_out = as_numpy(layer.noise_in), as_numpy(layer.noise_out)
    return lambda x, noisy: mean(x) + noisy * (sigma(x * noise_in) * noise_out)


class Stream(nn.Module):
    """What maps features to the values or advantages: linear layers, noisy or not."""

    def __init__(self, sizes: Sequence[int], noisy: bool, norm: str, activation: str) -> None:
        super().__init__()
        self.network = (
            NoisyLayers(sizes, norm, activation) if noisy else Network(sizes, activation, norm=norm, gain=1.0)
        )

    def forward(self, x: Tensor, noisy: Tensor | float) -> Tensor:
        return self.network(x) if isinstance(self.network, Network) else self.network(x, noisy)

    def numpy_forward(self) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """`forward` in NumPy, for blocks of rows."""
        if isinstance(self.network, NoisyLayers):
            return self.network.numpy_forward()
        forward = numpy_inference.mlp(self.network.layers)
        return lambda x, noisy: forward(x)


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
        n_cosines: int = 0,
    ) -> None:
        """`n_cosines`: 0, or the network is implicit: values are quantiles at `n_atoms` fractions."""
        super().__init__()
        config.check_no_critic("a Q-network is the one that acts")
        special = special_entries(observation_space, action_space, config)
        if dueling and config.action_embedding:
            raise ConfigError("algo.dueling=true has a mean over fixed actions; with model.action_embedding use false")
        view = View(observation_space, *special, PRIVILEGED)
        self.observation_norm = normalization_of(observation_space, config.normalize_observation, special)
        images = convolves(view.space, config)
        name = "image_hidden" if images else "hidden"
        widths: tuple[int, ...] = getattr(config, name)
        hidden = widths[-1:] if dueling or noisy or n_cosines else ()
        if hidden and config.memory == "none":
            config = chz.replace(config, **{name: widths[:-1]})
        self.trunk = Trunk(view, action_space, config)
        self.uses_previous = config.feed_back or config.memory != "none"
        self.n_outputs, self.n_atoms = config.action_embedding or int(action_space.n), n_atoms
        self.fractions = Fractions(self.trunk.size, n_cosines, n_atoms) if n_cosines else None
        sizes, self.n_in_head = [self.trunk.size, *hidden], 1 if n_cosines else n_atoms
        layers = noisy, config.norm, activation_after(images, config)
        self.advantage = Stream([*sizes, self.n_outputs * self.n_in_head], *layers)
        self.value = Stream([*sizes, self.n_in_head], *layers) if dueling else None
        self.outputs = ActionOutputs(observation_space, action_space, config)
        self.noisy_layers = [module for module in self.modules() if isinstance(module, NoisyLinear)]

    def made_with(self) -> dict[str, Any]:
        return {"dueling": self.value is not None}

    def initial_state(self, n: int) -> Tree:
        return self.trunk.initial_state(n)

    def forward(
        self, inputs: AgentInputs, state: Tree, noisy: Tensor | float = 1.0, *tau: Tensor
    ) -> tuple[Tensor, Tree]:
        values, _, state = self.with_features(inputs, state, noisy, *tau)
        return values, state

    def with_features(
        self, inputs: AgentInputs, state: Tree, noisy: Tensor | float = 1.0, *tau: Tensor
    ) -> tuple[Tensor, Tensor, Tree]:
        """As `forward`, with the trunk's features [..., F] in second place."""
        features, state = self.trunk(self.normalized(inputs.observation), inputs, state)
        x = features
        if self.fractions:
            x = self.fractions(features, *tau)  # [..., n_atoms, F]
            noisy = noisy.unsqueeze(-1) if isinstance(noisy, Tensor) else noisy
        values = self.advantage(x, noisy)
        values = values.view(*values.shape[:-1], self.n_outputs, self.n_in_head)
        if self.value:  # V(s) + A(s, a) - mean A(s, ·)   (Wang et al. 2016, eq. 9)
            values = self.value(x, noisy).unsqueeze(-2) + values - values.mean(-2, keepdim=True)
        if self.fractions:
            values = values.squeeze(-1).mT
        return self.outputs.values(values, inputs.observation), features, state

    def resample(self, generator: torch.Generator) -> None:
        for layer in self.noisy_layers:
            layer.resample(generator)

    def numpy_forward(self, n: int) -> NumpyQ | None:
        trunk = self.trunk.numpy_forward(n)
        if trunk is None:
            return None
        norm = numpy_inference.normalizer(self.observation_norm) if self.observation_norm else None
        advantage = self.advantage.numpy_forward()
        value = self.value.numpy_forward() if self.value else None
        fractions = self.fractions.numpy_forward() if self.fractions else None
        rows_of = (self.n_atoms,) if fractions else ()  # of the head, for each of the n
        n_in_head, has_noise, of_actions = self.n_in_head, bool(self.noisy_layers), self.outputs.numpy_values()

        def forward(inputs: AgentInputs, state: Tree, noisy: np.ndarray) -> tuple[np.ndarray, Tree]:
            observation, state = numpy_inference.in_blocks(inputs.observation, n), numpy_inference.in_blocks(state, n)
            features, state = trunk(norm(observation) if norm else observation, inputs, state)
            rows = numpy_inference.in_blocks(noisy[:, None], n) if has_noise else noisy
            if fractions:
                features, rows = fractions(features), rows[..., None]
            values = advantage(features, rows).reshape(n, *rows_of, -1, n_in_head)
            if value:
                values = value(features, rows).reshape(n, *rows_of, 1, -1) + values - values.mean(-2, keepdims=True)
            if fractions:
                values = values[..., 0].swapaxes(-1, -2)
            return of_actions(values, inputs.observation), numpy_inference.in_rows(state, n)

        return forward


class OwnQNetwork(QModel):
    """A user's network, from normalised observations [n, *obs] to values [n, A, n_atoms], or [n, A] of one atom."""

    def __init__(
        self,
        make: MakeQNetwork,
        observation_space: spaces.Space,
        action_space: spaces.Discrete,
        n_atoms: int,
        config: ModelConfig,
    ) -> None:
        """Raises ConfigError if what `make` gives is no such network."""
        super().__init__()
        masks = mask_entries(observation_space, action_space)
        self.observation_norm = normalization_of(observation_space, config.normalize_observation, masks)
        self.view = View(observation_space, *masks)
        with naming("make_q_network failed"):
            network = make(self.view.space, action_space, n_atoms, config)
        if not isinstance(network, nn.Module):
            raise ConfigError(f"make_q_network gives {network!r:.60}; return a torch.nn.Module")
        self.network, self.shape = with_modes(network), (int(action_space.n), n_atoms)
        self.ndim = leaves(zeros(self.view.space))[0].ndim
        with torch.no_grad(), naming(f"{type(network).__name__} of make_q_network failed in forward"):
            self._values(map_tree(torch.from_numpy, zeros(self.view.space, (2,))))

    def forward(
        self, inputs: AgentInputs, state: Tree, noisy: Tensor | float = 1.0, *tau: Tensor
    ) -> tuple[Tensor, Tree]:
        seen = self.view(self.normalized(inputs.observation))
        return with_leading(self._values, seen, self.ndim), state

    def _values(self, observation: Tree) -> Tensor:
        """Values [n, A, n_atoms]."""
        found: Tensor = self.network(observation)
        wanted = (leaves(observation)[0].shape[0], *self.shape)  # len() would fix it in exports
        found = found.unsqueeze(-1) if (*found.shape, 1) == wanted else found
        if found.shape != wanted:
            n, A, n_atoms = wanted
            raise ConfigError(
                f"make_q_network: {type(self.network).__name__} gives {list(found.shape)} for {n} observations; it "
                f"must be {list(wanted) if n_atoms > 1 else [n, A]}, of {A} actions and n_atoms={n_atoms}"
            )
        return found


class Fractions(nn.Module):
    """Features ψ(s) ⊙ φ(τ), φ_j(τ) = relu(Σ_i w_ij cos(π i τ) + b_j), i = 0 ... n_cosines - 1.

    (Dabney, Ostrovski, Silver & Munos 2018, Implicit quantile networks, arXiv 1806.06923, section 3.1)
    """

    frequencies: Tensor
    midpoints: Tensor

    def __init__(self, n_features: int, n_cosines: int, n_midpoints: int) -> None:
        """`n_midpoints`: fractions where none are given, in the middle of equal parts of [0, 1]."""
        super().__init__()
        self.embed = nn.Linear(n_cosines, n_features)
        self.register_buffer("frequencies", math.pi * torch.arange(n_cosines), persistent=False)
        self.register_buffer("midpoints", (torch.arange(n_midpoints) + 0.5) / n_midpoints, persistent=False)

    def forward(self, features: Tensor, *tau: Tensor) -> Tensor:
        """Features [..., N, F] of features [..., F], at the fractions tau [..., N] or at the midpoints."""
        fractions = tau[0] if tau else self.midpoints
        cosines = torch.cos(fractions.unsqueeze(-1) * self.frequencies)
        return features.unsqueeze(-2) * F.relu(linear(cosines, self.embed.weight, self.embed.bias))

    def numpy_forward(self) -> Callable[[np.ndarray], np.ndarray]:
        """`forward` in NumPy, at the midpoints."""
        embed = numpy_inference.affine(self.embed.weight, self.embed.bias)
        cosines = as_numpy(torch.cos(self.midpoints.unsqueeze(-1) * self.frequencies))
        return lambda features: features[..., None, :] * np.maximum(embed(cosines), 0)
