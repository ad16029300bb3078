"""Action distributions, chosen from the action space."""

from gymnasium import Space, spaces

from rlframe.distributions.base import Distribution, Joint
from rlframe.distributions.categorical import Bernoulli, Categorical, MultiCategorical
from rlframe.distributions.gaussian import DiagonalGaussian, TanhGaussian

__all__ = [
    "Bernoulli",
    "Categorical",
    "DiagonalGaussian",
    "Distribution",
    "Joint",
    "MultiCategorical",
    "TanhGaussian",
    "make_distribution",
]


def make_distribution(space: Space, squash: bool = False) -> Distribution:
    """The distribution for an action space; for Box a Gaussian, or a tanh-Gaussian if `squash`.

    Raises:
        ValueError: the space is not supported, or `squash` with an unbounded Box.
    """
    match space:
        case spaces.Dict():
            return Joint({key: make_distribution(sub, squash) for key, sub in space.spaces.items()})
        case spaces.Tuple():
            return Joint(tuple(make_distribution(sub, squash) for sub in space.spaces))
        case spaces.Discrete():
            return Categorical(int(space.n))
        case spaces.MultiDiscrete() if space.nvec.ndim == 1:
            return MultiCategorical(tuple(int(n) for n in space.nvec))
        case spaces.MultiBinary():
            return Bernoulli(tuple(space.shape))
        case spaces.Box() if not squash:
            return DiagonalGaussian(tuple(space.shape))
        case spaces.Box() if space.is_bounded():
            return TanhGaussian(tuple(space.shape))
        case spaces.Box():
            raise ValueError(f"squash=true needs finite action bounds, got {space}; use squash=false")
    raise ValueError(
        f"action space {space} is not supported; use Discrete, MultiDiscrete, MultiBinary, Box, Dict, Tuple"
    )
