"""Optimizers: torch's own, with a step that takes less time on a CPU, and one that nobody waits for on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def make_optimizer(name: str, parameters: list[nn.Parameter], learning_rate: float, epsilon: float) -> Adam | RMSProp:
    """Adam, or RMSProp with the decay of Mnih et al. 2016.

    Raises:
        ValueError: neither is asked for.
    """
    if name == "adam":
        return Adam(parameters, learning_rate, eps=epsilon, fused=True)
    if name == "rmsprop":
        return RMSProp(parameters, learning_rate, alpha=0.99, eps=epsilon)
    raise ValueError(f"optimizer={name!r} is unknown; use adam or rmsprop")


class Adam(torch.optim.Adam):
    """Torch's own, fused (Kingma & Ba 2015), with a step that does not gather and check what stays the same.

    On a CPU that takes longer than the step itself: 71 us instead of 30 for the twelve parameters of two networks of
    64x64. A CUDA graph may hold the step from the third on: `capturable`, of which torch warns outside of graphs, is
    about torch's own `step`. So saved states are the same on every device.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._moments: list[list[Tensor]] = []  # means, squares and steps of all parameters; empty: not gathered
        self._steps = torch.zeros(0)  # those steps, which are parts of it

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._moments = []
        super().load_state_dict(state_dict)

    def advance(self, rate: Tensor | None = None, refused: Tensor | None = None) -> None:
        """As torch's `step`, whose hooks take their time too, where autograd is off.

        All parameters that ever had a gradient have one again.

        Args:
            rate: float32 [] on the parameters' device, in the place of the group's, of which it is a copy.
            refused: float32 [] there, 1.0 where nothing is to be changed.
        """
        group = self.param_groups[0]
        gradients = [parameter.grad for parameter in group["params"]]
        if not self._gathered(group["params"], gradients):
            self.found_inf = refused  # which torch looks for
            self.step()
            return
        means, squares, steps = self._moments
        self._steps += 1
        torch._fused_adam_(
            group["params"],
            gradients,
            means,
            squares,
            [],
            steps,
            lr=group["lr"] if rate is None else rate,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=refused,
        )
        if refused is not None:
            self._steps -= refused

    def _gathered(self, parameters: list[Tensor], gradients: list[Tensor | None]) -> bool:
        if any(gradient is None for gradient in gradients):
            return False
        if not self._moments and all(parameter in self.state for parameter in parameters):
            states = [self.state[parameter] for parameter in parameters]
            self._steps = torch.stack([state["step"] for state in states])
            for state, step in zip(states, self._steps.unbind(), strict=True):
                state["step"] = step
            self._moments = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
        return bool(self._moments)


class RMSProp(torch.optim.RMSprop):
    """Torch's own, with a step that a CUDA graph may hold, from the second on, and that the device may refuse."""

    def advance(self, rate: Tensor, refused: Tensor) -> None:
        """s <- α s + (1 - α) g²,  θ <- θ - rate g / (√s + ε),  where autograd is off.

        Args:
            rate: float32 [] on the parameters' device.
            refused: float32 [] there, 1.0 where nothing is to be changed.
        """
        group = self.param_groups[0]
        moved = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self._state_of(parameter) for parameter in moved]
        squares, made = [state["square_avg"] for state in states], 1 - refused
        gradients = [torch.where(refused > 0, 0.0, parameter.grad) for parameter in moved]  # NaN times 0 is NaN
        share = (1 - group["alpha"]) * made
        torch._foreach_mul_(squares, 1 - share)
        torch._foreach_add_(squares, torch._foreach_mul(torch._foreach_mul(gradients, gradients), share))
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_div_(gradients, roots)
        torch._foreach_add_(moved, torch._foreach_mul(gradients, -rate * made))
        torch._foreach_add_([state["step"] for state in states], [made] * len(states))  # one alone would be looked at

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"], state["square_avg"] = torch.zeros(()), torch.zeros_like(parameter)
        if state["step"].device != parameter.device:  # it is new, or comes from a CPU
            state["step"] = state["step"].to(parameter.device)
        return state
