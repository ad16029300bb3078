"""An optimizer of your own: any class of torch's kind, such as torch.optim:NAdam or ./mine.py:Lion."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import chz
import torch
from torch import Tensor, nn

from rlframe.core.config import option
from rlframe.core.errors import ConfigError, naming, shortened
from rlframe.core.names import find_class
from rlframe.kernels.device import is_recording
from rlframe.optimizers.base import Optimizer, OptimizerConfig

_REFUSED = {  # arguments of torch's optimizers, and why they have no place here
    "params": "the parameters are those of the networks; remove it",
    "lr": "the learning rate is set at each step; use algo.learning_rate",
    "maximize": "losses are minimized; remove it",
    "capturable": "steps of an optimizer of your own are not part of CUDA graphs; remove it",
    "differentiable": "no gradient passes through a step; remove it",
}


@chz.chz
class OwnConfig(OptimizerConfig):
    """Written algo.optimizer=module:Class for short. The learning rate is set at each step, in every group."""

    name: str = option("", "module:Class or ./file.py:Class, a subclass of torch.optim.Optimizer")
    kwargs: Mapping[str, Any] = chz.field(default_factory=dict, doc="of the class: algo.optimizer.kwargs.name=value")

    @chz.validate
    def _check(self) -> None:
        for argument, value in self.kwargs.items():
            reason = "it is not a number" if value != value else _REFUSED.get(argument, "")
            if reason and value is not False:
                raise ConfigError(f"algo.optimizer.kwargs.{argument}={value!s:.60}: {reason}")
        if self.name:
            self.load()

    def load(self) -> type[torch.optim.Optimizer]:
        """The class.

        Raises:
            ConfigError: there is none of this name, or it is no optimizer that can be used here.
        """
        key, cls = f"algo.optimizer={self.name}", find_class(self.name, "algo.optimizer")
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise ConfigError(f"{key} is no subclass of torch.optim.Optimizer; give the class, which the run calls")
        if cls is torch.optim.SparseAdam:
            raise ConfigError(f"{key} is for sparse gradients, which no network here has; use adam")
        closure = inspect.signature(cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(f"{key} computes the loss several times a step (a closure), which no algorithm here does")
        return cls

    def make(self, parameters: Sequence[nn.Parameter]) -> OwnOptimizer:
        return OwnOptimizer(parameters, self)

    def make_without_decay(self, parameters: Sequence[nn.Parameter]) -> OwnOptimizer:
        return OwnOptimizer(parameters, self, decays=False)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group of parameters: arguments, and what some optimizers count."""
    return {name: x for name, x in group.items() if type(x) in (bool, int, float)}


def _try(cls: type[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], kwargs: Mapping[str, Any]) -> None:
    """Make a step with a copy of the smallest parameter: torch looks at some arguments only then."""
    copy = min(parameters, key=lambda parameter: parameter.numel()).detach().clone().requires_grad_()
    copy.grad = torch.ones_like(copy)
    cls([copy], **kwargs).step()


_keys = itertools.count()
_known: WeakValueDictionary[int, OwnOptimizer] = WeakValueDictionary()


@cache
def _outside() -> Callable[..., None]:
    """The operation of a graph that makes a step of an OwnOptimizer, named by its key."""

    @torch.library.custom_op("rlframe::own_step", mutates_args=("parameters",))
    def own_step(
        parameters: list[Tensor], gradients: list[Tensor], which: list[int], rate: Tensor, skipped: Tensor, key: int
    ) -> None:
        if not skipped.item():
            _known[key].step_outside(parameters, gradients, which, rate.item())

    return own_step


class OwnOptimizer(Optimizer):
    """Wraps an optimizer of torch's kind; its state and the numbers of its groups are saved.

    On a GPU each step waits for the loss, and updates are not part of CUDA graphs.
    """

    on_device = False

    def __init__(self, parameters: Sequence[nn.Parameter], config: OwnConfig, decays: bool = True) -> None:
        """`decays`: as its arguments say; else its groups have a `weight_decay` of 0."""
        super().__init__(parameters)
        self.name, cls = config.name, config.load()
        self._key = next(_keys)
        _known[self._key] = self
        arguments: dict[str, Any] = {"lr": 1e-3, **config.kwargs}
        with naming(f"algo.optimizer={self.name} cannot be made"):
            try:
                self.optimizer = cls(self.parameters, **arguments)
                if cls.__module__.startswith("torch."):
                    _try(cls, self.parameters, arguments)
            except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
                hint = "its arguments are algo.optimizer.kwargs.name=value"
                raise ConfigError(
                    f"algo.optimizer={self.name}: {shortened(' '.join(str(error).split()))}; {hint}"
                ) from None

        for group in self.optimizer.param_groups:
            if not decays and "weight_decay" in group:
                group["weight_decay"] = 0.0
        self._made = [_numbers(group) for group in self.optimizer.param_groups]

    def step(self, rate: float | Tensor, skipped: Tensor | None = None) -> None:
        if not is_recording():
            self._step(rate)
            return
        which = [i for i, parameter in enumerate(self.parameters) if parameter.grad is not None]
        learned = [self.parameters[i] for i in which]
        gradients = [parameter.grad for parameter in learned]
        skips = torch.zeros(()) if skipped is None else skipped
        _outside()(learned, gradients, which, torch.as_tensor(rate), skips, self._key)

    def step_outside(self, moved: list[Tensor], gradients: list[Tensor], which: list[int], rate: float) -> None:
        """Make a step that is one call in a graph.

        `moved` are the parameters of these numbers, or copies of them, which become what the parameters become.
        """
        learned = [self.parameters[i] for i in which]
        copies = [(x, y.detach()) for x, y in zip(moved, learned, strict=True) if x.data_ptr() != y.data_ptr()]
        for x, y in copies:
            y.copy_(x)
        for parameter, gradient in zip(learned, gradients, strict=True):
            parameter.grad = gradient
        self._step(rate)
        for parameter in learned:
            parameter.grad = None
        for x, y in copies:
            x.copy_(y)

    def _step(self, rate: float | Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with naming(f"algo.optimizer={self.name} failed in step"):
            self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        with naming(f"algo.optimizer={self.name} failed in state_dict"):
            state = self.optimizer.state_dict()
        groups = [{**_numbers(group), "params": group["params"]} for group in state["param_groups"]]
        return {"name": self.name, "state": state["state"], "param_groups": groups, "made": self._made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_entries(state, "name")
        if state["name"] != self.name:
            raise ValueError(f"the saved optimizer is {state['name']}, not {self.name}; load a state of the same one")
        own = self.optimizer.state_dict()["param_groups"]
        # What has not changed since it was made was an argument, and those are of this run's config.
        groups = [
            {**mine, **{name: x for name, x in its.items() if name not in made or x != made[name]}}
            for mine, its, made in zip(own, state["param_groups"], state["made"], strict=True)
        ]
        self.optimizer.load_state_dict({"state": dict(state["state"]), "param_groups": groups})
