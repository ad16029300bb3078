"""The interface of optimizers, and the field of an algorithm's Config that names one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import chz
from torch import Tensor, nn

from rlframe.core.parts import part

PACKAGE = "rlframe.optimizers"


class Optimizer(ABC):
    """Makes steps with parameters that have a gradient.

    Raises:
        ValueError: there are no parameters.
    """

    on_device = True  # a step may be launched on a GPU without waiting, and be part of a CUDA graph
    flushes = False  # a step on a CPU takes numbers below 1.2e-38 for zero

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        if not parameters:
            raise ValueError(f"{type(self).__name__} got no parameters; pass the parameters to train")
        self.parameters = list(parameters)

    @abstractmethod
    def step(self, rate: float | Tensor, skipped: Tensor | None = None) -> None:
        """Make one step with all parameters that have a gradient.

        Args:
            rate: a number, or for CUDA graphs float32 [] on the parameters' device.
            skipped: float32 [] on that device, 1.0 to change nothing.
        """

    def renew_views(self) -> None:  # noqa: B027
        """Optional: make views of its state again, whose memory is another now."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Its state; tensors are not copied."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, copied from any device.

        Raises:
            ValueError: it belongs to another optimizer or other parameters; nothing has changed.
        """

    def check_entries(self, state: Mapping[str, Any], needed: str) -> None:
        """Raise ValueError if a saved state is not of as many parameters, or lacks the entry `needed`."""
        n, n_saved = len(self.parameters), sum(len(group["params"]) for group in state["param_groups"])
        if n_saved != n:
            raise ValueError(
                f"the saved optimizer has {n_saved} parameters, this one {n}; load the state of the same model"
            )
        if needed not in state:
            raise ValueError(f"the saved optimizer is not {type(self).__name__}; load a state of the same optimizer")


@chz.chz
class OptimizerConfig:
    """Base class of the Configs of optimizers."""

    def make(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """The optimizer of these parameters."""
        raise NotImplementedError

    def make_without_decay(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """The same without weight decay."""
        own = chz.replace(self, weight_decay=0.0) if "weight_decay" in chz.chz_fields(self) else self
        return own.make(parameters)


def optimizer(default: str = "adam", epsilon: float = 1e-8) -> Any:
    """A field of an algorithm's Config for its optimizer: a name or a Config.

    Args:
        epsilon: that of this algorithm, where none is given.
    """

    def with_epsilon(config: Any, algorithm: Any) -> Any:
        return chz.replace(config, epsilon=epsilon) if math.isnan(getattr(config, "epsilon", 0.0)) else config

    return part(
        PACKAGE,
        default,
        "optimizer; or own with a class of torch's kind, module:Class",
        of=OptimizerConfig,
        finish=with_epsilon,
        classes="the class of a torch.optim.Optimizer",
    )
