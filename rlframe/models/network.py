"""Network: linear layers with activations and normalisation, one network or k of one shape at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlframe.kernels.matmul import linear
from rlframe.kernels.mlp import Layers, is_plain

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
        self._with_target: Layers | None = None  # k networks, then those of a target

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def first_with_rest(self, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Output of the first n rows of x [m, in_size], with gradient, and of the rest, without; in one product."""
        if is_plain() or self.layers.norms:
            with torch.no_grad():
                rest = self(x[n:])
            return self(x[:n]), rest
        return self.layers.partly(x, ((slice(n),), (slice(n, None),)), self.layers)

    def first(self, x: Tensor) -> Tensor:
        """Output [n, size] of the first of k networks, its parameters constant."""
        places = [{name: x.detach()[0] for name, x in place.items()} for place in self.layers.places]
        return Layers(places, self.layers.activations, [norm.first() for norm in self.norms])(x)  # type: ignore[operator]

    def with_target(self, target: Network, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output of these k networks, with gradient, and of k target networks, without, in one batch.

        x: [2 k, n, in_size], the inputs of these, then of the target.
        """
        k = self.k
        if is_plain() or self.layers.norms:
            with torch.no_grad():
                of_target = target(x[k:])
            return self(x[:k]), of_target
        return self.joined_with(target).partly(x, ((slice(k),), (slice(k, None),)), self.layers)

    @torch.no_grad()
    def joined_with(self, target: Network) -> Layers:
        """Layers of these networks, then of the target, whose parameters are moved side by side in memory if needed."""
        own, of_target = self.layers.flat, target.layers.flat
        if self._with_target is None or not all(map(_are_halves, self._with_target.flat, own, of_target)):
            both = list(map(_joined, own, of_target))
            places = [{"weight": weight, "bias": bias} for weight, bias in zip(both[::2], both[1::2], strict=True)]
            self._with_target = Layers(places, self.layers.activations)
        return self._with_target


def _layer(n_in: int, n_out: int, gain: float) -> nn.Module:
    layer = nn.Linear(n_in, n_out)
    return orthogonal(layer, gain) if gain else layer


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """Copy both [k, ...] into one [2 k, ...] and make them its halves."""
    both = torch.cat([one, other])
    one.data, other.data = both[: len(one)], both[len(one) :]
    return both


def _are_halves(both: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether both are still halves; moving a module to another device gives it new memory."""
    start = both.data_ptr()
    return one.data_ptr() == start and other.data_ptr() == start + one.nbytes


def batch_statistics(network: nn.Module) -> list[Tensor]:
    """The running statistics of batch normalisation in our networks."""
    return [x for module in network.modules() if isinstance(module, Norm) for x in module.buffers()]
