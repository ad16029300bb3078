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
from rlframe.ops.products import bias_gradient, product, restored, weight_gradient


@dataclass(frozen=True)
class Stack:
    """Linear layers with an activation after each, without the modules that the parameters belong to."""

    layers: list[tuple[nn.Parameter, nn.Parameter]]
    activations: tuple[str, ...]

    @property
    def weights(self) -> list[nn.Parameter]:
        """Those of the layers [out, in]."""
        return [weight for weight, _ in self.layers]

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
        for i, of_affine in back(gradient, self.stack.activations, self.trace):
            weight, bias = self.stack.layers[i]
            weight.grad = restored(weight_gradient(of_affine, self.trace.seen[i]))
            bias.grad = bias_gradient(of_affine)
        return of_affine

    def to_all(self, gradient: Tensor) -> Tensor:
        """The same, and the gradient of the input [n, in_size]."""
        return restored(product(self.to_parameters(gradient), self.trace.weights[0]))

    @torch.no_grad()
    def to_input(self, gradient: Tensor) -> Tensor:
        """The gradient of the input [n, in_size]; the network is constant."""
        *_, (_, of_first) = back(gradient, self.stack.activations, self.trace)
        return restored(product(of_first, self.trace.weights[0]))


@torch.no_grad()
def least(passes: Sequence[Pass]) -> tuple[Tensor, Tensor]:
    """The least of several networks' single outputs [n], and which has it [n]."""
    return torch.stack([each.output.squeeze(-1) for each in passes]).min(0)


@torch.no_grad()
def least_to_input(passes: Sequence[Pass], which: Tensor, gradient: Tensor) -> Tensor:
    """As `to_input`, for dL/d least [n]. A row's gradient is that of the one network which has its least.

    All rows go back through every network, most of them as zeros: products of ever other numbers of rows would take
    longer, on a CPU for oneDNN's preparing each of them, on a GPU for waiting to know how many there are.
    """
    found = [each.to_input((gradient * (which == k)).unsqueeze(-1)) for k, each in enumerate(passes)]
    return torch.stack(found).sum(0)
