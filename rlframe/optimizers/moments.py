"""Adam, AdamW, RAdam, RMSProp and SGD: optimizers whose state is a few moments of each parameter, without torch.optim.

torch.optim collects and checks its parameters at each step, which small networks notice, and loads torch's compiler.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import chz
import numpy as np
import torch
from torch import Tensor, nn

from rlframe.core.config import below_one, decays, number, option
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import in_state
from rlframe.kernels.device import held, is_recording
from rlframe.optimizers.base import Optimizer, OptimizerConfig

_LEAST_EPSILON = 1e-12  # with which denormals may be zero


class Moments(Optimizer):
    """Base of optimizers with moments of each parameter in fixed memory; `state_dict` has the format of torch.optim."""

    def __init__(self, parameters: Sequence[nn.Parameter], moments: Sequence[str]) -> None:
        """`moments`: their names in torch.optim."""
        super().__init__(parameters)
        self.moments = tuple(moments)
        self._moments = [[torch.zeros_like(parameter) for parameter in parameters] for _ in self.moments]
        self._n_steps = torch.zeros(len(parameters), device=parameters[0].device)
        self.renew_views()

    def renew_views(self) -> None:
        self._steps = list(self._n_steps.unbind())

    @torch.no_grad()
    def step(self, rate: float | Tensor, skipped: Tensor | None = None) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        recorded, keep = is_recording(), 1.0 if skipped is None else 1 - skipped
        steps = list(self._n_steps.unbind()) if recorded else self._steps  # of this graph, if one is recorded
        lists: list[list[Any]] = [self.parameters, gradients, steps, *self._moments]
        if any(gradient is None for gradient in gradients):
            lists = [[x for x, g in zip(each, gradients, strict=True) if g is not None] for each in lists]
            if not lists[0]:  # kernels take no empty lists
                return
            torch._foreach_add_(lists[2], keep if isinstance(keep, float) else [keep] * len(lists[2]))
        else:
            self._n_steps += keep
        if recorded or not self._launch(*lists, rate=rate, skipped=skipped):
            self._move(*lists, rate=rate, keep=keep)

    def _launch(self, *lists: list[Tensor], rate: float | Tensor, skipped: Tensor | None) -> bool:
        """Optional: as `_move`, by one kernel; False if there is none for this step."""
        return False

    @abstractmethod
    def _move(self, *lists: list[Tensor], rate: float | Tensor, keep: float | Tensor) -> None:
        """Update parameters by the equations, without a look at any value, of which a compiler makes loops.

        `lists`: parameters, gradients, steps (this one included) and moments.    keep: 0 to change nothing, else 1.
        """

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


def epsilon() -> Any:
    """A field for the number beside a root in a denominator; each algorithm has a default of its own for it."""
    return number(math.nan, "added to the root of the mean square; nan: the algorithm's")


def betas() -> Any:
    """A field for the two decays of Adam's moments."""
    return decays((0.9, 0.999), "decays of the means of gradients and of their squares")


def adam_kernel(betas: tuple[float, ...], weight_decay: float, decoupled: bool = False) -> Callable[..., None]:
    """Adam's step as one kernel, of lists of tensors, lr and eps; `decoupled`: see Adam."""
    kernel, (beta1, beta2) = torch._fused_adamw_ if decoupled else torch._fused_adam_, betas
    return partial(kernel, beta1=beta1, beta2=beta2, weight_decay=weight_decay, amsgrad=False, maximize=False)


@chz.chz
class AdamConfig(OptimizerConfig):
    """Adam: A Method for Stochastic Optimization. Kingma & Ba, 2015. arXiv 1412.6980 (algorithm 1)."""

    betas: tuple[float, ...] = betas()
    epsilon: float = epsilon()
    weight_decay: float = number(0.0, "times the parameters, is added to the gradients; adamw decays them apart")

    def make(self, parameters: Sequence[nn.Parameter]) -> Adam:
        return Adam(parameters, self.betas, self.epsilon, self.weight_decay)


class Adam(Moments):
    """m <- β₁ m + (1 - β₁) g,  v <- β₂ v + (1 - β₂) g²,  θ <- θ - rate m^ / (√v^ + ε), as one kernel.

    m^ = m / (1 - β₁^t) and v^ = v / (1 - β₂^t).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        betas: tuple[float, ...],
        epsilon: float,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        """`decoupled`: weight decay does not pass through the moments (AdamW)."""
        super().__init__(parameters, ("exp_avg", "exp_avg_sq"))
        (self.beta1, self.beta2), self.epsilon, self.weight_decay = betas, epsilon, weight_decay
        # The moments of dead units decay to denormals, with which a step takes up to 1.7 times as long. Zeros instead
        # change a step by less than 1.2e-38 / ε of the rate, and a root of at most 1.1e-19 vanishes beside ε.
        self.flushes = epsilon >= _LEAST_EPSILON
        self.decoupled, self._kernel = decoupled, adam_kernel(betas, weight_decay, decoupled)

    def _launch(self, *lists: list[Tensor], rate: float | Tensor, skipped: Tensor | None) -> bool:
        parameters, gradients, steps, means, squares = lists
        self._kernel(parameters, gradients, means, squares, [], steps, lr=rate, eps=self.epsilon, found_inf=skipped)
        return True

    def _move(self, *lists: list[Tensor], rate: float | Tensor, keep: float | Tensor) -> None:
        t = torch.stack(lists[2]).clamp(min=1.0)  # 0: no step was made, and 0 / 0 times 0 is NaN
        step = held(rate * keep / (1 - self.beta1**t)).unbind()
        inverse_root = held((1 - self.beta2**t).rsqrt()).unbind()
        for parameter, gradient, a, b, m, v in zip(*lists[:2], step, inverse_root, *lists[3:], strict=True):
            g = kept(gradient, keep)
            if self.weight_decay and self.decoupled:
                parameter.mul_(1 - rate * keep * self.weight_decay)
            elif self.weight_decay:
                g = g + self.weight_decay * parameter
            m.add_((1 - self.beta1) * keep * (g - m))
            v.add_((1 - self.beta2) * keep * (g * g - v))
            parameter.sub_(a * m / (v.sqrt() * b + self.epsilon))


@chz.chz
class AdamWConfig(OptimizerConfig):
    """Decoupled Weight Decay Regularization. Loshchilov & Hutter, 2019. arXiv 1711.05101.

    Algorithm 2: θ <- θ - rate (m^ / (√v^ + ε) + λ θ).
    """

    betas: tuple[float, ...] = betas()
    epsilon: float = epsilon()
    weight_decay: float = number(0.01, "lambda: times the learning rate, the part that parameters lose in a step")

    def make(self, parameters: Sequence[nn.Parameter]) -> Adam:
        return Adam(parameters, self.betas, self.epsilon, self.weight_decay, decoupled=True)


@chz.chz
class RAdamConfig(OptimizerConfig):
    """On the Variance of the Adaptive Learning Rate and Beyond. Liu et al., 2020. arXiv 1908.03265 (algorithm 2)."""

    betas: tuple[float, ...] = betas()
    epsilon: float = epsilon()
    weight_decay: float = number(0.0, "times the parameters, is added to the gradients")

    def make(self, parameters: Sequence[nn.Parameter]) -> RAdam:
        return RAdam(parameters, self)


class RAdam(Moments):
    """Adam's m and v;  θ <- θ - rate r m^ / (√v^ + ε) once v is of enough steps, before that θ <- θ - rate m^.

    r² = (ρ - 4) (ρ - 2) ρ∞ / ((ρ∞ - 4) (ρ∞ - 2) ρ), for ρ > 5 of ρ = ρ∞ - 2 t β₂^t / (1 - β₂^t), ρ∞ = 2 / (1 - β₂) - 1.
    As in torch.optim: ε is added to √v before v is divided by 1 - β₂^t.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], config: RAdamConfig) -> None:
        super().__init__(parameters, ("exp_avg", "exp_avg_sq"))
        self.config, self.flushes = config, config.epsilon >= _LEAST_EPSILON  # see Adam
        self._kernel = adam_kernel(config.betas, config.weight_decay)

    def _launch(self, *lists: list[Tensor], rate: float | Tensor, skipped: Tensor | None) -> bool:
        """By Adam's kernel where all parameters have made as many steps: 40 us of ten small ones, and not 370."""
        t = self._n_steps.numpy() if skipped is None and self._n_steps.is_cpu else np.zeros(1)
        factor = float(self._rectified(float(t[0]))) if t[0] > 0 and t.min() == t.max() else 0.0
        if factor:
            parameters, gradients, steps, means, squares = lists
            epsilon = self.config.epsilon / math.sqrt(1 - self.config.betas[1] ** float(steps[0]))
            self._kernel(parameters, gradients, means, squares, [], steps, lr=rate * factor, eps=epsilon)
        return factor > 0

    def _move(self, *lists: list[Tensor], rate: float | Tensor, keep: float | Tensor) -> None:
        parameters, gradients, steps, means, squares = lists
        c, (beta1, beta2), t = self.config, self.config.betas, torch.stack(steps).clamp(min=1.0)  # 0: no step was made
        r, unbiased = self._rectified(t), rate * keep / (1 - beta1**t)
        of_mean = held(unbiased * (r == 0)).unbind()
        of_ratio = held(unbiased * r * (1 - beta2**t).sqrt()).unbind()
        for parameter, gradient, a, b, m, v in zip(
            parameters, gradients, of_mean, of_ratio, means, squares, strict=True
        ):
            g = kept(gradient, keep)
            if c.weight_decay:
                g = g + c.weight_decay * parameter
            m.add_((1 - beta1) * keep * (g - m))
            v.add_((1 - beta2) * keep * (g * g - v))
            parameter.sub_(m * (a + b / (v.sqrt() + c.epsilon)))

    def _rectified(self, t: Any) -> Any:
        """r of step t >= 1, a number or a tensor; 0 where ρ <= 5."""
        beta2 = self.config.betas[1]
        limit = 2 / (1 - beta2) - 1
        if limit <= 5:
            return 0.0 * t
        exact = t.double() if isinstance(t, Tensor) else t  # the difference loses a third of the digits
        rho = limit - 2 * exact * beta2**exact / (1 - beta2**exact)
        square = (rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)
        r = ((rho > 5) * square) ** 0.5
        return r.to(t.dtype) if isinstance(t, Tensor) else r


@chz.chz
class RMSPropConfig(OptimizerConfig):
    """RMSProp. Tieleman & Hinton, 2012, lecture 6.5 of Neural Networks for Machine Learning; Mnih et al., 2016.

    As in torch.optim: ε is outside of the root.
    """

    IN_STATE = in_state("momentum")

    decay: float = below_one(0.99, "alpha: of the mean of squared gradients")
    epsilon: float = epsilon()
    momentum: float = below_one(0.0, "mu: the part of a step that the next one repeats")
    weight_decay: float = number(0.0, "times the parameters, is added to the gradients")

    def make(self, parameters: Sequence[nn.Parameter]) -> RMSProp:
        return RMSProp(parameters, self)


class RMSProp(Moments):
    """s <- α s + (1 - α) g²,  u <- μ u + g / (√s + ε),  θ <- θ - rate u."""

    def __init__(self, parameters: Sequence[nn.Parameter], config: RMSPropConfig) -> None:
        super().__init__(parameters, ("square_avg", "momentum_buffer") if config.momentum else ("square_avg",))
        self.config = config

    def _move(self, *lists: list[Tensor], rate: float | Tensor, keep: float | Tensor) -> None:
        (parameters, gradients, _, squares, *buffers), c = lists, self.config
        gradients = [kept(gradient, keep) for gradient in gradients]
        if c.weight_decay:
            gradients = list(torch._foreach_add(gradients, torch._foreach_mul(parameters, c.weight_decay * keep)))
        share = (1 - c.decay) * keep
        torch._foreach_mul_(squares, 1 - share)
        torch._foreach_add_(squares, torch._foreach_mul(torch._foreach_mul(gradients, gradients), share))
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, c.epsilon)
        steps = torch._foreach_div(gradients, roots)
        if buffers:
            torch._foreach_mul_(buffers[0], 1 - (1 - c.momentum) * keep)
            torch._foreach_add_(buffers[0], steps)
            steps = torch._foreach_mul(buffers[0], keep)
        torch._foreach_sub_(parameters, torch._foreach_mul(steps, rate))


@chz.chz
class SGDConfig(OptimizerConfig):
    """Gradient descent, with momentum (Polyak 1964) or Nesterov's (Sutskever et al. 2013, ICML); as in torch.optim."""

    IN_STATE = in_state("momentum")

    momentum: float = below_one(0.0, "mu: decay of the sum of gradients that steps follow")
    nesterov: bool = option(False, "the gradient is that after the momentum's part of the step")
    weight_decay: float = number(0.0, "times the parameters, is added to the gradients")

    @chz.validate
    def _check(self) -> None:
        if self.nesterov and not self.momentum:
            raise ConfigError("algo.optimizer.nesterov=true needs algo.optimizer.momentum above 0, such as 0.9")

    def make(self, parameters: Sequence[nn.Parameter]) -> SGD:
        return SGD(parameters, self)


class SGD(Moments):
    """b <- μ b + g,  θ <- θ - rate b; with `nesterov` θ <- θ - rate (g + μ b), and without momentum b = g."""

    def __init__(self, parameters: Sequence[nn.Parameter], config: SGDConfig) -> None:
        super().__init__(parameters, ("momentum_buffer",) if config.momentum else ())
        self.config = config

    def _launch(self, *lists: list[Tensor], rate: float | Tensor, skipped: Tensor | None) -> bool:
        parameters, gradients, _, *buffers = lists
        torch._fused_sgd_(
            parameters,
            gradients,
            buffers[0] if buffers else [],
            weight_decay=self.config.weight_decay,
            momentum=self.config.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=self.config.nesterov,
            maximize=False,
            is_first_step=False,  # buffers begin as zeros, which gives the same
            found_inf=skipped,
        )
        return True

    def _move(self, *lists: list[Tensor], rate: float | Tensor, keep: float | Tensor) -> None:
        (parameters, gradients, _, *buffers), momentum = lists, self.config.momentum
        for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            g = kept(gradient, keep) + self.config.weight_decay * parameter
            if buffers:
                b = buffers[0][i]
                b.mul_(1 - (1 - momentum) * keep).add_(keep * g)
                g = g + momentum * b if self.config.nesterov else b
            parameter.sub_(rate * keep * g)


def kept(gradient: Tensor, keep: float | Tensor) -> Tensor:
    """The gradient; zeros in its place in a step that is skipped, since NaN times 0 is NaN."""
    return torch.where(keep > 0, gradient, 0.0) if isinstance(keep, Tensor) else gradient
