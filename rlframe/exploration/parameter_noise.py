"""Parameter Space Noise for Exploration. Plappert, Houthooft, Dhariwal, Sidor, Chen et al., 2018. arXiv 1706.01905.

The acting policy has normal noise in the weights and biases of its linear layers, the same one for some time, and the
learned parameters stay clean. The scale of the noise adapts until the actions differ by a distance that is given in
action space. The paper has layer norm between perturbed layers, so that one scale suits them all, which here is
model.norm=layer; without it layers with larger inputs are moved more, and adaptation alone keeps actions in range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import chz
import numpy as np
import torch
from torch import Tensor

from rlframe.core.config import count, number
from rlframe.core.errors import ConfigError
from rlframe.core.ranks import current_ranks
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.seeding import Role, generator
from rlframe.core.struct import Tree, as_numpy, map_tree
from rlframe.core.types import AgentInputs, Array
from rlframe.exploration.base import Evaluated, ExploreConfig, ExploreState, NetworkNoise, last
from rlframe.kernels.device import to_device
from rlframe.models.perturbed import Perturbation, adapted

_LEAST = 1e-6  # levels far below it count as none
_LEAST_SIGMA, _MOST_SIGMA = 1e-6, 100.0  # where no deviation gives the distance


@chz.chz
class ParameterNoiseConfig(ExploreConfig):
    """For DDPG and TD3."""

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
        self.register_buffer("sigma", torch.tensor(config.sigma))
        self._draw(0)

    def _draw(self, number: int) -> None:
        self.perturbation.resample(generator(self.seed, Role.PERTURBATION, number))

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> np.ndarray:
        return np.ones(lead, np.float32)

    def scales(self, noise: Array, state: ExploreState, level: Array, sigma: Array, xp: Any) -> Array:
        """The deviation of the parameters' noise in each row [B, 1]; `noise`: 0 for none."""
        share = self.level_of(level, state, xp) / level[:2].max().clip(_LEAST, None)
        return (noise * (sigma * share))[:, None]

    def evaluate(self, model: Any, inputs: AgentInputs, noise: Tree, state: ExploreState) -> Evaluated:
        scales = self.scales(noise, state, self.level, self.sigma, torch)
        return model.perturbed(inputs.observation, self.perturbation, scales), (), state

    def numpy_evaluate(self, model: Any, n: int) -> Callable[[AgentInputs, Tree, ExploreState], Evaluated] | None:
        forward, (level, sigma) = model.numpy_perturbed(n, self.perturbation), map(as_numpy, (self.level, self.sigma))
        if forward is None:
            return None

        def evaluate(inputs: AgentInputs, noise: Tree, state: ExploreState) -> Evaluated:
            return forward(inputs.observation, self.scales(noise, state, level, sigma, np)), (), state

        return evaluate

    def counters(self) -> dict[str, float]:
        return {"algo/parameter_noise": float(self.sigma)}

    @torch.no_grad()
    def follow(self, model: Any, observation: Tree, before: int, after: int) -> None:
        rows = map_tree(lambda x: to_device(x, self.level.device).flatten(0, 1), observation)
        moved = model.perturbed(rows, self.perturbation, self.sigma).tanh() - model(rows).tanh()
        found = torch.stack([moved.square().sum(), torch.full_like(self.sigma, moved.numel())])
        total, n = current_ranks().sum_tensor(found).unbind()
        sigma = adapted(self.sigma, (total / n).sqrt(), self.level[:2].max(), self.config.adaptation)
        self.sigma.copy_(sigma.clamp(_LEAST_SIGMA, _MOST_SIGMA))
        if before // self.config.interval != after // self.config.interval:
            self._draw(after // self.config.interval)
