"""Perceptron: linear layers up to the output, whose gradient is written out, since replay algorithms live in it.

Autograd keeps fresh memory for every intermediate result and a node for each of many small operations. Here nothing is
computed that nobody asked for, and the least of several networks costs the backward pass of one: the networks of a SAC
update of 256 rows, 256x256, take 9.0 ms instead of 11.5 on one core of an AMD EPYC, both multiplied by MKL (see
benchmarks/updates.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlframe.ops.layers import Trace, back, layered, parameters, run
from rlframe.ops.products import product, weight_gradient


@dataclass(frozen=True)
class Stack:
    """Linear layers with an activation after each, without the modules that the parameters belong to."""

    layers: list[tuple[nn.Parameter, nn.Parameter]]
    activations: tuple[str, ...]

    @property
    def weights(self) -> list[nn.Parameter]:
        """Those of the layers [out, in]."""
        return [weight for weight, _ in self.layers]

    @property
    def on_cpu(self) -> bool:
        """Whether its parameters are."""
        return self.layers[0][0].device.type == "cpu"

    def then(self, other: Stack) -> Stack:
        """This one and, of its output, the other."""
        return Stack([*self.layers, *other.layers], (*self.activations, *other.activations))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], with autograd."""
        return layered(x, self.layers, self.activations) if self.layers else x

    @torch.no_grad()
    def run(self, x: Tensor) -> Pass:
        """[n, in] to [n, out], without autograd, to be followed by what a `Pass` can do."""
        return Pass(self, *run(x, self.layers, self.activations))


class Perceptron(nn.Module):
    """[n, in_size] to [n, out_size], with torch's own first weights, as the papers' code has them."""

    def __init__(self, in_size: int, hidden: Sequence[int], out_size: int, activation: str) -> None:
        super().__init__()
        sizes = [in_size, *hidden, out_size]
        self.linears = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(sizes))
        self.stack = Stack(parameters(self.linears), (*[activation] * len(hidden), "none"))

    @property
    def layers(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Weight [out, in] and bias [out] of each."""
        return self.stack.layers

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x)

    def run(self, x: Tensor) -> Pass:
        """`forward` without autograd, to be followed by what a `Pass` can do."""
        return self.stack.run(x)


@dataclass(frozen=True)
class Pass:
    """One evaluation of a network, from which gradients go back: dL/d output [n, out_size] in, all others out."""

    stack: Stack
    output: Tensor  # [n, out_size]
    trace: Trace

    @torch.no_grad()
    def to_parameters(self, gradient: Tensor) -> Tensor:
        """Set the gradient of every parameter; returns that of the first layer's affine map [n, hidden]."""
        stack, of_affine = self.stack, gradient
        for i, of_affine in back(gradient, stack.weights, stack.activations, self.trace.kept):
            weight, bias = stack.layers[i]
            if weight.grad is None or bias.grad is None:
                weight.grad, bias.grad = torch.empty_like(weight), torch.empty_like(bias)
            weight.grad.copy_(weight_gradient(of_affine, self.trace.seen[i]))
            torch.sum(of_affine, 0, out=bias.grad)
        return of_affine

    def to_all(self, gradient: Tensor) -> Tensor:
        """The same, and the gradient of the input [n, in_size]."""
        return product(self.to_parameters(gradient), self.stack.layers[0][0].detach())

    @torch.no_grad()
    def to_input(self, gradient: Tensor) -> Tensor:
        """The gradient of the input [n, in_size]; the network is constant."""
        return _to_input(self.stack, gradient, self.trace.kept)


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
    found = gradient.new_empty(len(which), passes[0].trace.seen[0].shape[1])
    for k, each in enumerate(passes):
        rows = (which == k).nonzero().squeeze(-1)
        kept = [y.index_select(0, rows) for y in each.trace.kept]
        found[rows] = _to_input(each.stack, gradient.index_select(0, rows).unsqueeze(-1), kept)
    return found


def _masked_to_input(passes: Sequence[Pass], which: Tensor, gradient: Tensor) -> Tensor:
    each_gradient = [(gradient * (which == k)).unsqueeze(-1) for k in range(len(passes))]
    found = [_to_input(one.stack, g, one.trace.kept) for one, g in zip(passes, each_gradient, strict=True)]
    return torch.stack(found).sum(0)


def _to_input(stack: Stack, gradient: Tensor, kept: list[Tensor]) -> Tensor:
    *_, (_, of_first) = back(gradient, stack.weights, stack.activations, kept)
    return product(of_first, stack.layers[0][0])
