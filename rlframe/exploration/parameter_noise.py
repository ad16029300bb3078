"""Parameter Space Noise for Exploration. Plappert, Houthooft, Dhariwal, Sidor, Chen et al., 2018. arXiv 1706.01905.

The acting policy has normal noise in the weights and biases of its linear layers, the same one for some time, and the
learned parameters stay clean. The scale of the noise adapts until the actions differ by a distance that is given in
action space. The paper has layer norm between perturbed layers, so that one scale suits them all, which here is
model.norm=layer; without it layers with larger inputs are moved more, and adaptation alone keeps actions in range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import chz
import numpy as np
import torch
from torch import Tensor, nn

from rlframe.core.config import count, number
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import in_state
from rlframe.core.ranks import current_ranks
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.seeding import Role, generator
from rlframe.core.struct import Tree, as_numpy, map_tree
from rlframe.core.types import AgentInputs, Array, Samples
from rlframe.exploration.base import Evaluated, ExploreConfig, ExploreState, NetworkNoise, last
from rlframe.kernels.matmul import linear
from rlframe.kernels.transfer import to_device
from rlframe.models.network import Layers, through
from rlframe.models.numpy_inference import affine, in_blocks, maps_of


class Perturbation(nn.Module):
    """Standard normal noise ξ for each parameter θ of some layers; a row of scale s is evaluated with θ + s ξ.

    It is kept apart from the parameters, so that these stay clean and may be learned while it lasts. Normalisation has
    no noise.
    """

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        parameters = [x for pair in layers.parameters for x in pair]
        for i, parameter in enumerate(parameters):
            self.register_buffer(f"noise_{i}", None if parameter is None else torch.zeros_like(parameter.detach()))

    def resample(self, rng: np.random.Generator) -> None:
        """Draw new ξ."""
        for noise in self.buffers():
            drawn = torch.from_numpy(rng.standard_normal(tuple(noise.shape), np.float32))
            noise.copy_(to_device(drawn, noise.device))

    def forward(self, layers: Layers, x: Tensor, scale: Tensor) -> Tensor:
        """Outputs [n, out] of the layers for rows x [n, in] with the scales [n, 1]; scale 0 is the clean network."""
        noises: list[Any] = list(self._buffers.values())  # None where a layer has no bias
        x = through(layers.begin, x)
        parts = zip(layers.parameters, noises[::2], noises[1::2], layers.ends, strict=True)
        for (weight, bias), of_weight, of_bias, end in parts:
            x = through(end, linear(x, weight, bias) + scale * linear(x, of_weight, of_bias))
        return x

    def numpy_forward(self, layers: Layers) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """`forward` in NumPy, for rows and scales in blocks, on views of all parameters."""
        noises: list[Any] = list(self._buffers.values())  # None where a layer has no bias
        begin = maps_of(layers.begin)
        parts = [
            (affine(*pair), affine(of_weight, of_bias), maps_of(end))
            for pair, of_weight, of_bias, end in zip(
                layers.parameters, noises[::2], noises[1::2], layers.ends, strict=True
            )
        ]

        def forward(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
            for each in begin:
                x = each(x)
            for clean, noise, end in parts:
                x = clean(x) + scale * noise(x)
                for each in end:
                    x = each(x)
            return x

        return forward


def adapted(scale: Tensor, distance: Tensor, target: float | Tensor, factor: float = 1.01) -> Tensor:
    """The scale of the noise for the next batch: larger while the distance it causes is at most the target.

    (section 3, adaptive noise scaling: α = 1.01)
    """
    return torch.where(distance <= target, scale * factor, scale / factor)


_LEAST = 1e-6  # levels far below it count as none
_LEAST_SIGMA, _MOST_SIGMA = 1e-6, 100.0  # where no deviation gives the distance


@chz.chz
class ParameterNoiseConfig(ExploreConfig):
    """For DDPG and TD3."""

    IN_STATE = in_state("sigma", "std_last")

    std: Scheduled = scheduled(
        math.nan,
        "distance of perturbed from clean actions in [-1, 1], a root mean square; nan: the algorithm's",
        high=2,
    )
    std_last: Scheduled = last("distance", high=2)
    interval: int = count(200, "time steps that a perturbation lasts, rounded up to whole batches")
    sigma: float = number(
        0.05, "standard deviation of the noise in each parameter, at first", low=_LEAST_SIGMA, high=_MOST_SIGMA
    )
    adaptation: float = number(1.01, "factor of its change after each batch; 1: it never changes", low=1.0, high=10.0)

    def make_for(self, model: Any, size: int, seed: int) -> ParameterNoise:
        if model.mlp.size != size:
            raise ConfigError("algo.explore=parameter_noise is for deterministic policies of Box actions: ddpg, td3")
        return ParameterNoise(model, size, self, seed)

    def levels(self) -> tuple[Scheduled, Scheduled]:
        return self.std, self.std_last


class ParameterNoise(NetworkNoise):
    """One perturbation for all environments; a ladder scales it by their levels, the highest to the whole.

    It is drawn from the seed and its number, so that all ranks have the same one, and a resumed run too.
    """

    scale = "std"
    sigma: Tensor

    def __init__(self, model: Any, size: int, config: ParameterNoiseConfig, seed: int) -> None:
        """`model`: the network of the policy."""
        super().__init__(size, config.graded)
        self.config, self.seed = config, seed
        self.perturbation = Perturbation(model.mlp.layers)
        self.register_buffer("sigma", torch.tensor(float(config.sigma)))
        self._draw(0)

    def _draw(self, number: int) -> None:
        self.perturbation.resample(generator(self.seed, Role.PERTURBATION, number))

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> np.ndarray:
        return np.ones(lead, np.float32)

    def scales(self, noise: Array, state: ExploreState, level: Array, sigma: Array, xp: Any) -> Array:
        """The deviation of the parameters' noise in each row [B, 1]; `noise`: 0 for none."""
        share = self.level_of(level, state, xp) / level[:2].max().clip(_LEAST, None)
        return (noise * (sigma * share))[:, None]

    def network(self, model: Any, n: int = 0) -> Any:
        """σ, and the parameters [n, P] as a function of observations and scales [n, 1]."""
        if not n:
            return self.sigma, partial(self._perturbed, model)
        features, body = model.numpy_features(n), self.perturbation.numpy_forward(model.mlp.layers)
        if features is None:
            return None
        return as_numpy(self.sigma), lambda x, scales: body(features(x), in_blocks(scales, n)).reshape(n, -1)

    def evaluate(
        self, network: Any, inputs: AgentInputs, sampled: Tree, noise: Tree, state: ExploreState, level: Array, xp: Any
    ) -> Evaluated:
        sigma, perturbed = network
        return perturbed(inputs.observation, self.scales(noise, state, level, sigma, xp)), (), state

    def _perturbed(self, model: Any, observation: Tree, scales: Tensor) -> Tensor:
        """The parameters [n, P] of rows whose linear layers are perturbed by the scales [n, 1]."""
        return self.perturbation(model.mlp.layers, model.features(observation), scales)

    def counters(self) -> dict[str, float]:
        return {"algo/parameter_noise": float(self.sigma)}

    @torch.no_grad()
    def follow(self, model: Any, samples: Samples, before: int, after: int) -> None:
        observation, acted = map_tree(
            lambda x: to_device(x, self.level.device).flatten(0, 1), (samples.observation, samples.valid)
        )
        moved = self._perturbed(model, observation, self.sigma).tanh() - model(observation).tanh()
        squares = torch.where(acted, moved.square().mean(-1), 0.0)
        found = torch.stack([squares.sum(), acted.sum()])
        total, n = current_ranks().sum_tensor(found).unbind()
        sigma = adapted(self.sigma, (total / n).sqrt(), self.level[:2].max(), self.config.adaptation)
        self.sigma.copy_(sigma.clamp(_LEAST_SIGMA, _MOST_SIGMA))
        if before // self.config.interval != after // self.config.interval:
            self._draw(after // self.config.interval)
