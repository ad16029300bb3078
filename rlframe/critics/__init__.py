"""Critics: networks for the values of actions, the kinds of values, and targets."""

from rlframe.critics.base import Critic, Ensemble, make_critic
from rlframe.critics.values import CategoricalValue, ExpectedValue, ImplicitValue, QuantileValue, Value

__all__ = [
    "CategoricalValue",
    "Critic",
    "Ensemble",
    "ExpectedValue",
    "ImplicitValue",
    "QuantileValue",
    "Value",
    "make_critic",
]
