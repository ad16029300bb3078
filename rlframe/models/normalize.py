"""Running normalisation of observations: part of each model, saved and sent to workers with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.core.errors import warn_once
from rlframe.core.ranks import current_ranks
from rlframe.core.spaces import action_parts
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.kernels.transfer import to_device
from rlframe.models.encoders import is_image

EPSILON = 1e-8
CLIP = 10.0  # standard deviations, the limit of normalised values


class RunningNorm(nn.Module):
    """(x - mean) / std of one vector, clipped to ±`clip`, with the statistics of all batches given to `update`.

    Batches are merged exactly (Chan, Golub & LeVeque 1979) in float64, across ranks in the order of ranks.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float = CLIP) -> None:
        super().__init__()
        self.ndim, self.clip = len(shape), clip
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scaled = (x - self.mean.float()) * (self.variance + EPSILON).rsqrt().float()
        return scaled.clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Merge a batch [..., *shape] of any device, and the batches of the other ranks; it may be empty."""
        rows = to_device(x, self.mean.device).reshape(-1, *x.shape[x.dim() - self.ndim :]).double()
        mean = rows.mean(0)
        variance = rows.var(0, unbiased=False) if len(rows) else mean  # NaN, and so skipped
        moments = torch.stack([torch.full_like(mean, rows.shape[0]), mean, variance])
        for n, *of_rank in current_ranks().stack(moments):
            self.merge(n.reshape(-1)[0], *of_rank)

    def merge(self, n: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Merge the moments of `n` rows; skip a batch with NaN or Inf, which would stay in the statistics forever."""
        finite = (mean + variance).isfinite().all()
        total = self.count + n
        delta = mean - self.mean
        spread = self.variance * self.count + variance * n + delta**2 * self.count * n / total
        self.mean += torch.where(finite, delta * n / total, 0.0)
        self.variance.copy_(torch.where(finite, spread / total, self.variance))
        self.count.copy_(torch.where(finite, total, self.count))


def is_float_vector(space: Space) -> bool:
    """Whether a part of an observation is a vector of floats, not an image, counts or classes."""
    return isinstance(space, spaces.Box) and space.dtype.kind == "f" and not is_image(space)


class ObservationNorm(nn.Module):
    """Normalises some parts of an observation, by default float vectors; the others pass through unchanged."""

    def __init__(
        self,
        space: Space,
        clip: float = CLIP,
        normalizes: Callable[[Space], bool] = is_float_vector,
        unchanged: Sequence[str] = (),
    ) -> None:
        """`unchanged`: entries of a Dict that pass through and have no place in the state, whatever they are."""
        super().__init__()
        self.by_leaf: list[nn.Module] = []
        self.parts = nn.ModuleList()
        entries = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        for key, entry in entries.items():
            for _, sub in action_parts(entry):
                learns = normalizes(sub) and key not in unchanged
                part = RunningNorm(tuple(sub.shape or ()), clip) if learns else nn.Identity()
                self.by_leaf.append(part)
                if key not in unchanged:
                    self.parts.append(part)

    def forward(self, observation: Tree) -> Tree:
        parts = iter(self.by_leaf)
        return map_tree(lambda x: next(parts)(x), observation)

    def update(self, observation: Tree) -> None:
        """Merge a batch of observations [..., *obs] into the statistics."""
        for part, x in zip(self.by_leaf, leaves(observation), strict=True):
            if isinstance(part, RunningNorm):
                part.update(x)


def normalization_of(space: Space, normalizes: bool, unchanged: Sequence[str]) -> ObservationNorm | None:
    """What `model.normalize_observation` asks for, with a warning where no part of an observation is a float vector."""
    if not normalizes:
        return None
    norm = ObservationNorm(space, unchanged=unchanged)
    if not any(isinstance(part, RunningNorm) for part in norm.by_leaf):
        warn_once("model.normalize_observation=true does nothing: no part of an observation is a vector of floats")
    return norm
