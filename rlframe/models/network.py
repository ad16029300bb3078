"""Network: linear layers with activations and normalisation, one network or k of one shape at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlframe.kernels.device import held_both_ways
from rlframe.kernels.matmul import linear

Place = Mapping[str, Any]  # where the weight and the bias of a layer are, by these names: the parameters of a module
Map = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Map] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "elu": F.elu,
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
}
NORMS = ("none", "layer", "batch", "renorm")
OF_BATCH = ("batch", "renorm")
LAYER_EPSILON, RMS_EPSILON = 1e-5, 1e-6
BATCH_EPSILON, BATCH_MOMENTUM = 1e-3, 0.01  # Bhatt et al. 2024 (CrossQ, arXiv 1902.05605)
RENORM_WARM_UP = 100_000  # batches that are normalised by their statistics alone, as in CrossQ's code
MOST_R, MOST_D = 3.0, 5.0  # limits of the correction after them, as in Ioffe 2017, section 3, and CrossQ's code


@contextmanager
def initial_weights(seed: int) -> Iterator[None]:
    """Context in which networks are made, on the CPU: torch draws from `seed`, and afterwards goes on as before."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats the stack for each kind of accelerator: 2 ms
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def orthogonal(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights and zero bias (Saxe et al. 2014; sqrt(2) as in Schulman et al.'s PPO code)."""
    assert isinstance(layer.weight, Tensor) and isinstance(layer.bias, Tensor)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def vectors(x: Tensor) -> nn.Parameter:
    """A parameter that is a vector, or one for each of k networks, [k, size], which is no matrix to an optimizer."""
    made = nn.Parameter(x)
    made.is_vectors = True  # type: ignore[attr-defined]
    return made


class Linear(nn.Module):
    """An affine map of one network, weight [out, in], or of k networks, [k, out, in], which starts as these layers."""

    bias: nn.Parameter | None

    def __init__(self, layers: Sequence[nn.Module], k: int, has_bias: bool = True) -> None:
        super().__init__()
        of_all: list[list[Tensor]] = [[layer.weight, layer.bias] for layer in layers]  # type: ignore[list-item]
        weight, bias = (torch.stack(each).detach() if k else each[0].detach() for each in zip(*of_all, strict=True))
        self.weight = nn.Parameter(weight)
        self.register_parameter("bias", vectors(bias) if has_bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """Normalisation of [..., size] over each row (Ba et al. 2016) or over the batch (Ioffe & Szegedy 2015).

    Batch normalisation uses the statistics of the batch, and moves the running ones, where its own parameters learn;
    elsewhere, as in acting, in targets and where they are frozen, it uses the running ones, and so it does in eval
    mode (see also `in_batch_statistics`). With k networks it normalises [k, n, size] for each of them.

    rms: x / √(mean x² + ε) of each row, with a gain and no shift (Zhang & Sennrich 2019, arXiv 1910.07467, eq. 4).
    renorm: batch renormalisation. x^ = (x - μ_B) / σ_B r + d, with the constants r = σ_B / σ in [1/3, 3] and
    d = (μ_B - μ) / σ in [-5, 5], so that learning sees nearly what acting sees   (Ioffe 2017, arXiv 1702.03275, eq. 4).
    """

    bias: Any  # None of rms

    def __init__(self, kind: str, size: int, k: int) -> None:
        super().__init__()
        shape, of_batch = (k, size) if k else (size,), kind in OF_BATCH
        self.kind = kind
        self.mean: Tensor
        self.variance: Tensor
        self.count: Tensor  # batches that the running statistics have seen
        self.weight = vectors(torch.ones(shape))
        self.register_parameter("bias", None if kind == "rms" else vectors(torch.zeros(shape)))
        self.register_buffer("mean", torch.zeros(shape) if of_batch else None)
        self.register_buffer("variance", torch.ones(shape) if of_batch else None)
        self.register_buffer("count", torch.zeros(shape[:-1]) if kind == "renorm" else None)
        self.uses_batch = False  # the batch's statistics, also where nothing learns

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer" and self.weight.dim() == 1:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, LAYER_EPSILON)
        gain: Tensor = self.weight
        if self.kind == "rms":
            return x * (x.square().mean(-1, keepdim=True) + RMS_EPSILON).rsqrt() * self._by_row(gain)
        shift: Tensor = self.bias
        if self.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], eps=LAYER_EPSILON) * self._by_row(gain) + self._by_row(shift)
        learns = self.training and torch.is_grad_enabled() and _learns(self.weight)
        if learns or self.uses_batch:
            return self._of_batch(x, learns)
        scale = (self._by_row(self.variance) + BATCH_EPSILON).rsqrt() * self._by_row(gain)
        return (x - self._by_row(self.mean)) * scale + self._by_row(shift)

    def _of_batch(self, x: Tensor, learns: bool) -> Tensor:
        """Normalised by the statistics of the batch, which one pass over x gives and another one uses.

        Var x = E[(x - c)²] - (E[x] - c)² loses few digits where c is near (Chan et al. 1983). Here c is one of the n
        rows, so that (E[x] - c)² <= n Var x, and rounding is at most n times as large.
        What depends on columns alone is held, so that a compiler does not compute it for each row.
        """
        x_2d = x if self.weight.dim() == 2 else x.reshape(-1, x.shape[-1])
        centre = x_2d[..., :1, :].detach().sum(-2)  # 0 of no rows
        rows = x_2d - self._by_row(centre)
        sums = held_both_ways(torch.stack([rows.sum(-2), rows.square().sum(-2)]))
        offset, square = (sums / rows.shape[-2]).unbind()
        variance = (square - offset.square()).clamp(min=0)
        found = (centre + offset).detach(), variance.detach()
        gain, shift = self.weight, self.bias
        if self.kind == "renorm":
            r, d = self._correction(*found)
            gain, shift = gain * r, torch.addcmul(shift, gain, d)
        if learns:
            self._follow(*found)
        scale = (variance + BATCH_EPSILON).rsqrt() * gain
        scale, shift = held_both_ways(torch.stack([scale, shift - offset * scale])).unbind()
        return (rows * self._by_row(scale) + self._by_row(shift)).view_as(x)

    def _by_row(self, x: Tensor) -> Tensor:
        """To be broadcast over rows."""
        return x.unsqueeze(-2) if self.weight.dim() == 2 else x

    def _correction(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """r and d of eq. 4; at first 1 and 0."""
        inverse = (self.variance + BATCH_EPSILON).rsqrt()
        r = ((variance + BATCH_EPSILON).sqrt() * inverse).clamp(1 / MOST_R, MOST_R)
        d = ((mean - self.mean) * inverse).clamp(-MOST_D, MOST_D)
        corrects = self.count.unsqueeze(-1) >= RENORM_WARM_UP
        return torch.where(corrects, r, 1.0), torch.where(corrects, d, 0.0)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        for running, x in ((self.mean, mean), (self.variance, variance)):
            move = (x - running).nan_to_num_(0.0, 0.0, 0.0)  # of a step that is skipped nothing stays
            running.add_(move, alpha=BATCH_MOMENTUM)  # lerp_ has no rule for vmap
        if self.kind == "renorm":
            self.count += 1.0

    def first(self) -> Norm:
        """This normalisation of the first of k networks, constant."""
        one = Norm(self.kind, self.weight.shape[-1], 0)
        for name, x in self.named_parameters():
            setattr(one, name, nn.Parameter(x.detach()[0], False))
        if self.kind in OF_BATCH:
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


@contextmanager
def in_batch_statistics(network: nn.Module) -> Iterator[None]:
    """Context in which batch normalisation uses the batch's statistics though nothing learns, and keeps none of them.

    So a target network sees a batch as the network that learns from it does (XQC, arXiv 2509.25174).
    """
    norms = [module for module in network.modules() if isinstance(module, Norm)]
    for norm in norms:
        norm.uses_batch = True
    try:
        yield
    finally:
        for norm in norms:
            norm.uses_batch = False


class Layers:
    """Callable linear layers with an activation after each, whose parameters are looked up in modules at each call.

    For k networks of one shape, weights are [k, out, in] and biases [k, out], multiplied in one batch. `norms`
    normalise the first layers' outputs, before their activations or after them.
    """

    def __init__(
        self,
        places: Sequence[Place],
        activations: Sequence[str],
        norms: Sequence[Map] = (),
        begin: Sequence[Map] = (),
        dropout: Sequence[Map] = (),
        norm_after: bool = False,
    ) -> None:
        """Args:
        places: the `_parameters` of a module for each layer, in which torch.func replaces parameters too.
        begin: of the input.    dropout: of each product that an activation follows; before the normalisation.
        norm_after: the activations come before the normalisation.
        """
        self.places, self.activations, self.norms = list(places), tuple(activations), list(norms)
        self.begin, self.dropout, self.norm_after = list(begin), list(dropout), norm_after
        self.ends: list[list[Map | str]] = []  # what follows each product, in turn: maps, and names of activations
        for name, norm in itertools.zip_longest(self.activations, self.norms):
            end = [name, norm] if norm_after else [norm, name]
            end = [part for part in end if part not in (None, "none")]
            self.ends.append([*self.dropout, *end] if end else [])

    def __reduce__(self) -> tuple[Any, ...]:
        # So that copies look into copies of the modules:
        return Layers, (self.places, self.activations, self.norms, self.begin, self.dropout, self.norm_after)

    @property
    def parameters(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight [out, in] and bias [out] or None of each layer now."""
        return [(place["weight"], place["bias"]) for place in self.places]

    @property
    def flat(self) -> list[Tensor]:
        """The same in turn, without None."""
        return [x for pair in self.parameters for x in pair if x is not None]

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out], or [k, n, in] to [k, n, out] for k networks."""
        x = through(self.begin, x)
        for (weight, bias), end in zip(self.parameters, self.ends, strict=True):
            x = through(end, linear(x, weight, bias))
        return x


def through(parts: Sequence[Map | str], x: Tensor) -> Tensor:
    """x mapped by these in turn; strings are names of activations."""
    for part in parts:
        x = ACTIVATIONS[part](x) if isinstance(part, str) else part(x)
    return x


class LayerOptions(NamedTuple):
    """What networks of actors and critics may have, beside the normalisation of their layers."""

    norm_input: bool = False  # the input is normalised too
    norm_after: bool = False  # normalisation comes after the activations, not before
    dropout: float = 0.0  # probability of 0, of each number before normalisation and activation
    unit_rows: bool = False  # weights of length 1 for each output, at first and after each step; see `Units`
    unit_gains: bool = False  # and gains and shifts of mean square 1 for each normalisation


PLAIN = LayerOptions()


class Body(nn.Module):
    """Base class of networks of vectors: [..., in_size] to [..., size], or [k, n, ...] for k networks."""

    linears: nn.ModuleList

    def __init__(self, in_size: int, size: int, k: int, options: LayerOptions) -> None:
        """`k`: networks of one shape, evaluated side by side; 0: one, without this dimension."""
        super().__init__()
        self.in_size, self.size, self.k, self.options = in_size, size, k, options

    @property
    def last(self) -> Linear:
        """The last layer."""
        found: Any = self.linears[-1]
        return found


class Network(Body):
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
        options: LayerOptions = PLAIN,
    ) -> None:
        """Args:
        sizes: of the input and the output of each layer.    activation: between the layers.
        last: after the last layer; a layer is normalised where it has an activation.
            No bias is before a batch normalisation, which would cancel it and leave it gradients of mere rounding.
        k: networks, evaluated in one batched product; 0: one, without this dimension. Two are faster so than
            one after another.
        gain: of orthogonal initial weights; 0: torch's, as in the papers' code.
        """
        super().__init__(sizes[0], sizes[-1], k, options)
        pairs = list(itertools.pairwise(sizes))
        gain = 1.0 if options.unit_rows else gain
        activations = [*[activation] * (len(pairs) - 1), last][: len(pairs)]
        normalized = [size for size, name in zip(sizes[1:], activations, strict=True) if name != "none"]
        normalized = [] if norm == "none" else normalized
        cancels = norm in OF_BATCH and not (options.norm_after or options.dropout)
        biases = [not (cancels and name != "none") for name in activations]
        every = [[_layer(*pair, gain) for pair in pairs] for _ in range(k or 1)]
        self.linears = nn.ModuleList(
            Linear(each, k, has_bias) for each, has_bias in zip(zip(*every, strict=True), biases, strict=True)
        )
        self.norms = nn.ModuleList(Norm(norm, size, k) for size in normalized)
        self.begin = nn.ModuleList([Norm(norm, sizes[0], k)] if options.norm_input and norm != "none" else [])
        self.dropout = nn.ModuleList([nn.Dropout(options.dropout)] if options.dropout else [])
        more = list(self.norms), list(self.begin), list(self.dropout), options.norm_after
        self.layers = Layers([each._parameters for each in self.linears], activations, *more)
        Units.of(self).project()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def first(self, x: Tensor) -> Tensor:
        """Output [n, size] of the first of k networks, its parameters constant."""
        places = [
            {name: None if x is None else x.detach()[0] for name, x in place.items()} for place in self.layers.places
        ]
        norms, begin = ([norm.first() for norm in each] for each in (self.norms, self.begin))  # type: ignore[operator]
        more = norms, begin, list(self.dropout), self.layers.norm_after
        return Layers(places, self.layers.activations, *more)(x)


def _layer(n_in: int, n_out: int, gain: float) -> nn.Module:
    layer = nn.Linear(n_in, n_out)
    return orthogonal(layer, gain) if gain else layer


def layers_of(n_in: int, n_out: int, k: int, gain: float, has_bias: bool = False) -> Linear:
    """A layer of each of k networks, with initial weights of their own; `gain` of orthogonal ones, 0: torch's."""
    return Linear([_layer(n_in, n_out, gain) for _ in range(k or 1)], k, has_bias)


class Units(NamedTuple):
    """What is brought back to unit length after each step, in networks with `unit_rows` or `unit_gains`.

    So an update changes it by the same part throughout a run (XQC, arXiv 2509.25174; FlashSAC, arXiv 2604.04539).
    """

    rows: list[Tensor]  # weights [..., out, in], each output's of L2 norm 1, which a normalisation after it cancels
    gains: list[list[Tensor]]  # gain, and shift if there is one, [..., d] of a normalisation, together of norm √d

    @classmethod
    def of(cls, *networks: nn.Module) -> Units:
        """Those of the Bodies in these networks."""
        bodies = [module for network in networks for module in network.modules() if isinstance(module, Body)]
        rows = [x.weight for each in bodies if each.options.unit_rows for x in each.modules() if isinstance(x, Linear)]
        norms = [x for each in bodies if each.options.unit_gains for x in each.modules() if isinstance(x, Norm)]
        return cls(list(rows), [list(norm.parameters()) for norm in norms])

    @torch.no_grad()
    def project(self, skipped: Tensor | None = None) -> None:
        """Divide them by their lengths, in place; `skipped`: float32 [], 1.0 to change nothing."""
        lengths = [torch.linalg.vector_norm(weight, dim=-1, keepdim=True) for weight in self.rows]
        squares = [torch.stack(each).square().mean(-1, keepdim=True).sum(0) for each in self.gains]
        lengths += [square.sqrt() for each, square in zip(self.gains, squares, strict=True) for _ in each]
        if skipped is not None:
            lengths = [torch.where(skipped == 1, 1.0, length) for length in lengths]
        if lengths:
            torch._foreach_div_([*self.rows, *(x for each in self.gains for x in each)], lengths)


NO_UNITS = Units([], [])


def batch_statistics(network: nn.Module) -> list[Tensor]:
    """The running statistics of batch normalisation in our networks."""
    return [x for module in network.modules() if isinstance(module, Norm) for x in module.buffers()]
