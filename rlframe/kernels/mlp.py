"""Linear layers with an activation after each, whose gradient is written out, instead of autograd's graph.

Autograd keeps fresh memory for every intermediate result and a node for each of many small operations, which for
networks of vectors takes longer than the arithmetic. On a CPU, tanh is NumPy's: of 128 x 64 numbers it takes 2 us on
one core of an AMD EPYC, where torch takes 21.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlframe.kernels.matmul import (
    affine,
    as_multiplied,
    bias_gradient,
    linear,
    on_cpu,
    product,
    restored,
    weight_gradient,
)


@dataclass(frozen=True)
class Activation:
    """A function, and its gradient as a function of one of its ends."""

    plain: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor], tuple[Tensor, Tensor]]  # x, which it may overwrite, to y and that end; no autograd
    backward: Callable[[Tensor, Tensor], Tensor]  # dL/dy, which it may overwrite, and that end to dL/dx
    in_bfloat16: bool = False  # whether both ways take that as well


Parameters = Sequence[tuple[Tensor, Tensor]]  # weight [out, in] and bias [out] of each layer, or [k, ...] of k networks


def parameters(modules: Iterable[nn.Module]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Those of nn.Linear modules: looking them up in modules takes longer than using them for a few rows."""
    return [(module.weight, module.bias) for module in modules]  # type: ignore[misc]


class Trace(NamedTuple):
    """What a pass forward leaves for the one back."""

    weights: list[Tensor]  # of each layer [out, in], as they were multiplied with
    seen: list[Tensor]  # the input of each layer [n, in], likewise
    kept: list[Tensor]  # what each activation's gradient is a function of


def _tanh_(x: Tensor) -> Tensor:
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return torch.tanh_(x)
    array = x.numpy()
    np.tanh(array, out=array)
    return x


def _by_output(
    plain: Callable[[Tensor], Tensor],
    in_place: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor, Tensor], Tensor],
    in_bfloat16: bool = False,
) -> Activation:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = in_place(x)
        return y, y

    return Activation(plain, forward, backward, in_bfloat16)


def relu_(x: Tensor) -> Tensor:
    """max(x, 0) in place; NaN stays NaN, for who looks whether a loss is finite."""
    if x.dtype == torch.bfloat16 and on_cpu(x):
        torch.threshold_(_bits(x), _MINUS_INFINITY, 0)
        return x
    return x.relu_()


def relu_backward(g: Tensor, y: Tensor) -> Tensor:
    """From dL/dy, in place, and y to dL/dx."""
    if g.dtype == torch.bfloat16 and on_cpu(g):
        _aten.threshold_backward.grad_input(_bits(g), _bits(y), 0, grad_input=_bits(g))
        return g
    return _aten.threshold_backward.grad_input(g, y, 0, grad_input=g)


def _bits(x: Tensor) -> Tensor:
    """bfloat16 as the integers of its bits, which have its sign: a CPU compares them in a third of the time."""
    return x.view(torch.int16)


_MINUS_INFINITY = -128  # of those; what is greater is above 0, or NaN with a sign
_aten = torch.ops.aten
ACTIVATIONS = {
    "tanh": _by_output(torch.tanh, _tanh_, _aten.tanh_backward),
    "relu": _by_output(F.relu, relu_, relu_backward, in_bfloat16=True),
    "elu": _by_output(F.elu, F.elu_, lambda g, y: _aten.elu_backward(g, 1, 1, 1, True, y)),
    "silu": Activation(F.silu, lambda x: (F.silu(x), x), _aten.silu_backward),
    "none": Activation(lambda x: x, lambda x: (x, x), lambda g, y: g),
}


def run(x: Tensor, layers: Parameters, activations: Sequence[str]) -> tuple[Tensor, Trace]:
    """x [n, in] to [n, out], or both [k, ...] for k networks, without autograd; and what `back` needs."""
    trace = Trace([], [], [])
    for (weight, bias), name in zip(layers, activations, strict=True):
        x, weight = as_multiplied(x, weight)
        trace.weights.append(weight)
        trace.seen.append(x)
        x, keep = _one(x, weight, bias, name)
        trace.kept.append(keep)
    return restored(x), trace


def _one(x: Tensor, weight: Tensor, bias: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """A layer and its activation: the output, and what the activation's gradient is a function of."""
    activation = ACTIVATIONS[name]
    y = affine(x, weight, bias)
    return activation.forward(y if activation.in_bfloat16 else restored(y))


def back(gradient: Tensor, activations: Sequence[str], trace: Trace) -> Iterator[tuple[int, Tensor]]:
    """From dL/d output [n, out], which it may overwrite: each layer's number and dL/d its affine map, from the last."""
    for i in reversed(range(len(activations))):
        weight, kept = trace.weights[i], trace.kept[i]
        gradient = ACTIVATIONS[activations[i]].backward(gradient.to(kept.dtype), kept).to(weight.dtype)
        yield i, gradient
        if i:
            gradient = product(gradient, weight)


def layered(x: Tensor, layers: Parameters, activations: Sequence[str]) -> Tensor:
    """x [..., in] to [..., out], with autograd; of k networks, x [k, n, in] to [k, n, out].

    In inference mode it is torch's own functions: rows that are acted for keep their bits however many there are.
    """
    if x.device.type != "cpu" or torch.is_inference_mode_enabled() or torch.compiler.is_compiling():
        for (weight, bias), name in zip(layers, activations, strict=True):
            x = ACTIVATIONS[name].plain(linear(x, weight, bias))
        return x
    apart = x.dim() == 2 or layers[0][0].dim() == 3
    rows = x if apart else x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        y: Tensor = _Layered.apply(rows, tuple(activations), *[parameter for layer in layers for parameter in layer])
    else:
        y = rows
        for (weight, bias), name in zip(layers, activations, strict=True):  # whose memory is free again at once
            y, _ = _one(*as_multiplied(y, weight), bias, name)
        y = restored(y)
    return y if apart else y.view(*x.shape[:-1], -1)


class _Layered(torch.autograd.Function):
    """All layers as one step of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activations: tuple[str, ...], *parameters: Tensor) -> Tensor:
        y, trace = run(x, list(zip(parameters[::2], parameters[1::2], strict=True)), activations)
        ctx.activations = activations
        ctx.save_for_backward(*trace.weights, *trace.seen, *trace.kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        n = len(ctx.activations)
        trace = Trace(*(list(ctx.saved_tensors[i : i + n]) for i in (0, n, 2 * n)))
        found: list[Tensor | None] = [None] * (2 * n)
        for i, of_affine in back(gradient.clone(), ctx.activations, trace):
            found[2 * i] = restored(weight_gradient(of_affine, trace.seen[i]))
            found[2 * i + 1] = bias_gradient(of_affine)
        of_x = restored(product(of_affine, trace.weights[0])) if ctx.needs_input_grad[0] else None
        return of_x, None, *found
