"""Linear layers and their gradient in NumPy, for networks so small that torch's overhead exceeds the arithmetic.

The counterpart of `mlp`, which calls it; also used by models.numpy_inference. A NumPy call costs a third of a torch
call: a DQN update of 128 rows, 120x84, takes 530 us on one core of an AMD EPYC instead of 670.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

Array = np.ndarray
Views = list[tuple[Array, Array]]  # weight and bias of each layer
_ZERO = np.float32(0)
_MANY = 2_000  # numbers from which torch's relu is faster: of 15,000 NumPy takes 5.9 us, torch 1.7
LARGE = 2**21  # multiplications in a product from which torch is faster


@dataclass(frozen=True)
class NumpyActivation:
    """A function, and its gradient as a function of its input or output, whichever `forward` returns second."""

    forward: Callable[[Array], tuple[Array, Array]]  # x, may be overwritten, to y and what backward needs
    backward: Callable[[Array, Array], Array]  # dL/dy, may be overwritten, and that to dL/dx


class NumpyTrace(NamedTuple):
    """What `forward` saves for `backward`."""

    weights: list[Array]  # of each layer [out, in]
    seen: list[Array]  # the input of each layer [n, in]
    kept: list[Array]  # input or output of each activation


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def _by_output(function: Callable[[Array], Array], backward: Callable[[Array, Array], Array]) -> NumpyActivation:
    def forward(x: Array) -> tuple[Array, Array]:
        y = function(x)
        return y, y

    return NumpyActivation(forward, backward)


def _relu(x: Array) -> Array:
    if x.size < _MANY:
        return np.maximum(x, _ZERO, out=x)
    return torch.from_numpy(x).relu_().numpy()


def _silu_backward(g: Array, x: Array) -> Array:
    s = sigmoid(x)
    return g * s * (1 + x * (1 - s))


ACTIVATIONS = {
    "tanh": _by_output(lambda x: np.tanh(x, out=x), lambda g, y: np.multiply(g, 1 - y * y, out=g)),
    "relu": _by_output(_relu, lambda g, y: np.multiply(g, y > 0, out=g)),
    "elu": _by_output(
        lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), lambda g, y: g * (np.minimum(y, 0) + 1)
    ),
    "silu": NumpyActivation(lambda x: (x * sigmoid(x), x), _silu_backward),
    "none": NumpyActivation(lambda x: (x, x), lambda g, x: g),
}


def forward(x: Array, layers: Views, activations: Sequence[str]) -> tuple[Array, NumpyTrace]:
    """Map x [n, in] to [n, out] through weights [out, in] and biases [out]; also returns what `backward` needs."""
    trace = NumpyTrace([], [], [])
    for (weight, bias), name in zip(layers, activations, strict=True):
        trace.weights.append(weight)
        trace.seen.append(x)
        x = np.matmul(x, weight.T)
        x += bias
        x, keep = ACTIVATIONS[name].forward(x)
        trace.kept.append(keep)
    return x, trace


def backward(gradient: Array, activations: Sequence[str], trace: NumpyTrace) -> Iterator[tuple[int, Array]]:
    """Yield index and dL/d affine map of each layer, from the last; may overwrite `gradient`, dL/d output [n, out]."""
    for i in reversed(range(len(activations))):
        gradient = ACTIVATIONS[activations[i]].backward(gradient, trace.kept[i])
        yield i, gradient
        if i:
            gradient = product(gradient, trace.weights[i])


def product(a: Array, b: Array) -> Array:
    """a [n, k] @ b [k, m], in a quarter of the time for k = 1."""
    return a * b if a.shape[1] == 1 else np.matmul(a, b)
