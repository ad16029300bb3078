"""Networks in NumPy, for acting on a CPU: a few vectors, or one image, in half of torch's time.

Each function returns the NumPy counterpart of a module, on views of its parameters, so that changes to them take effect
at once. Rows are multiplied in blocks of `BLOCK`, so that a row gets the same bits however the environments are split
over processes. Used by the models' `numpy_forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor, nn

from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs
from rlframe.models.convolutions import FirstConv2d
from rlframe.models.encoders import ConvNet, Encoder, Image, Vector
from rlframe.models.heads import VARIANCE, GaussianHead, JointHead, StateDependentHead
from rlframe.models.memory import Memory
from rlframe.models.network import BATCH_EPSILON, LAYER_EPSILON, RMS_EPSILON, Body, Layers, Linear, Network, Norm
from rlframe.models.normalize import CLIP, EPSILON, ObservationNorm, RunningNorm
from rlframe.models.residual import ResidualNetwork

BLOCK = 4  # rows per matrix product; 8 x 256 by 256 x 256 takes 12 us, in one block or in two

_MANY = 2_000  # numbers from which torch's relu is faster: of 15,000 NumPy takes 5.9 us, torch 1.7
_ZERO, _GELU = np.float32(0), np.float32(2 * (2 / np.pi) ** 0.5)
Array = np.ndarray
Map = Callable[[Array], Array]  # maps K blocks of b rows [K, b, F], or a single block [b, F]


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def _relu(x: Array) -> Array:
    if x.size < _MANY:
        return np.maximum(x, _ZERO, out=x)
    return torch.from_numpy(x).relu_().numpy()


ACTIVATIONS: dict[str, Map] = {  # which may overwrite x
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": _relu,
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * sigmoid(_GELU * (x + np.float32(0.044715) * x * x * x)),  # F.gelu with approximate="tanh"
}


def in_blocks(tree: Tree, n: int) -> Tree:
    """Rows [n, ...] as [n / b, b, ...]; b is 1 if BLOCK does not divide n. A single block is left unchanged."""
    b = 1 if n % BLOCK else BLOCK
    if n == b:
        return tree
    if isinstance(tree, np.ndarray):
        return tree.reshape(n // b, b, *tree.shape[1:])
    if tree == ():  # no memory
        return tree
    return map_tree(lambda x: x.reshape(n // b, b, *x.shape[1:]), tree)


def in_rows(tree: Tree, n: int) -> Tree:
    """The inverse of `in_blocks`."""
    return tree if tree == () else map_tree(lambda x: x.reshape(n, *x.shape[-1:]), tree)


def affine(weight: Tensor, bias: Tensor | None) -> Map:
    """x weight^T + bias or 0, as nn.Linear."""
    w, b = as_numpy(weight).T, None if bias is None else as_numpy(bias)

    def forward(x: Array) -> Array:
        y: Array = x.dot(w) if x.ndim == 2 else np.matmul(x, w)  # dot takes half the time for one block
        if b is not None:
            y += b
        return y

    return forward


def mlp(layers: Layers) -> Map:
    """Linear layers with what follows each."""
    maps = maps_of(layers.begin)
    for pair, end in zip(layers.parameters, layers.ends, strict=True):
        maps += [affine(*pair), *maps_of(end)]

    def forward(x: Array) -> Array:
        for each in maps:
            x = each(x)
        return x

    return forward


def body(network: Body) -> Map | None:
    """Layers or residual blocks; None of those on a sphere."""
    if isinstance(network, Network):
        return mlp(network.layers)
    if not isinstance(network, ResidualNetwork):
        return None
    embed, out = mlp(network.embed), mlp(network.head)
    blocks = [mlp(block.layers) for block in network.blocks]  # type: ignore[arg-type]

    def forward(x: Array) -> Array:
        x = embed(x)
        for block in blocks:
            x = x + block(x)
        return out(x)

    return forward


def maps_of(parts: Sequence[Any]) -> list[Map]:
    """Activations by their names, and normalisation; dropout is of learning alone."""
    known = [part for part in parts if not isinstance(part, nn.Dropout)]
    return [ACTIVATIONS[part] if isinstance(part, str) else normalization(part) for part in known]


def normalization(module: Any) -> Map:
    """Rows normalised as `Norm` does where it does not learn."""
    assert isinstance(module, Norm)
    g = as_numpy(module.weight)

    def by_mean_square(x: Array) -> Array:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(RMS_EPSILON)) * g

    if module.kind == "rms":
        return by_mean_square
    s, batch = as_numpy(module.bias), module.kind != "layer"
    mean, variance = (as_numpy(module.mean), as_numpy(module.variance)) if batch else (g, g)

    def by_running_statistics(x: Array) -> Array:
        return (x - mean) / np.sqrt(variance + np.float32(BATCH_EPSILON)) * g + s

    weight, bias = module.weight.detach(), module.bias.detach()

    def by_row(x: Array) -> Array:  # torch's takes a third of the time, and rounds a row alike among any others
        rows = torch.from_numpy(x if x.flags.writeable else x.copy())
        return torch.layer_norm(rows, rows.shape[-1:], weight, bias, LAYER_EPSILON).numpy()

    return by_running_statistics if batch else by_row


def vector(module: nn.Module) -> Map:
    """Float features of a vector, number or class."""
    assert isinstance(module, Vector)
    ndim, scale = module.ndim, np.float32(module.scale)
    classes = [np.arange(n) for n in module.classes]

    def forward(x: Array) -> Array:
        if ndim != 1:
            x = x.reshape(*x.shape[: x.ndim - ndim], -1)
        if classes:
            hot = [x[..., [i]] == numbers for i, numbers in enumerate(classes)]
            return np.concatenate(hot, -1).astype(np.float32)
        x = x.astype(np.float32, copy=False)
        return x if scale == 1 else x * scale

    return forward


def image(module: nn.Module) -> Map | None:
    """Features [1, F] of one image [1, ...], valid until the next call; None unless it is a plain `ConvNet`."""
    assert isinstance(module, nn.Sequential)
    pixels, body = module[0], module[1]
    assert isinstance(pixels, Image)
    if not isinstance(body, ConvNet) or not body.plain:
        return None
    first = x = np.empty(pixels.shape, np.float32)
    steps = []
    for part in body.convolutions():
        step, x = _convolution(part, x)
        steps.append(step)
    features, last = x.reshape(1, -1), pixels.channels_last

    def forward(row: Array) -> Array:
        image = np.moveaxis(row[0], -1, -3) if last else row[0]
        first[...] = image.reshape(first.shape)
        for step in steps:
            step()
        return features

    return forward


def _convolution(module: nn.Conv2d, x: Array) -> tuple[Callable[[], None], Array]:
    """A function that computes relu(module(x)) of the array x [c, h, w] as it is then, and its output [o, h', w']."""
    weight, bias = as_numpy(module.weight), as_numpy(module.bias)
    seen = sliding_window_view(x, weight.shape[2:], (1, 2))[:, :: module.stride[0], :: module.stride[1]]
    seen = seen.transpose(0, 3, 4, 1, 2)  # [c, k, k, h', w'] pixels of each weight
    patches, y = np.empty(seen.shape, np.float32), np.empty((len(weight), *seen.shape[3:]), np.float32)
    rows, products = patches.reshape(weight[0].size, -1), y.reshape(len(y), -1)
    scale = np.float32(module.scale if isinstance(module, FirstConv2d) else 1)

    def forward() -> None:
        patches[...] = seen
        factors = weight.reshape(len(weight), -1)
        np.matmul(factors if scale == 1 else factors * scale, rows, out=products)
        np.add(products, bias[:, None], out=products)
        np.maximum(products, 0, out=products)

    return forward, y


def encoder(module: nn.Module, n: int) -> Callable[[Tree], Array] | None:
    """Features of n observations; None for several images or other encoders, where torch is faster."""
    if not isinstance(module, Encoder) or (any(module.order) and n > 1):
        return None
    vectors, images = iter(module.leaves), iter(module.image_leaves)
    found = [image(next(images)) if is_image else vector(next(vectors)) for is_image in module.order]
    parts = [part for part in found if part]
    if len(parts) < len(found):
        return None
    body = mlp(module.mlp.layers)
    if len(parts) == 1:
        only = parts[0]
        return lambda observation: body(only(leaves(observation)[0]))
    return lambda observation: body(_side_by_side(parts, leaves(observation)))


def _side_by_side(maps: Sequence[Map], arrays: Sequence[Array]) -> Array:
    return np.concatenate([f(x) for f, x in zip(maps, arrays, strict=True)], -1)


def head(module: nn.Module) -> Map:
    """The parameters of a distribution, or a value."""
    match module:
        case GaussianHead():
            mean, log_std = head(module.mean), as_numpy(module.log_std)

            def gaussian(x: Array) -> Array:
                found = mean(x)
                return np.concatenate([found, np.broadcast_to(log_std, found.shape)], -1)

            return gaussian
        case StateDependentHead():
            return _state_dependent(head(module.mean), as_numpy(module.log_std))
        case JointHead():
            parts = [head(part) for part in module.heads]
            return lambda x: _side_by_side(parts, [x] * len(parts))
        case nn.Linear() | Linear():
            return affine(module.weight, module.bias)
        case nn.Identity():
            return lambda x: x
    raise TypeError(f"{type(module).__name__} is not a known head")


def _state_dependent(mean: Map, log_std: Array) -> Map:
    def forward(x: Array) -> Array:
        variance = np.matmul(x * x, np.exp(2 * log_std)) + np.float32(VARIANCE)
        return np.concatenate([mean(x), np.float32(0.5) * np.log(variance)], -1)

    return forward


def normalizer(module: ObservationNorm) -> Callable[[Tree], Tree]:
    """Normalises float vectors; the other parts pass through unchanged."""
    parts = [running_norm(part) if isinstance(part, RunningNorm) else lambda x: x for part in module.by_leaf]

    def forward(observation: Tree) -> Tree:
        left = iter(parts)
        return map_tree(lambda x: next(left)(x), observation)

    return forward


def running_norm(module: RunningNorm) -> Map:
    """Normalises one vector by the current statistics."""
    mean, variance = as_numpy(module.mean), as_numpy(module.variance)

    def forward(x: Array) -> Array:
        scaled = (x - mean.astype(np.float32)) * (1 / np.sqrt(variance + EPSILON)).astype(np.float32)
        return np.minimum(np.maximum(scaled, -CLIP, out=scaled), CLIP, out=scaled)

    return forward


def memory(module: Memory) -> Callable[[Array, Array, Tree], tuple[Array, Tree]]:
    """One step: features in blocks, `first` [n] and state in blocks to outputs and the next state."""
    rnn = module.rnn
    of_input = affine(rnn.weight_ih_l0, rnn.bias_ih_l0)  # type: ignore[arg-type]
    of_state = affine(rnn.weight_hh_l0, rnn.bias_hh_l0)  # type: ignore[arg-type]
    cell = _lstm if isinstance(rnn, nn.LSTM) else _gru

    def forward(x: Array, first: Array, state: Tree) -> tuple[Array, Tree]:
        keep = in_blocks(~first[:, None], len(first))
        before = tuple(s * keep for s in state)
        after = cell(of_input(x), of_state(before[0]), before)
        return after[0], after

    return forward


def _lstm(x: Array, h: Array, before: tuple[Array, ...]) -> tuple[Array, ...]:
    """Hochreiter & Schmidhuber 1997 with forget gates, torch's order: input, forget, cell, output."""
    i, f, g, o = np.split(x + h, 4, -1)
    c = sigmoid(f) * before[1] + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def _gru(x: Array, h: Array, before: tuple[Array, ...]) -> tuple[Array, ...]:
    """Cho et al. 2014 with the reset gate after the product, torch's order: reset, update, new."""
    (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(x, 3, -1), np.split(h, 3, -1)
    z = sigmoid(x_z + h_z)
    n = np.tanh(x_n + sigmoid(x_r + h_r) * h_n)
    return ((1 - z) * n + z * before[0],)


def feedback(modules: nn.ModuleList) -> Callable[[AgentInputs], Array]:
    """The previous action and reward [n] as features in blocks, zero at the start of an episode."""
    parts = [vector(part) for part in modules if isinstance(part, Vector)]

    def forward(inputs: AgentInputs) -> Array:
        actions = _side_by_side(parts, leaves(inputs.prev_action))
        rows = np.concatenate([actions, inputs.prev_reward[:, None]], -1) * ~inputs.first[:, None]
        return in_blocks(rows, len(rows))

    return forward
