"""Convolutions on a CPU with ReLU after each, whose gradient is written out: images in the order that is fast there.

Channels come last: the gradient of the weights of Mnih et al.'s first layer takes a fifth of the time so. ReLU and its
gradient are taken in place, of bfloat16 by its bits, and autograd has one node for all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlframe.ops.layers import relu_, relu_backward
from rlframe.ops.precision import in_bf16


def writes_out(x: Tensor) -> bool:
    """Whether `convolved` is for these images: learning, on a CPU."""
    learns = not torch.is_inference_mode_enabled() and not torch.compiler.is_compiling()
    return x.device.type == "cpu" and learns and not x.requires_grad


def as_floats(x: Tensor) -> Tensor:
    """Images of any type as numbers for torch's own convolutions; of bytes, bfloat16 has all."""
    x = channels_last(x) if torch.is_grad_enabled() else x
    return x.bfloat16() if in_bf16() else x.float()


def convolved(x: Tensor, layers: Sequence[nn.Conv2d], scale: float = 1.0) -> Tensor:
    """Images [n, channels, height, width] of any type, times scale, through all layers, ReLU after each; with autograd.

    Returns [n, channels, height, width]; in bfloat16 where learning is in that.
    """
    strides = [layer.stride for layer in layers]
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    if torch.is_grad_enabled():
        y: Tensor = _Convolved.apply(channels_last(x), strides, scale, *parameters)
        return y
    for weight, bias, stride in _as_convolved(parameters, strides, scale):  # the images as they are: as fast
        x = relu_(F.conv2d(x.to(weight.dtype), weight, bias, stride))
    return x


def _as_convolved(
    parameters: Sequence[Tensor | None], strides: Sequence[Any], scale: float
) -> Iterator[tuple[Tensor, Tensor | None, Any]]:
    """Weight, bias and stride of each layer; the first one's weights are scaled, which are few, not the pixels."""
    dtype = torch.bfloat16 if in_bf16() else torch.float32
    for i, stride in enumerate(strides):
        weight, bias = parameters[2 * i], parameters[2 * i + 1]
        assert weight is not None
        yield (weight if i else weight * scale).to(dtype), None if bias is None else bias.to(dtype), stride


class _Convolved(torch.autograd.Function):
    """All layers as one step of autograd. Images get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strides: Sequence[Any], scale: float, *parameters: Tensor | None) -> Tensor:
        weights, seen = [], []
        for weight, bias, stride in _as_convolved(parameters, strides, scale):
            x = x.to(weight.dtype)
            weights.append(weight)
            seen.append(x)
            x = relu_(F.conv2d(x, weight, bias, stride))
        ctx.strides, ctx.scale, ctx.biases = strides, scale, [bias is not None for bias in parameters[1::2]]
        ctx.save_for_backward(*weights, *seen, x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        n = len(ctx.strides)
        weights, seen = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        found: list[Tensor | None] = [None] * (2 * n)
        gradient = gradient.to(seen[-1].dtype, memory_format=torch.channels_last, copy=True)
        for i in reversed(range(n)):
            gradient = relu_backward(gradient, seen[i + 1])
            wanted = [i > 0, True, ctx.biases[i]]
            no, one, stride = [0, 0], [1, 1], ctx.strides[i]
            gradient, of_weight, of_bias = torch.ops.aten.convolution_backward(
                gradient, seen[i], weights[i], [len(weights[i])], stride, no, one, False, no, 1, wanted
            )
            of_weight = of_weight.float().contiguous()
            found[2 * i] = of_weight if i else of_weight * ctx.scale
            found[2 * i + 1] = of_bias.float() if ctx.biases[i] else None
        return None, None, None, *found


def channels_last(x: Tensor) -> Tensor:
    """The same [n, channels, height, width], its channels last in memory.

    Stacks of four frames of bytes are packed as integers, in a third of the time.
    """
    if x.shape[1] != 4 or x.dtype != torch.uint8 or sys.byteorder != "little":
        return x.contiguous(memory_format=torch.channels_last)
    packed = x[:, 3].to(torch.int32, memory_format=torch.contiguous_format)
    for channel in (2, 1, 0):
        packed = packed.mul_(256).add_(x[:, channel])  # beyond 2**31 it wraps around to the right bits
    return packed.view(torch.uint8).view(*packed.shape, 4).permute(0, 3, 1, 2)
