"""Networks of vectors as they are learned: the small ones in NumPy, the others in torch, with one interface."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from rlframe.kernels import numpy_mlp
from rlframe.models.perceptron import Pass, Stack

Views = list[tuple[np.ndarray, np.ndarray]]
_known: WeakKeyDictionary[Stack, tuple[list[int], Views]] = WeakKeyDictionary()


@dataclass(frozen=True)
class ArrayPass:
    """A `Pass` in NumPy: tensors of the CPU come in and go out, as views."""

    stack: Stack
    weights: list[np.ndarray]
    output: Tensor  # [n, out_size]
    trace: numpy_mlp.Trace

    def to_parameters(self, gradient: Tensor) -> Tensor:
        """Set the gradient of every parameter; returns that of the first layer's affine map [n, hidden]."""
        array = of_affine = gradient.numpy()
        for i, of_affine in numpy_mlp.back(array, self.weights, self.stack.activations, self.trace):
            weight, bias = self.stack.layers[i]
            if weight.grad is None or bias.grad is None:
                weight.grad, bias.grad = torch.empty_like(weight), torch.empty_like(bias)
            np.matmul(of_affine.T, self.trace.seen[i], out=weight.grad.numpy())
            ones = np.ones(len(of_affine), np.float32)
            np.dot(ones, of_affine, out=bias.grad.numpy())  # the sum, in two thirds of the time
        return torch.from_numpy(of_affine)

    def to_all(self, gradient: Tensor) -> Tensor:
        """The same, and the gradient of the input [n, in_size]."""
        return torch.from_numpy(np.matmul(self.to_parameters(gradient).numpy(), self.weights[0]))


def evaluate(stack: Stack, x: Tensor) -> Pass | ArrayPass:
    """`stack.run(x)`, in NumPy where every product is small: x [n, in] float32 on the CPU."""
    if x.dtype != torch.float32 or len(x) * max((w.numel() for w, _ in stack.layers), default=0) >= numpy_mlp.LARGE:
        return stack.run(x)
    layers = _views(stack)
    y, trace = numpy_mlp.run(x.numpy(), layers, stack.activations)
    return ArrayPass(stack, [weight for weight, _ in layers], torch.from_numpy(y), trace)


def _views(stack: Stack) -> Views:
    """Its parameters as arrays of the same memory, made anew where that is another than last time."""
    places = [parameter.data_ptr() for layer in stack.layers for parameter in layer]
    known = _known.get(stack)
    if known is None or known[0] != places:
        views = [(weight.detach().numpy(), bias.detach().numpy()) for weight, bias in stack.layers]
        known = _known[stack] = places, views
    return known[1]
