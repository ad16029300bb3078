"""Perceptron: linear layers up to the output, whose gradient is written out, since replay algorithms live in it.

Autograd keeps fresh memory for every intermediate result and a node for each of many small operations. Here nothing is
computed that nobody asked for: the networks of a SAC update of 256 rows, 256x256, take 9.0 ms instead of 11.5 on one
core of an AMD EPYC, both multiplied by MKL (see benchmarks/updates.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlframe.kernels.matmul import bias_gradient, product, restored, weight_gradient
from rlframe.kernels.mlp import Trace, back, layered, parameters, run


@dataclass(frozen=True, eq=False)
class Stack:
    """Linear layers with an activation after each, without the modules that the parameters belong to."""

    layers: Sequence[tuple[Tensor, Tensor]]
    activations: tuple[str, ...]

    @property
    def weights(self) -> list[Tensor]:
        """Those of the layers [out, in]."""
        return [weight for weight, _ in self.layers]

    @property
    def parameters(self) -> list[Tensor]:
        """Weight and bias of each layer in turn."""
        return list(itertools.chain(*self.layers))

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
    def layers(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Weight [out, in] and bias [out] of each."""
        return self.stack.layers

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x)

    def run(self, x: Tensor) -> Pass:
        """`forward` without autograd, to be followed by what a `Pass` can do."""
        return self.stack.run(x)


class Perceptrons(nn.Module):
    """`k` of one shape, [k, n, in_size] to [k, n, out_size], whose products are made at once.

    Two of 256x256 with one output, 256 rows there and back in bfloat16, take 925 us instead of 1178 one after another,
    on one core of an AMD EPYC, and 590 on two.
    """

    def __init__(self, k: int, in_size: int, hidden: Sequence[int], out_size: int, activation: str) -> None:
        super().__init__()
        apart = [Perceptron(in_size, hidden, out_size, activation).stack for _ in range(k)]
        layers = zip(*[stack.layers for stack in apart], strict=True)
        both = [[nn.Parameter(torch.stack(of_all).detach()) for of_all in zip(*layer, strict=True)] for layer in layers]
        self.joined = nn.ParameterList(itertools.chain(*both))  # [k, out, in], [k, out], ...
        self.stack = Stack([(weight, bias) for weight, bias in both], apart[0].activations)
        self._beside: Stack | None = None  # these and then others

    def __len__(self) -> int:
        return len(self.joined[0])

    def __getitem__(self, index: int | slice) -> Stack:
        """One of them, or several: views of their parameters."""
        return Stack([(weight[index], bias[index]) for weight, bias in self.stack.layers], self.stack.activations)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x)

    def run(self, x: Tensor) -> Pass:
        """`forward` without autograd, to be followed by what a `Pass` can do."""
        return self.stack.run(x)

    def run_beside(self, others: Perceptrons, x: Tensor) -> tuple[Pass, Tensor]:
        """`run`, and what k others of the same shape give; x [2 k, n, in_size] is for these and then for the others.

        All products are made at once.
        """
        run = self.beside(others).run(x)
        return run.networks(self.stack), run.output[len(self) :]

    @torch.no_grad()
    def beside(self, others: Perceptrons) -> Stack:
        """These and then the others: the parameters of both come to lie side by side in memory, if they do not yet."""
        own, of_others = self.stack.parameters, others.stack.parameters
        if self._beside is None or not all(map(_are_halves, self._beside.parameters, own, of_others)):
            both = list(map(_joined, own, of_others))
            self._beside = Stack(list(zip(both[::2], both[1::2], strict=True)), self.stack.activations)
        return self._beside

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Also what was saved while each network had parameters of its own."""
        for j in range(len(self.joined)):
            name = f"linears.{j // 2}.{'bias' if j % 2 else 'weight'}"
            apart = [f"{prefix}{i}.{name}" for i in range(len(self))]
            if apart[0] in state_dict:
                state_dict[f"{prefix}joined.{j}"] = torch.stack([state_dict.pop(key) for key in apart])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """Both [k, ...] as one [2 k, ...], which they are the halves of from now on."""
    both = torch.cat([one, other])
    one.data, other.data = both[: len(one)], both[len(one) :]
    return both


def _are_halves(both: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether they are, still: what takes them to another device gives them memory of their own."""
    start = both.data_ptr()
    return one.data_ptr() == start and other.data_ptr() == start + one.nbytes


@dataclass(frozen=True)
class Pass:
    """One evaluation of a network, from which gradients go back: dL/d output [n, out_size] in, all others out.

    Of k networks all are [k, ...].
    """

    stack: Stack
    output: Tensor  # [n, out_size]
    trace: Trace

    def first(self, n: int) -> Pass:
        """Of the first n rows alone."""
        seen, kept = ([x[..., :n, :] for x in each] for each in (self.trace.seen, self.trace.kept))
        return Pass(self.stack, self.output[..., :n, :], Trace(self.trace.weights, seen, kept))

    def networks(self, stack: Stack) -> Pass:
        """Of the first networks alone, which `stack` is made of."""
        k = len(stack.weights[0])
        return Pass(stack, self.output[:k], Trace(*([x[:k] for x in each] for each in self.trace)))

    @torch.no_grad()
    def to_parameters(self, gradient: Tensor) -> Tensor:
        """Set the gradient of every parameter; returns that of the first layer's affine map [n, hidden]."""
        for i, of_affine in back(gradient, self.stack.activations, self.trace):
            weight, bias = self.stack.layers[i]
            weight.grad = restored(weight_gradient(of_affine, self.trace.seen[i]))
            bias.grad = bias_gradient(of_affine)
        return of_affine

    @torch.no_grad()
    def to_all(self, gradient: Tensor) -> Tensor:
        """The same, and the gradient of the input [n, in_size]."""
        return restored(product(self.to_parameters(gradient), self.trace.weights[0]))

    @torch.no_grad()
    def to_input(self, gradient: Tensor) -> Tensor:
        """The gradient of the input [n, in_size]; the network is constant."""
        *_, (_, of_first) = back(gradient, self.stack.activations, self.trace)
        return restored(product(of_first, self.trace.weights[0]))


def least(run: Pass) -> tuple[Tensor, Tensor]:
    """The least of several networks' single outputs [n], and which has it [n]."""
    return run.output.squeeze(-1).min(0)


def least_to_input(run: Pass, which: Tensor, gradient: Tensor) -> Tensor:
    """From dL/d least [n] to that of an input [n, in_size] that all see: a row's is that of the network with its least.

    All rows go back through every network, most of them as zeros: products of ever other numbers of rows would take
    longer, on a CPU for oneDNN's preparing each of them, on a GPU for waiting to know how many there are.
    """
    has = torch.arange(len(run.output), device=which.device).unsqueeze(-1) == which  # [k, n]
    return run.to_input((gradient * has).unsqueeze(-1)).sum(0)
