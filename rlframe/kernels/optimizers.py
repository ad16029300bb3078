"""Optimizers of all algorithms: torch's fused kernels, without the overhead of torch.optim.

torch.optim collects and checks its parameters at each step: 71 us instead of 30 for the twelve parameters of two 64x64
networks. It also loads torch's compiler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Optimizer(ABC):
    """Moments of every parameter, in fixed memory; `state_dict` has the format of torch.optim.

    Raises:
        ValueError: there are no parameters.
    """

    moments: ClassVar[tuple[str, ...]]  # as torch.optim names them

    def __init__(self, parameters: list[nn.Parameter], epsilon: float) -> None:
        if not parameters:
            raise ValueError(f"{type(self).__name__} got no parameters; pass the parameters to train")
        self.parameters, self.epsilon = parameters, epsilon
        self._moments = [[torch.zeros_like(parameter) for parameter in parameters] for _ in self.moments]
        self._n_steps = torch.zeros(len(parameters), device=parameters[0].device)
        self._steps = list(self._n_steps.unbind())

    @torch.no_grad()
    def advance(self, rate: float | Tensor, skipped: Tensor | None = None) -> None:
        """Make one step with all parameters that have a gradient.

        Args:
            rate: a number, or for CUDA graphs float32 [] on the parameters' device.
            skipped: float32 [] on that device, 1.0 to change nothing.
        """
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
        """State by index of parameter, as in torch.optim; the tensors are not copied."""
        states = [
            {"step": step, **dict(zip(self.moments, moments, strict=True))}
            for step, *moments in zip(self._steps, *self._moments, strict=True)
        ]
        return {"state": dict(enumerate(states)), "param_groups": [{"params": list(range(len(states)))}]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, copied from any device.

        Raises:
            ValueError: it belongs to another optimizer or other parameters; nothing has changed.
        """
        n, n_saved = len(self.parameters), sum(len(group["params"]) for group in state["param_groups"])
        if n_saved != n:
            raise ValueError(
                f"the saved optimizer has {n_saved} parameters, this one {n}; load the state of the same model"
            )
        pairs: list[tuple[Tensor, Tensor]] = []
        for i, *own in zip(range(n), self._steps, *self._moments, strict=True):
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
                f"the saved optimizer has no {missing[0]} of parameter {i}, only {', '.join(saved)}: it is not "
                f"{type(self).__name__}; load a state of the same optimizer"
            )
        values = [torch.as_tensor(saved[name]) for name in names]
        for name, value, x in zip(names, values, own, strict=True):
            if value.shape != x.shape:
                raise ValueError(
                    f"the saved optimizer's {name} of parameter {i} is {list(value.shape)}, not {list(x.shape)}; load "
                    f"a state of the same model"
                )
        return values


class Adam(Optimizer):
    """Kingma & Ba 2015 (arXiv 1412.6980), algorithm 1, with decays 0.9 and 0.999, as one kernel."""

    moments = ("exp_avg", "exp_avg_sq")

    def _move(self, *lists: list[Tensor], rate: float | Tensor, skipped: Tensor | None) -> None:
        parameters, gradients, steps, means, squares = lists
        torch._fused_adam_(
            parameters,
            gradients,
            means,
            squares,
            [],
            steps,
            lr=rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self.epsilon,
            amsgrad=False,
            maximize=False,
            found_inf=skipped,
        )


class RMSProp(Optimizer):
    """s <- α s + (1 - α) g²,  θ <- θ - rate g / (√s + ε),  α = 0.99 (Tieleman & Hinton 2012; Mnih et al. 2016)."""

    moments = ("square_avg",)

    def _move(self, *lists: list[Tensor], rate: float | Tensor, skipped: Tensor | None) -> None:
        parameters, gradients, _, squares = lists
        share: float | Tensor = 0.01
        if skipped is not None:
            gradients = [torch.where(skipped > 0, 0.0, gradient) for gradient in gradients]  # NaN times 0 is NaN
            share = share * (1 - skipped)
        torch._foreach_mul_(squares, 1 - share)
        torch._foreach_add_(squares, torch._foreach_mul(torch._foreach_mul(gradients, gradients), share))
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, self.epsilon)
        torch._foreach_sub_(parameters, torch._foreach_mul(torch._foreach_div(gradients, roots), rate))


MakeOptimizer = Callable[[list[nn.Parameter], float], Optimizer]  # (parameters, epsilon) to an optimizer
OPTIMIZERS: Mapping[str, MakeOptimizer] = {"adam": Adam, "rmsprop": RMSProp}
