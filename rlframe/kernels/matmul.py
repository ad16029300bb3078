"""Linear layers of learning: in bfloat16 where learning uses it, and in float32 by the library that is faster.

torch multiplies float32 matrices with MKL, whose kernels for AMD use half of the vector width; there oneDNN, which
torch has for its convolutions, is faster. On an Intel Xeon MKL is, for weight gradients and for two networks at once.
The last bits differ. Shapes alone decide, so one machine reproduces its results. A leading dimension counts networks.

Small products, as those of layers of 64x64 with 128 rows, stay in float32, which is faster there.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.kernels.device import in_bf16, is_recording

_LEAST = 3 * 2**18  # multiplications; below, the overhead of oneDNN exceeds its gain
_LEAST_IN_GRAPH = 2**22  # of a call in a compiled update
_SHORT = 12  # shortest side of a matrix for oneDNN
_LEAST_SIDE = 64  # shortest side of a weight that is rounded to bfloat16
_MOST_IN_FP32 = 2**20  # multiplications; with more the gain of bfloat16 exceeds the time of rounding


def _request_consistent_rows() -> None:
    """Make MKL on Intel give a row the same bits for any number of rows, as it does on other processors.

    Set through the environment, before the first product of the process. A product of few rows takes no longer; 6
    outputs of 1,024 rows take twice as long.
    """
    instructions = torch.backends.cpu.get_cpu_capability()
    if _IS_INTEL and instructions in ("AVX2", "AVX512"):
        os.environ.setdefault("MKL_CBWR", f"{instructions},STRICT")


def _is_intel() -> bool:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return "GenuineIntel" in file.read(1_000)
    except OSError:
        return "GenuineIntel" in platform.processor()


def _find_onednn_linear() -> Callable[..., Tensor] | None:
    """oneDNN's x [n, i] weight [o, i]^T + bias [o] or None; None where torch was built without it."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None


_IS_INTEL = _is_intel()
_request_consistent_rows()
_LINEAR = _find_onednn_linear()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., i] weight^T [i, o] + bias [o] or 0; also for k networks: x [k, n, i], weight [k, o, i], bias [k, o].

    In inference mode it is F.linear itself, so that acting gives a row the same bits for any number of rows.
    """
    if in_bf16() and min(weight.shape[-2:]) >= _LEAST_SIDE and math.prod(_sizes(x, weight)) > _MOST_IN_FP32:
        product = _without_bias(x.bfloat16(), weight.bfloat16()).float()
        return product if bias is None else product + (bias if weight.dim() == 2 else bias.unsqueeze(1))
    if _use_onednn(x, weight):
        return _by_onednn(x, weight, bias)
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    if bias is None:
        return _without_bias(x, weight)
    if weight.shape[1] == 1:  # two thirds of the time
        return torch.baddbmm(bias.unsqueeze(1), weight, x.mT).mT
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _without_bias(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T; of k networks by bmm, since `@` adds views that hide a transposed gradient (see updates.recorded)."""
    return torch.bmm(x, weight.mT) if weight.dim() == 3 else x @ weight.mT


def _use_onednn(x: Tensor, weight: Tensor) -> bool:
    if _LINEAR is None or _IS_INTEL or not x.is_cpu or x.dtype != torch.float32:
        return False
    if (
        torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or torch._C._are_functorch_transforms_active()
    ):
        return False  # a program for any number of rows; acting; torch.func has no rule for it
    sizes = _sizes(x, weight)
    return math.prod(sizes) >= (_LEAST_IN_GRAPH if is_recording() else _LEAST) and min(sizes) >= _SHORT


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Rows, inputs and outputs of each network's product."""
    o, i = weight.shape[-2:]
    return x.numel() // x.shape[-1] // (len(x) if weight.dim() == 3 else 1), i, o


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dim() == 3:
        biases = [None] * len(weight) if bias is None else bias
        return torch.stack([_by_onednn(*each) for each in zip(x, weight, biases, strict=True)])
    y: Tensor = _OneDnn.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], -1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] @ b [k, m]."""
    if torch.is_grad_enabled():  # of a gradient's gradient
        return a @ b
    return _onednn(a.contiguous(), b.t().contiguous(), None)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, i] weight [o, i]^T + bias [o]; in a graph that is recorded it is one call."""
    if is_recording():
        return _operation()(x, weight, bias)
    assert _LINEAR is not None  # checked by _use_onednn
    return _LINEAR(x, weight, bias, "none", [], "")  # its fused relu would turn NaN into 0


@cache
def _operation() -> Callable[..., Tensor]:
    @torch.library.custom_op("rlframe::onednn_linear", mutates_args=())
    def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert _LINEAR is not None
        return _LINEAR(x, weight, bias, "none", [], "")

    @onednn_linear.register_fake
    def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty(len(x), len(weight))

    @onednn_linear.register_vmap
    def _(info: Any, dims: tuple[int | None, ...], *tensors: Tensor | None) -> tuple[Tensor, int]:
        each = [
            [x] * info.batch_size if x is None or dim is None else x.unbind(dim)
            for x, dim in zip(tensors, dims, strict=True)
        ]
        return torch.stack([onednn_linear(*own) for own in zip(*each, strict=True)]), 0

    return onednn_linear


class _OneDnn(torch.autograd.Function):
    """y = x W^T + b;  dL/dx = g W, dL/dW = g^T x, dL/db = Σ g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _product(gradient, weight) if of_x else None,
            _product(gradient.t(), x) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )
