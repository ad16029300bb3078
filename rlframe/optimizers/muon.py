"""Muon: An optimizer for hidden layers in neural networks. Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein, 2024.

https://kellerjordan.github.io/posts/muon. Its steps have the root mean square of Adam's by default (Liu et al. 2025,
arXiv 2502.16982), so that one learning rate serves it and Adam, which moves all other parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import chz
import torch
from torch import Tensor, nn

from rlframe.core.config import below_one, choice, count, number, option
from rlframe.optimizers.base import Optimizer, OptimizerConfig
from rlframe.optimizers.moments import Adam, Moments, betas, epsilon, kept

_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the quintic that brings singular values near 1


@chz.chz
class MuonConfig(OptimizerConfig):
    """Matrices of hidden layers are Muon's; their number of rows and columns tells them from inputs and outputs."""

    momentum: float = below_one(0.95, "mu: decay of the mean of gradients")
    nesterov: bool = option(True, "a step is from the mean of that mean and the gradient, by mu")
    n_iterations: int = count(5, "of Newton-Schulz, towards a matrix whose singular values are 1", high=1_000)
    scale: str = choice("adam", ("adam", "original"), "of a step: 0.2 √max(rows, columns), or √max(1, rows / columns)")
    smallest: int = count(32, "rows and columns that a matrix of Muon has at least; Adam moves smaller ones")
    betas: tuple[float, ...] = betas()
    epsilon: float = epsilon()
    weight_decay: float = number(0.0, "of all, decoupled: times the learning rate, what parameters lose in a step")

    def make(self, parameters: Sequence[nn.Parameter]) -> Muon:
        return Muon(parameters, self)


class Muon(Optimizer):
    """Orthogonalized momentum for matrices, and AdamW for vectors, scalars and small matrices.

    The kernels [out, in, height, width] of a convolution are a matrix [out, in * height * width], and the weights
    [n, out, in] of n networks side by side are n matrices.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], config: MuonConfig) -> None:
        super().__init__(parameters)
        may_be = [p for p in parameters if p.dim() >= 2 and not getattr(p, "is_vectors", False)]
        matrices = [p for p in may_be if min(as_matrix(p).shape[-2:]) >= config.smallest]
        its = {id(p) for p in matrices}
        rest = [p for p in parameters if id(p) not in its]
        self.parts: list[Moments] = [Orthogonalized(matrices, config)] if matrices else []
        if rest:
            self.parts.append(Adam(rest, config.betas, config.epsilon, config.weight_decay, decoupled=True))

    def step(self, rate: float | Tensor, skipped: Tensor | None = None) -> None:
        for part in self.parts:
            part.step(rate, skipped)

    def renew_views(self) -> None:
        for part in self.parts:
            part.renew_views()

    def state_dict(self) -> dict[str, Any]:
        n = len(self.parameters)
        states = [part.state_dict() for part in self.parts]
        return {"parts": states, "param_groups": [{"params": list(range(n))}]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_entries(state, "parts")
        if len(state["parts"]) != len(self.parts):
            raise ValueError("the saved optimizer is a Muon of other matrices; load a state of the same model")
        before = copy.deepcopy(self.state_dict())
        try:
            for part, each in zip(self.parts, state["parts"], strict=True):
                part.load_state_dict(each)
        except ValueError:
            for part, each in zip(self.parts, before["parts"], strict=True):
                part.load_state_dict(each)
            raise


class Orthogonalized(Moments):
    """B <- μ B + (1 - μ) G,  O = NewtonSchulz(μ B + (1 - μ) G),  θ <- (1 - rate λ) θ - rate scale O."""

    def __init__(self, parameters: Sequence[nn.Parameter], config: MuonConfig) -> None:
        super().__init__(parameters, ("momentum_buffer",))
        self.config = config

    def _move(self, *lists: list[Tensor], rate: float | Tensor, keep: float | Tensor) -> None:
        (parameters, gradients, _, means), c = lists, self.config
        gradients = [kept(gradient, keep) for gradient in gradients]
        torch._foreach_mul_(means, 1 - (1 - c.momentum) * keep)
        torch._foreach_add_(means, torch._foreach_mul(gradients, (1 - c.momentum) * keep))
        followed = torch._foreach_lerp(gradients, means, c.momentum) if c.nesterov else means
        for parameter, each in zip(parameters, followed, strict=True):
            matrix = as_matrix(each)
            step = orthogonalized(matrix, c.n_iterations).view_as(parameter)
            if c.weight_decay:
                parameter.mul_(1 - rate * keep * c.weight_decay)
            parameter.sub_(step * (rate * keep * self._scale(*matrix.shape[-2:])))

    def _scale(self, rows: int, columns: int) -> float:
        longest = max(rows, columns)
        return float(0.2 * longest**0.5 if self.config.scale == "adam" else max(1.0, rows / columns) ** 0.5)


def as_matrix(weight: Tensor) -> Tensor:
    """[..., rows, columns]: a convolution's kernels flattened, other weights as they are."""
    return weight.flatten(1) if weight.dim() > 3 else weight


def orthogonalized(matrix: Tensor, n_iterations: int = 5) -> Tensor:
    """About U V^T of the singular value decomposition U S V^T of matrices [..., rows, columns].

    X <- a X + b (X X^T) X + c (X X^T)² X from X = G / |G|, of which five iterations bring singular values above 0.002
    to between 0.68 and 1.21, and multiply much smaller ones by 480. It computes in float32, where the authors' code has
    bfloat16.
    """
    x = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(n_iterations):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if matrix.shape[-2] > matrix.shape[-1] else x
