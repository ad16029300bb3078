"""Perceptron: linear layers up to the output, whose gradient is written out, since replay algorithms live in it.

Autograd keeps fresh memory for every intermediate result and a node for each of many small operations. Here nothing is
computed that nobody asked for, and the least of several networks costs the backward pass of one: the networks of a SAC
update of 256 rows, 256x256, take 9.0 ms instead of 11.5 on one core of an AMD EPYC, both multiplied by MKL (see
benchmarks/updates.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlframe.ops.products import affine, linear, product, weight_gradient

Layers = list[tuple[nn.Parameter, nn.Parameter]]  # weight [out, in] and bias [out] of each

Function = Callable[[Tensor], Tensor]
Gradient = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    """A function, and its gradient as a function of one of its ends."""

    plain: Function
    forward: Callable[[Tensor], tuple[Tensor, Tensor]]  # x, which it may overwrite, to y and that end
    backward: Gradient  # dL/dy, which it may overwrite, and that end to dL/dx


def _by_output(plain: Function, in_place: Function, backward: Gradient) -> Activation:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = in_place(x)
        return y, y

    return Activation(plain, forward, backward)


_aten = torch.ops.aten
ACTIVATIONS = {
    "tanh": _by_output(torch.tanh, torch.tanh_, _aten.tanh_backward),
    "relu": _by_output(F.relu, torch.relu_, lambda g, y: _aten.threshold_backward.grad_input(g, y, 0, grad_input=g)),
    "elu": _by_output(F.elu, F.elu_, lambda g, y: _aten.elu_backward(g, 1, 1, 1, True, y)),
    "silu": Activation(F.silu, lambda x: (F.silu(x), x), _aten.silu_backward),
}


class Perceptron(nn.Module):
    """[n, in_size] to [n, out_size], with torch's own first weights, as the papers' code has them."""

    def __init__(self, in_size: int, hidden: Sequence[int], out_size: int, activation: str) -> None:
        super().__init__()
        sizes = [in_size, *hidden, out_size]
        self.linears = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(sizes))
        self.activation = activation  # its name, for agents are pickled
        # The parameters once more: looking them up through modules takes longer than using them for a few rows.
        self.layers: Layers = [(linear.weight, linear.bias) for linear in self.linears]  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.activation]
        for weight, bias in self.layers[:-1]:
            x, _ = activation.forward(linear(x, weight, bias))
        return linear(x, *self.layers[-1])

    @torch.no_grad()
    def run(self, x: Tensor) -> Pass:
        """`forward` without autograd, to be followed by what a `Pass` can do."""
        activation, seen, kept = ACTIVATIONS[self.activation], [x], []
        for weight, bias in self.layers[:-1]:
            x, keep = activation.forward(affine(x, weight, bias))
            seen.append(x)
            kept.append(keep)
        weight, bias = self.layers[-1]
        return Pass(self, affine(x, weight, bias), seen, kept)


@dataclass(frozen=True)
class Pass:
    """One evaluation of a network, from which gradients go back: dL/d output [n, out_size] in, all others out."""

    network: Perceptron
    output: Tensor  # [n, out_size]
    seen: list[Tensor]  # the input of each layer
    kept: list[Tensor]  # what each activation's gradient is a function of

    @torch.no_grad()
    def to_parameters(self, gradient: Tensor) -> Tensor:
        """Set the gradient of every parameter; returns that of the first layer's outputs [n, hidden]."""
        layers, activation = self.network.layers, ACTIVATIONS[self.network.activation]
        for i in reversed(range(len(layers))):
            weight, bias = layers[i]
            if weight.grad is None or bias.grad is None:
                weight.grad, bias.grad = torch.empty_like(weight), torch.empty_like(bias)
            weight.grad.copy_(weight_gradient(gradient, self.seen[i]))
            torch.sum(gradient, 0, out=bias.grad)
            if i:
                gradient = activation.backward(product(gradient, weight), self.kept[i - 1])
        return gradient

    def to_all(self, gradient: Tensor) -> Tensor:
        """The same, and the gradient of the input [n, in_size]."""
        return product(self.to_parameters(gradient), self.network.layers[0][0].detach())

    @torch.no_grad()
    def to_input(self, gradient: Tensor) -> Tensor:
        """The gradient of the input [n, in_size]; the network is constant."""
        return _to_input(self.network, gradient, self.kept)


@torch.no_grad()
def least(passes: Sequence[Pass]) -> tuple[Tensor, Tensor]:
    """The least of several networks' single outputs [n], and which has it [n]."""
    return torch.stack([each.output.squeeze(-1) for each in passes]).min(0)


@torch.no_grad()
def least_to_input(passes: Sequence[Pass], which: Tensor, gradient: Tensor) -> Tensor:
    """As `to_input`, for dL/d least [n]. A row's gradient is that of the one network which has its least."""
    in_part = gradient.device.type == "cpu"  # on a GPU the number of rows would have to be waited for
    return (_rows_to_input if in_part else _masked_to_input)(passes, which, gradient)


def _rows_to_input(passes: Sequence[Pass], which: Tensor, gradient: Tensor) -> Tensor:
    found = gradient.new_empty(len(which), passes[0].seen[0].shape[1])
    for k, each in enumerate(passes):
        rows = (which == k).nonzero().squeeze(-1)
        kept = [y.index_select(0, rows) for y in each.kept]
        found[rows] = _to_input(each.network, gradient.index_select(0, rows).unsqueeze(-1), kept)
    return found


def _masked_to_input(passes: Sequence[Pass], which: Tensor, gradient: Tensor) -> Tensor:
    each_gradient = [(gradient * (which == k)).unsqueeze(-1) for k in range(len(passes))]
    found = [_to_input(one.network, g, one.kept) for one, g in zip(passes, each_gradient, strict=True)]
    return torch.stack(found).sum(0)


def _to_input(network: Perceptron, gradient: Tensor, kept: list[Tensor]) -> Tensor:
    activation = ACTIVATIONS[network.activation]
    for (weight, _), keep in zip(reversed(network.layers[1:]), reversed(kept), strict=True):
        gradient = activation.backward(product(gradient, weight), keep)
    return product(gradient, network.layers[0][0])
