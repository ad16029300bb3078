"""Linear layers with an activation after each, as one autograd node: the fast path of all networks of vectors.

For small networks autograd's nodes and allocations take longer than the arithmetic. Here a whole network is one node
with a written-out forward and backward, which adds the gradients to `.grad` itself. `docs/gradients.md` explains what
that means for a loss of your own; `plain_networks()` turns it off. On a CPU, small networks are evaluated in NumPy (see
numpy_mlp), and tanh always is: 128 x 64 numbers take 2 us on one core of an AMD EPYC, 21 in torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlframe.kernels import numpy_mlp
from rlframe.kernels.matmul import (
    affine,
    bias_gradient,
    cast_inputs,
    from_bf16,
    linear,
    on_cpu,
    product,
    weight_gradient,
)
from rlframe.kernels.matmul import is_plain as is_plain
from rlframe.kernels.matmul import plain_networks as plain_networks

Parts = tuple[tuple[Any, ...], tuple[Any, ...]]  # indices into rows [..., n, size] or networks [k, n, size]
Parameters = Sequence[tuple[Tensor, Tensor]]  # weight [out, in] and bias [out] of each layer, or [k, ...] of k networks
Learning = list[Tensor | None]  # weight and bias of each layer in turn, None where it is constant
Place = Mapping[str, Any]  # where the weight and the bias of a layer are, by these names: the parameters of a module


def as_node(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its support of torch.func, which takes 5 to 10 us of each call and is not needed."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


@contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which these are constants, as an actor's loss uses its critics: gradients go through to the inputs."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@dataclass(frozen=True)
class Activation:
    """A function, and its gradient as a function of its input or output, whichever `forward` keeps."""

    plain: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor], tuple[Tensor, Tensor]]  # x, may be overwritten, to y and what backward needs
    backward: Callable[[Tensor, Tensor], Tensor]  # dL/dy, may be overwritten, and that to dL/dx
    in_bfloat16: bool = False  # whether both also take bfloat16


class Trace(NamedTuple):
    """What `forward` saves for `backward`."""

    weights: list[Tensor]  # of each layer [out, in], in the type multiplied in
    seen: list[Tensor]  # the input of each layer [n, in], likewise
    kept: list[Tensor]  # input or output of each activation


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
    """max(x, 0) in place; NaN stays NaN, so that it reaches the loss."""
    if x.dtype == torch.bfloat16 and on_cpu(x):
        torch.threshold_(_bits(x), _MINUS_INFINITY, 0)
        return x
    return x.relu_()


def relu_backward(g: Tensor, y: Tensor) -> Tensor:
    """dL/dx from dL/dy, in place, and y."""
    if g.dtype == torch.bfloat16 and on_cpu(g):
        _aten.threshold_backward.grad_input(_bits(g), _bits(y), 0, grad_input=_bits(g))
        return g
    return _aten.threshold_backward.grad_input(g, y, 0, grad_input=g)


def _bits(x: Tensor) -> Tensor:
    """The bits of bfloat16 as integers of the same sign, which a CPU compares in a third of the time."""
    return x.view(torch.int16)


_MINUS_INFINITY = -128  # as such an integer; a greater one is positive, or NaN with a sign
_aten = torch.ops.aten
ACTIVATIONS = {
    "tanh": _by_output(torch.tanh, _tanh_, _aten.tanh_backward),
    "relu": _by_output(F.relu, relu_, relu_backward, in_bfloat16=True),
    "elu": _by_output(F.elu, F.elu_, lambda g, y: _aten.elu_backward(g, 1, 1, 1, True, y)),
    "silu": Activation(F.silu, lambda x: (F.silu(x), x), _aten.silu_backward),
    "none": Activation(lambda x: x, lambda x: (x, x), lambda g, y: g),
}


def forward(x: Tensor, layers: Parameters, activations: Sequence[str]) -> tuple[Tensor, Trace]:
    """x [n, in] to [n, out] (both [k, ...] for k networks), without autograd; also returns what `backward` needs."""
    trace = Trace([], [], [])
    for (weight, bias), name in zip(layers, activations, strict=True):
        x, weight = cast_inputs(x, weight)
        trace.weights.append(weight)
        trace.seen.append(x)
        x, keep = _layer(x, weight, bias, name)
        trace.kept.append(keep)
    return from_bf16(x), trace


def _layer(x: Tensor, weight: Tensor, bias: Tensor, name: str) -> tuple[Tensor, Tensor]:
    activation = ACTIVATIONS[name]
    y = affine(x, weight, bias)
    return activation.forward(y if activation.in_bfloat16 else from_bf16(y))


def backward(gradient: Tensor, activations: Sequence[str], trace: Trace) -> Iterator[tuple[int, Tensor]]:
    """Yield index and dL/d affine map of each layer, from the last; may overwrite `gradient`, dL/d output [n, out]."""
    for i in reversed(range(len(activations))):
        weight, kept = trace.weights[i], trace.kept[i]
        gradient = ACTIVATIONS[activations[i]].backward(gradient.to(kept.dtype), kept).to(weight.dtype)
        yield i, gradient
        if i:
            gradient = product(gradient, weight)


class Layers:
    """Callable linear layers with an activation after each, whose parameters are looked up in modules at each call.

    For k networks of one shape, weights are [k, out, in] and biases [k, out], multiplied in one batch. `norms`
    normalise the first layers' outputs before their activations; with them ordinary torch operations are used.
    """

    def __init__(
        self, places: Sequence[Place], activations: Sequence[str], norms: Sequence[Callable[[Tensor], Tensor]] = ()
    ) -> None:
        """`places`: the `_parameters` of a module for each layer, in which torch.func replaces parameters too."""
        self.places, self.activations, self.norms = list(places), tuple(activations), list(norms)
        self._views: tuple[list[int], numpy_mlp.Views] = [], []
        self._gradients: list[tuple[Tensor, np.ndarray]] = []  # memory for the gradient of each parameter

    def __reduce__(self) -> tuple[Any, ...]:
        # So that copies look into copies of the modules:
        return Layers, (self.places, self.activations, self.norms)

    @property
    def parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of each layer now."""
        return [(place["weight"], place["bias"]) for place in self.places]

    @property
    def flat(self) -> list[Tensor]:
        """The same in turn."""
        return [place[name] for place in self.places for name in ("weight", "bias")]

    def then(self, other: Layers) -> Layers:
        """These layers, followed by the others."""
        assert not other.norms or len(self.norms) == len(self.places)
        activations, norms = (*self.activations, *other.activations), [*self.norms, *other.norms]
        return Layers([*self.places, *other.places], activations, norms)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out], or [k, n, in] to [k, n, out] for k networks."""
        return together(x, self)[0] if self.places else x

    def plain(self, x: Tensor) -> Tensor:
        """The same with ordinary torch operations."""
        for (weight, bias), norm, name in itertools.zip_longest(self.parameters, self.norms, self.activations):
            x = linear(x, weight, bias)
            x = ACTIVATIONS[name].plain(norm(x) if norm else x)
        return x

    def learning(self) -> Learning:
        """The parameters that require a gradient now, None in the place of the others."""
        return [parameter if parameter.requires_grad else None for parameter in self.flat]

    def partly(self, x: Tensor, parts: Parts, learned: Layers) -> tuple[Tensor, Tensor]:
        """Evaluate x once; return the output at the first part with gradient, at the second part without.

        `learned`: the layers of the first part, which are these, or the first networks of these.
        """
        learning = learned.learning() if torch.is_grad_enabled() else []
        anchor = next(filter(_is_some, learning), None)
        if not _are_leaves(learning):
            y = self.plain(x)
            return y[parts[0]], y[parts[1]].detach()
        if anchor is None and not (x.requires_grad and torch.is_grad_enabled()):
            y = self.evaluate(x)[0]
            return y[parts[0]], y[parts[1]]
        found: tuple[Tensor, Tensor] = _part(x, anchor, self, parts, learned, learning)
        return found

    def evaluate(self, x: Tensor) -> tuple[Tensor, Trace | numpy_mlp.NumpyTrace]:
        """Output and trace, without autograd; in NumPy if every product is small."""
        parameters = self.parameters
        if not (on_cpu(x) and x.dtype == torch.float32 and x.dim() == 2 and parameters[0][0].dim() == 2):
            return forward(x, parameters, self.activations)
        if len(x) * max(weight.numel() for weight, _ in parameters) >= numpy_mlp.LARGE:
            return forward(x, parameters, self.activations)
        y, trace = numpy_mlp.forward(x.detach().numpy(), self._arrays(parameters), self.activations)
        return torch.from_numpy(y), trace

    def _arrays(self, parameters: Parameters) -> numpy_mlp.Views:
        """The parameters as arrays of the same memory, made anew after a parameter has moved."""
        pointers, views = self._views
        now = [x.data_ptr() for pair in parameters for x in pair]
        if pointers != now:
            views = [(weight.detach().numpy(), bias.detach().numpy()) for weight, bias in parameters]
            self._views = now, views
        return views

    def backward(
        self, gradient: Tensor, trace: Trace | numpy_mlp.NumpyTrace, learning: Learning, with_input: bool
    ) -> Any:
        """Add the gradients of the `learning` parameters to `.grad`; returns dL/d input if `with_input`, else None."""
        if self.activations[-1] != "none":
            gradient = gradient.clone()  # autograd owns it, and it would be overwritten
        if isinstance(trace, numpy_mlp.NumpyTrace):
            return self._backward_in_numpy(gradient.numpy(), trace, learning, with_input)
        for i, of_affine in backward(gradient, self.activations, trace):
            weight, bias = learning[2 * i : 2 * i + 2]
            if weight is not None:
                _accumulate(weight, from_bf16(weight_gradient(of_affine, trace.seen[i])))
            if bias is not None:
                _accumulate(bias, bias_gradient(of_affine))
        return from_bf16(product(of_affine, trace.weights[0])) if with_input else None

    def _backward_in_numpy(
        self, gradient: np.ndarray, trace: numpy_mlp.NumpyTrace, learning: Learning, with_input: bool
    ) -> Any:
        if not self._gradients:  # in one piece, so that its norm is one call (see algos.optimizer_step)
            flat = self.flat
            memory = torch.empty(sum(each.numel() for each in flat)).split([each.numel() for each in flat])
            views = [part.view(each.shape) for part, each in zip(memory, flat, strict=True)]
            self._gradients = [(view, view.numpy()) for view in views]
        for i, of_affine in numpy_mlp.backward(gradient, self.activations, trace):
            ones = np.ones(len(of_affine), np.float32)  # times rows it is their sum, in two thirds of the time
            for j, left, right in ((2 * i, of_affine.T, trace.seen[i]), (2 * i + 1, ones, of_affine)):
                if (parameter := learning[j]) is None:
                    continue
                tensor, array = self._gradients[j]
                if parameter.grad is None:
                    np.dot(left, right, out=array)
                    parameter.grad = tensor
                else:
                    parameter.grad += torch.from_numpy(np.dot(left, right))
        return torch.from_numpy(numpy_mlp.product(of_affine, trace.weights[0])) if with_input else None


def together(x: Tensor, *networks: Layers) -> tuple[Tensor, ...]:
    """Outputs [..., out] of several networks for the same rows [..., in], as one autograd node.

    Inference mode uses ordinary torch operations, so that acting gives a row the same bits for any number of rows.
    """
    if torch.is_inference_mode_enabled() or is_plain() or networks[0].norms:
        return tuple(network.plain(x) for network in networks)
    if x.dim() == 2 or networks[0].places[0]["weight"].dim() == 3:
        return _together(x, networks)
    return tuple(y.view(*x.shape[:-1], -1) for y in _together(x.reshape(-1, x.shape[-1]), networks))


def _together(x: Tensor, networks: tuple[Layers, ...]) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled():
        learning = [network.learning() for network in networks]
        if not _are_leaves(every := list(itertools.chain(*learning))):
            return tuple(network.plain(x) for network in networks)
        anchor = next(filter(_is_some, every), None)
        if anchor is not None or x.requires_grad:
            found: tuple[Tensor, ...] = _networks(x, anchor, networks, learning)
            return found
    return tuple(network.evaluate(x)[0] for network in networks)


def _is_some(x: Tensor | None) -> bool:
    return x is not None


def _are_leaves(learning: Iterable[Tensor | None]) -> bool:
    """Whether all are leaves of the graph, which have a `.grad`; functional_call may be given others."""
    return all(x is None or x.is_leaf for x in learning)


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class _Networks(torch.autograd.Function):
    """Whole networks as one node, which adds the gradients to `.grad` itself instead of returning them.

    This saves a node and a copy per parameter: PPO's two 64x64 networks take 435 us per update of 128 rows instead of
    562. `anchor` is any parameter that requires a gradient; it makes autograd call `backward`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor | None, networks: tuple[Layers, ...], learning: list[Learning]
    ) -> tuple[Tensor, ...]:
        found = [network.evaluate(x) for network in networks]
        ctx.set_materialize_grads(False)
        ctx.networks, ctx.learning, ctx.traces = networks, learning, [trace for _, trace in found]
        return tuple(y.detach() for y, _ in found)  # new objects: the traces may hold y, a reference cycle

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _check_once()
        of_x = None
        for network, trace, learning, gradient in zip(ctx.networks, ctx.traces, ctx.learning, gradients, strict=True):
            if gradient is not None:
                part = network.backward(gradient, trace, learning, ctx.needs_input_grad[0])
                of_x = part if of_x is None else of_x + part
        return of_x, None, None, None


class _Part(torch.autograd.Function):
    """One evaluation of which only a part has a gradient (see `Layers.partly`)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor | None, layers: Layers, parts: Parts, learned: Layers, learning: Learning
    ) -> tuple[Tensor, Tensor]:
        part, rest = parts
        y, trace = forward(x, layers.parameters, layers.activations)
        seen, kept = ([each[part] for each in of_layer] for of_layer in (trace.seen, trace.kept))
        ctx.trace = Trace(
            [weight[: len(own)] for weight, own in zip(trace.weights, learned.flat[::2], strict=True)], seen, kept
        )
        ctx.layers, ctx.learning, ctx.part, ctx.shape = learned, learning, part, x.shape
        of_part, of_rest = y[part], y[rest]
        ctx.mark_non_differentiable(of_rest)
        return of_part, of_rest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        _check_once()
        of_part = ctx.layers.backward(gradient, ctx.trace, ctx.learning, ctx.needs_input_grad[0])
        of_x = None
        if of_part is not None:
            of_x = of_part.new_zeros(ctx.shape)
            of_x[ctx.part] = of_part
        return of_x, None, None, None, None, None


_networks, _part = as_node(_Networks), as_node(_Part)


def _check_once() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("the gradient of a network cannot be differentiated again; use `with plain_networks():`")
