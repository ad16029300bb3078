"""Action distributions, chosen from the action space, those of Box actions also by name."""

from collections.abc import Callable

import torch
from gymnasium import Space, spaces
from torch import Tensor

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.core.names import made_by
from rlframe.core.spaces import action_parts, box_scaling
from rlframe.core.struct import Tree, map_tree
from rlframe.distributions.base import Distribution, Joint
from rlframe.distributions.beta import Beta
from rlframe.distributions.categorical import Bernoulli, Categorical, MultiCategorical
from rlframe.distributions.gaussian import DiagonalGaussian, TanhGaussian

__all__ = [
    "Bernoulli",
    "Beta",
    "Categorical",
    "DiagonalGaussian",
    "Distribution",
    "Joint",
    "MultiCategorical",
    "TanhGaussian",
    "executed",
    "make_distribution",
]


_BOUNDED = ("squashed_gaussian", "beta")
OF_BOXES: dict[str, Callable[[tuple[int, ...]], Distribution]] = {
    "gaussian": DiagonalGaussian,
    "squashed_gaussian": TanhGaussian,
    "beta": Beta,
}


def make_distribution(space: Space, of_boxes: str = "auto") -> Distribution:
    """The distribution for an action space; for Box actions that of this name, by default (auto) a Gaussian.

    A user's own is `package.module:Class` or `./file.py:Class`, a Distribution that is made with the shape of a Box.

    Raises:
        ValueError: the space is not supported.
        ConfigError: there is no such distribution, or it needs a bounded Box.
    """
    match space:
        case spaces.Dict():
            return Joint({key: make_distribution(sub, of_boxes) for key, sub in space.spaces.items()})
        case spaces.Tuple():
            return Joint(tuple(make_distribution(sub, of_boxes) for sub in space.spaces))
        case spaces.Discrete():
            return Categorical(int(space.n))
        case spaces.MultiDiscrete() if space.nvec.ndim == 1:
            return MultiCategorical(tuple(int(n) for n in space.nvec))
        case spaces.MultiBinary():
            return Bernoulli(tuple(space.shape))
        case spaces.Box():
            return _of_box(space, "gaussian" if of_boxes == "auto" else of_boxes)
    raise ValueError(
        f"action space {space} is not supported; use Discrete, MultiDiscrete of one axis, MultiBinary, Box, Dict, Tuple"
    )


def _of_box(space: spaces.Box, name: str) -> Distribution:
    shape = tuple(space.shape)
    if name in _BOUNDED and not space.is_bounded():
        raise ConfigError(f"model.distribution={name} needs finite action bounds, got {space}; use gaussian")
    if name in OF_BOXES:
        return OF_BOXES[name](shape)
    if ":" not in name:
        known = ("auto", *OF_BOXES)
        raise ConfigError(
            f"model.distribution={name!r} is not one of {', '.join(known)}, module:Class{nearest(name, known)}"
        )
    return made_by(name, "model.distribution", Distribution, "rlframe.distributions.Distribution", shape)


def executed(action_space: Space, action: Tree) -> Tree:
    """Canonical actions as environments execute them: clipped to [-1, 1] where a Box has two bounds, or to its one."""
    parts = iter(action_parts(action_space))

    def clipped(x: Tensor) -> Tensor:
        _, space = next(parts)
        if not isinstance(space, spaces.Box):
            return x
        if space.is_bounded():
            return x.clamp(-1, 1)
        low, high = (torch.as_tensor(bound, device=x.device) for bound in box_scaling(space)[2:])
        return x.clamp(low, high)

    return map_tree(clipped, action)
