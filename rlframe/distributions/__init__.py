"""Action distributions, chosen from the action space."""

from rlframe.distributions.base import Distribution
from rlframe.distributions.categorical import Bernoulli, Categorical, MultiCategorical
from rlframe.distributions.gaussian import DiagonalGaussian, TanhGaussian
from rlframe.distributions.joint import Joint, make_distribution

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
