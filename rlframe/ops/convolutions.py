"""Convolutions on a CPU with ReLU after each, whose gradient is written out: images in the order that is fast there.

Channels come last: the gradient of the weights of Mnih et al.'s first layer takes a fifth of the time so. ReLU is part
of the convolution (by oneDNN, which torch carries), its gradient is taken in place, and autograd has one node for all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlframe.ops.layers import ACTIVATIONS
from rlframe.ops.precision import in_bf16

_CHANNELS_LAST = torch.channels_last
_one_dnn = getattr(torch.ops.mkldnn, "_convolution_pointwise", None) if torch.backends.mkldnn.is_available() else None


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

    Returns [n, channels, height, width], channels last in memory; in bfloat16 where learning is in that.
    """
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    strides = tuple(tuple(layer.stride) for layer in layers)
    y: Tensor = _Convolved.apply(x, strides, scale, *parameters)
    return y


class _Convolved(torch.autograd.Function):
    """All layers as one step of autograd. Images get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strides: tuple[Any, ...], scale: float, *parameters: Tensor) -> Tensor:
        dtype = torch.bfloat16 if in_bf16() else torch.float32
        x = channels_last(x) if any(ctx.needs_input_grad) else x  # forward alone is as fast as it is
        x, weights, seen = x.to(dtype), [], []
        for i, stride in enumerate(strides):
            weight, bias = parameters[2 * i], parameters[2 * i + 1].to(dtype)
            weight = (weight if i else weight * scale).to(dtype)  # which are few, unlike the pixels
            seen.append(x)
            weights.append(weight)
            x = _with_relu(x, weight, bias, stride)
        ctx.strides, ctx.scale = strides, scale
        ctx.save_for_backward(*weights, *seen, x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        n = len(ctx.strides)
        weights, seen = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        found: list[Tensor | None] = [None] * (2 * n)
        gradient = gradient.to(seen[-1].dtype, memory_format=_CHANNELS_LAST, copy=True)
        for i in reversed(range(n)):
            gradient = ACTIVATIONS["relu"].backward(gradient, seen[i + 1])
            wanted = [i > 0, True, True]
            no, one, stride = [0, 0], [1, 1], ctx.strides[i]
            gradient, of_weight, of_bias = torch.ops.aten.convolution_backward(
                gradient, seen[i], weights[i], [len(weights[i])], stride, no, one, False, no, 1, wanted
            )
            of_weight = of_weight.float().contiguous()
            found[2 * i : 2 * i + 2] = [of_weight if i else of_weight * ctx.scale, of_bias.float()]
        return None, None, None, *found


def _with_relu(x: Tensor, weight: Tensor, bias: Tensor, stride: Sequence[int]) -> Tensor:
    if _one_dnn is None:
        return F.conv2d(x, weight, bias, stride).relu_()
    return _one_dnn(x, weight, bias, [0, 0], stride, [1, 1], 1, "relu", [], "")


def channels_last(x: Tensor) -> Tensor:
    """The same [n, channels, height, width], its channels last in memory.

    Stacks of four frames of bytes are packed as integers, in a third of the time.
    """
    if x.shape[1] != 4 or x.dtype != torch.uint8 or sys.byteorder != "little":
        return x.contiguous(memory_format=_CHANNELS_LAST)
    packed = x[:, 3].int()
    for channel in (2, 1, 0):
        packed = packed.mul_(256).add_(x[:, channel])  # beyond 2**31 it wraps around to the right bits
    return packed.view(torch.uint8).view(*packed.shape, 4).permute(0, 3, 1, 2)
