"""Network: linear layers with activations and normalisation, one network or k of one shape at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlframe.kernels.matmul import linear

Place = Mapping[str, Any]  # where the weight and the bias of a layer are, by these names: the parameters of a module
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "elu": F.elu,
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "none": lambda x: x,
}
NORMS = ("none", "layer", "batch")
LAYER_EPSILON = 1e-5
BATCH_EPSILON, BATCH_MOMENTUM = 1e-3, 0.01  # Bhatt et al. 2024 (CrossQ, arXiv 1902.05605)


def orthogonal(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights and zero bias (Saxe et al. 2014; sqrt(2) as in Schulman et al.'s PPO code)."""
    assert isinstance(layer.weight, Tensor) and isinstance(layer.bias, Tensor)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Linear(nn.Module):
    """An affine map of one network, weight [out, in], or of k networks, [k, out, in], which starts as these layers."""

    def __init__(self, layers: Sequence[nn.Module], k: int) -> None:
        super().__init__()
        of_all: list[list[Tensor]] = [[layer.weight, layer.bias] for layer in layers]  # type: ignore[list-item]
        weight, bias = (torch.stack(each).detach() if k else each[0].detach() for each in zip(*of_all, strict=True))
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """Normalisation of [..., size] over each row (Ba et al. 2016) or over the batch (Ioffe & Szegedy 2015).

    Batch normalisation uses the statistics of the batch, and moves the running ones, where its own parameters learn;
    elsewhere, as in acting, in targets and where they are frozen, it uses the running ones, and so it does in eval
    mode. With k networks it normalises [k, n, size] for each of them.
    """

    def __init__(self, kind: str, size: int, k: int) -> None:
        super().__init__()
        shape = (k, size) if k else (size,)
        self.kind = kind
        self.mean: Tensor
        self.variance: Tensor
        self.weight, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape) if kind == "batch" else None)
        self.register_buffer("variance", torch.ones(shape) if kind == "batch" else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer" and self.weight.dim() == 1:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, LAYER_EPSILON)
        gain, shift = self._by_row(self.weight), self._by_row(self.bias)
        if self.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], eps=LAYER_EPSILON) * gain + shift
        if self.training and torch.is_grad_enabled() and _learns(self.weight):
            rows = x if self.weight.dim() == 2 else x.reshape(-1, x.shape[-1])
            variance, mean = torch.var_mean(rows, -2, correction=0)
            self._follow(mean.detach(), variance.detach())
        else:
            mean, variance = self.mean, self.variance
        scale = (self._by_row(variance) + BATCH_EPSILON).rsqrt() * gain
        return (x - self._by_row(mean)) * scale + shift

    def _by_row(self, x: Tensor) -> Tensor:
        """To be broadcast over rows."""
        return x.unsqueeze(-2) if self.weight.dim() == 2 else x

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        for running, x in ((self.mean, mean), (self.variance, variance)):
            move = (x - running).nan_to_num_(0.0, 0.0, 0.0)  # of a step that is skipped nothing stays
            running.add_(move, alpha=BATCH_MOMENTUM)  # lerp_ has no rule for vmap

    def first(self) -> Norm:
        """This normalisation of the first of k networks, constant."""
        one = Norm(self.kind, self.weight.shape[-1], 0)
        one.weight, one.bias = (nn.Parameter(x.detach()[0], False) for x in (self.weight, self.bias))
        if self.kind == "batch":
            one.mean, one.variance = self.mean[0], self.variance[0]
        return one


def _learns(parameter: Tensor) -> bool:
    """Whether it requires a gradient; vmap hides that of the stack of which it is one."""
    while torch._C._functorch.is_batchedtensor(parameter):
        parameter = torch._C._functorch.get_unwrapped(parameter)
    return parameter.requires_grad


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


class Layers:
    """Callable linear layers with an activation after each, whose parameters are looked up in modules at each call.

    For k networks of one shape, weights are [k, out, in] and biases [k, out], multiplied in one batch. `norms`
    normalise the first layers' outputs before their activations.
    """

    def __init__(
        self, places: Sequence[Place], activations: Sequence[str], norms: Sequence[Callable[[Tensor], Tensor]] = ()
    ) -> None:
        """`places`: the `_parameters` of a module for each layer, in which torch.func replaces parameters too."""
        self.places, self.activations, self.norms = list(places), tuple(activations), list(norms)

    def __reduce__(self) -> tuple[Any, ...]:
        # So that copies look into copies of the modules:
        return Layers, (self.places, self.activations, self.norms)

    @property
    def parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Weight [out, in] and bias [out] of each layer now."""
        return [(place["weight"], place["bias"]) for place in self.places]

    @property
    def flat(self) -> list[Tensor]:
        """The same in turn."""
        return [place[name] for place in self.places for name in ("weight", "bias")]

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out], or [k, n, in] to [k, n, out] for k networks."""
        for (weight, bias), norm, name in itertools.zip_longest(self.parameters, self.norms, self.activations):
            x = linear(x, weight, bias)
            x = ACTIVATIONS[name](norm(x) if norm else x)
        return x


class Network(nn.Module):
    """Linear layers of these sizes: [..., sizes[0]] to [..., sizes[-1]], or [k, n, ...] for k networks.

    `layers` looks the parameters up at each call, so what replaces them for a call (torch.func.functional_call, vmap
    over stacked networks) reaches this network as any other module.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str,
        last: str = "none",
        norm: str = "none",
        k: int = 0,
        gain: float = 0.0,
    ) -> None:
        """Args:
        sizes: of the input and the output of each layer.    activation: between the layers.
        last: after the last layer; a layer is normalised where it has an activation.
        k: networks, evaluated in one batched product; 0: one, without this dimension. Two of 256x256 with one output
            take 925 us for 256 rows in bfloat16 on one core of an AMD EPYC, instead of 1178 one after another.
        gain: of orthogonal initial weights; 0: torch's, as in the papers' code.
        """
        super().__init__()
        pairs = list(itertools.pairwise(sizes))
        every = [[_layer(*pair, gain) for pair in pairs] for _ in range(k or 1)]
        activations = [*[activation] * (len(pairs) - 1), last][: len(pairs)]
        normalized = [size for size, name in zip(sizes[1:], activations, strict=True) if name != "none"]
        self.k, self.in_size, self.size = k, sizes[0], sizes[-1]
        self.linears = nn.ModuleList(Linear(each, k) for each in zip(*every, strict=True))
        self.norms = nn.ModuleList(Norm(norm, size, k) for size in normalized if norm != "none")
        self.layers = Layers([each._parameters for each in self.linears], activations, list(self.norms))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def first(self, x: Tensor) -> Tensor:
        """Output [n, size] of the first of k networks, its parameters constant."""
        places = [{name: x.detach()[0] for name, x in place.items()} for place in self.layers.places]
        norms: list[Any] = [norm.first() for norm in self.norms]  # type: ignore[operator]
        return Layers(places, self.layers.activations, norms)(x)


def _layer(n_in: int, n_out: int, gain: float) -> nn.Module:
    layer = nn.Linear(n_in, n_out)
    return orthogonal(layer, gain) if gain else layer


def batch_statistics(network: nn.Module) -> list[Tensor]:
    """The running statistics of batch normalisation in our networks."""
    return [x for module in network.modules() if isinstance(module, Norm) for x in module.buffers()]
