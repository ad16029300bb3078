"""Running normalisation of observations, part of the model: saved, evaluated and shipped to workers with it."""

from __future__ import annotations

import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.core.struct import Tree

_EPSILON = 1e-8
_CLIP = 10.0  # normalised values beyond this many standard deviations are cut


class RunningNorm(nn.Module):
    """(x - mean) / std of one vector, over all that `update` has seen; the identity before.

    Batches are merged exactly (Chan, Golub & LeVeque 1979), in float64.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.ndim = len(shape)
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scaled = (x - self.mean.float()) * (self.variance + _EPSILON).rsqrt().float()
        return scaled.clamp(-_CLIP, _CLIP)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Merge a batch [..., *shape]."""
        rows = x.reshape(-1, *x.shape[x.dim() - self.ndim :]).double()
        n, mean, variance = rows.shape[0], rows.mean(0), rows.var(0, unbiased=False)
        total = self.count + n
        delta = mean - self.mean
        spread = self.variance * self.count + variance * n + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.variance.copy_(spread / total)
        self.count.copy_(total)


class ObservationNorm(nn.Module):
    """Normalises the float vectors inside an observation; images, counts and classes pass through."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.space = space
        self.parts = nn.ModuleDict()
        self._build(space, "observation")

    def _build(self, space: Space, path: str) -> None:
        for key, sub in children(space):
            self._build(sub, f"{path}/{key}")
        if is_float_vector(space):
            self.parts[path] = RunningNorm(tuple(space.shape or ()))

    def forward(self, observation: Tree) -> Tree:
        return self._walk(self.space, "observation", observation, update=False)

    def update(self, observation: Tree) -> None:
        """Merge a batch of observations [..., *obs] into the statistics."""
        self._walk(self.space, "observation", observation, update=True)

    def _walk(self, space: Space, path: str, observation: Tree, update: bool) -> Tree:
        match space:
            case spaces.Dict():
                return {k: self._walk(s, f"{path}/{k}", observation[k], update) for k, s in space.spaces.items()}
            case spaces.Tuple():
                parts = enumerate(zip(space.spaces, observation, strict=True))
                return tuple(self._walk(s, f"{path}/{i}", o, update) for i, (s, o) in parts)
        if path not in self.parts:
            return observation
        norm = self.parts[path]
        assert isinstance(norm, RunningNorm)
        if update:
            norm.update(observation)
            return observation
        return norm(observation)


def children(space: Space) -> list[tuple[str, Space]]:
    """The named parts of a Dict or Tuple space; of any other, none."""
    match space:
        case spaces.Dict():
            return list(space.spaces.items())
        case spaces.Tuple():
            return [(str(index), sub) for index, sub in enumerate(space.spaces)]
    return []


def is_float_vector(space: Space) -> bool:
    """A Box of floats that is not an image."""
    return isinstance(space, spaces.Box) and space.dtype.kind == "f" and len(space.shape) < 2
