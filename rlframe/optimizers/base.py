"""The interface of optimizers, and those whose state is a few moments of each parameter, without torch.optim.

torch.optim collects and checks its parameters at each step: 71 us instead of 30 for the twelve parameters of two 64x64
networks. It also loads torch's compiler.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import chz
import torch
from chz.mungers import Munger
from torch import Tensor, nn

from rlframe.core.config import decays, key_of, number
from rlframe.core.errors import ConfigError
from rlframe.core.parts import find_module, module_part

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
    def advance(self, rate: float | Tensor, skipped: Tensor | None = None) -> None:
        """Make one step with all parameters that have a gradient.

        Args:
            rate: a number, or for CUDA graphs float32 [] on the parameters' device.
            skipped: float32 [] on that device, 1.0 to change nothing.
        """

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


class Moments(Optimizer):
    """Base of optimizers with moments of each parameter in fixed memory; `state_dict` has the format of torch.optim."""

    def __init__(self, parameters: Sequence[nn.Parameter], moments: Sequence[str]) -> None:
        """`moments`: their names in torch.optim."""
        super().__init__(parameters)
        self.moments = tuple(moments)
        self._moments = [[torch.zeros_like(parameter) for parameter in parameters] for _ in self.moments]
        self._n_steps = torch.zeros(len(parameters), device=parameters[0].device)
        self._steps = list(self._n_steps.unbind())

    @torch.no_grad()
    def advance(self, rate: float | Tensor, skipped: Tensor | None = None) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        lists: list[list[Any]] = [self.parameters, gradients, self._steps, *self._moments]
        if any(gradient is None for gradient in gradients):
            lists = [[x for x, g in zip(each, gradients, strict=True) if g is not None] for each in lists]
            torch._foreach_add_(lists[2], 1.0 if skipped is None else 1 - skipped)
        else:
            self._n_steps += 1.0 if skipped is None else 1 - skipped
        self._move(*lists, rate=rate, skipped=skipped)

    @abstractmethod
    def _move(self, *lists: list[Tensor], rate: float | Tensor, skipped: Tensor | None) -> None:
        """Update parameters; `lists`: parameters, gradients, steps (this one included) and moments."""

    def state_dict(self) -> dict[str, Any]:
        states = [
            {"step": step, **dict(zip(self.moments, moments, strict=True))}
            for step, *moments in zip(self._steps, *self._moments, strict=True)
        ]
        groups = [{"params": list(range(len(states)))}]
        return {"state": dict(enumerate(states)), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_entries(state, "state")
        pairs: list[tuple[Tensor, Tensor]] = []
        for i, *own in zip(range(len(self.parameters)), self._steps, *self._moments, strict=True):
            saved = state["state"].get(i)  # torch.optim saves none before the first step
            values = [torch.zeros_like(x) for x in own] if saved is None else self._entry(saved, i, own)
            pairs += zip(own, values, strict=True)
        for x, value in pairs:
            x.copy_(value)

    def _entry(self, saved: Mapping[str, Any], i: int, own: list[Tensor]) -> list[Tensor]:
        """Saved step and moments of one parameter."""
        names = ("step", *self.moments)
        if missing := [name for name in names if name not in saved]:
            raise ValueError(
                f"the saved optimizer has no {missing[0]} of parameter {i}, only {', '.join(saved)}: it is not this "
                f"{type(self).__name__}; load a state of the same optimizer"
            )
        if more := [name for name, x in saved.items() if name not in names and x is not None]:
            raise ValueError(
                f"the saved optimizer has {more[0]} of parameter {i}: it is not this {type(self).__name__}; load a "
                f"state of the same optimizer"
            )
        values = [torch.as_tensor(saved[name]) for name in names]
        for name, value, x in zip(names, values, own, strict=True):
            if value.shape != x.shape:
                raise ValueError(
                    f"the saved optimizer's {name} of parameter {i} is {list(value.shape)}, not {list(x.shape)}; load "
                    f"a state of the same model"
                )
        return values


@chz.chz
class OptimizerConfig:
    """Base class of the Configs of optimizers."""

    def make(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """The optimizer of these parameters."""
        raise NotImplementedError


def epsilon() -> Any:
    """A field for the number beside a root in a denominator; each algorithm has a default of its own for it."""
    return number(math.nan, "added to the root of the mean square; nan: the algorithm's")


def betas() -> Any:
    """A field for the two decays of Adam's moments."""
    return decays((0.9, 0.999), "decays of the means of gradients and of their squares")


class _OptimizerOf(Munger):
    """Makes a part from its name, and gives it the algorithm's epsilon."""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def __call__(self, value: Any, *, chzself: Any = None, field: Any = None) -> Any:
        part: Any = named(value) if isinstance(value, str) else value
        if not isinstance(part, OptimizerConfig):
            raise ConfigError(
                f"{key_of(chzself, 'optimizer')}={value!r} must be a name such as adam or torch.optim:NAdam, or a "
                f"Config of rlframe.optimizers"
            )
        if math.isnan(getattr(part, "epsilon", 0.0)):
            return chz.replace(part, epsilon=self.epsilon)
        return part


def named(name: str) -> OptimizerConfig:
    """The Config of `adam`, or of another name, with its defaults; `module:Class` is a class of torch's kind.

    Raises:
        ConfigError: there is no such module.
    """
    if ":" in name:
        config: OptimizerConfig = find_module("own", PACKAGE).Config(name=name)
    else:
        config = find_module(name, PACKAGE).Config()
    return config


def optimizer(default: str = "adam", epsilon: float = 1e-8) -> Any:
    """A field of an algorithm's Config for its optimizer: a name or a Config.

    Args:
        epsilon: that of this algorithm, where none is given.
    """
    return chz.field(
        meta_factory=module_part(PACKAGE, default),
        default_factory=lambda: named(default),
        munger=_OptimizerOf(epsilon),
        doc="optimizer; or own with a class of torch's kind, module:Class",
    )
