"""Matrix products: on a CPU by oneDNN where torch has it, and of bfloat16 where learning is to be in that.

torch multiplies float32 matrices with MKL, whose kernels for AMD use half of the vector width: 256 x 256 x 256 takes
355 us on one core of an AMD EPYC, and 172 with oneDNN, which torch carries for its convolutions, or 92 of bfloat16.
Rounding differs in the last bits. The choice follows from shapes, so one machine computes the same again. A leading
dimension, where there is one, counts networks of one shape.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlframe.kernels.device import in_bf16

_LEAST = 3 * 2**18  # multiplications: below, oneDNN's preparations take longer than it gains
_SHORT = 12  # and where a side is shorter
_LEAST_ON_GPU = 2**27  # below, rounding the factors may take longer than it gains: by data sheets, not measured
_NARROW = 64  # columns of x: below, [n, o]^T [n, columns] takes half the time the other way round


def _request_consistent_rows() -> None:
    """Of MKL: that a row's products have the same bits however many rows there are, on Intel's processors as on others.

    Of few rows it takes as long as before, or less, but for 6 outputs of 1,024 rows twice as long. It is asked through
    the environment, before the first product of the process.
    """
    instructions = torch.backends.cpu.get_cpu_capability()
    if _is_intel() and instructions in ("AVX2", "AVX512"):
        os.environ.setdefault("MKL_CBWR", f"{instructions},STRICT")


def _is_intel() -> bool:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return "GenuineIntel" in file.read(1_000)
    except OSError:
        return "GenuineIntel" in platform.processor()


def _find_onednn_linear() -> Callable[..., Tensor] | None:
    """x [n, i], weight [o, i], bias [o] or None -> x weight^T + bias; None where torch was built without."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None


_request_consistent_rows()
_LINEAR = _find_onednn_linear()


def _use_onednn(n: int, i: int, o: int, x: Tensor) -> bool:
    if torch.compiler.is_compiling():  # a program for any n must not be that of one n, nor ask how many n are
        return False
    if n * i * o < _LEAST or min(n, i, o) < _SHORT:
        return False
    return x.is_cpu and x.dtype == torch.float32 and _LINEAR is not None


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert _LINEAR is not None  # as _use_onednn says
    if x.dim() == 2:
        return _LINEAR(x, weight, bias, "none", [], "")  # its own relu makes 0 of NaN
    biases = [None] * len(x) if bias is None else bias
    return torch.stack([_LINEAR(*each, "none", [], "") for each in zip(x, weight, biases, strict=True)])


def on_cpu(x: Tensor) -> bool:
    """Whether what a CPU alone gains by is for it: oneDNN, and bfloat16 as integers."""
    return x.is_cpu


def _use_bf16_on_gpu(n: int, i: int, o: int, x: Tensor) -> bool:
    """By bfloat16, if learning is in that; in float32 a GPU's products are torch's own."""
    if on_cpu(x) or torch.compiler.is_compiling():
        return False
    return in_bf16() and n * i * o >= _LEAST_ON_GPU and x.dtype == torch.float32


def cast_inputs(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What `affine` is to be given: bfloat16, where learning is in that and the layer is large, else float32."""
    dtype = torch.bfloat16 if in_bf16() and _use_bf16(x, weight) else weight.dtype
    return x.to(dtype), weight.to(dtype)


def _use_bf16(x: Tensor, weight: Tensor) -> bool:
    sizes = x.shape[-2], weight.shape[-1], weight.shape[-2]
    return _use_onednn(*sizes, weight) or _use_bf16_on_gpu(*sizes, weight)


def from_bf16(x: Tensor) -> Tensor:
    """float32 again, if it is bfloat16."""
    return x.float() if x.dtype == torch.bfloat16 else x


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., n, k] @ b [..., k, m], of one type, without autograd."""
    if a.shape[-1] == 1:  # from a single output: a quarter of the time
        return a * b
    return _onednn_linear(a, b.mT) if _use_onednn(a.shape[-2], a.shape[-1], b.shape[-1], a) else a @ b


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [..., n, i] weight^T [..., i, o], of one type, + bias [..., o]; without autograd."""
    rounded = x.dtype == torch.bfloat16
    if on_cpu(x) and x.dim() == 2 if rounded else _use_onednn(x.shape[-2], x.shape[-1], weight.shape[-2], x):
        return _onednn_linear(x, weight, bias)
    return _affine(x, weight, bias.to(x.dtype))


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if x.dim() == 2:
        return torch.addmm(bias, x, weight.t())
    if weight.shape[1] == 1:  # two thirds of the time
        return torch.baddbmm(bias.unsqueeze(1), weight, x.mT).mT
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """gradient [..., n, o]^T @ x [..., n, i]: that of a weight [..., o, i], contiguous as it; without autograd."""
    if x.shape[-1] < _NARROW and x.dtype != torch.bfloat16:
        return (x.mT @ gradient).mT.contiguous()
    return product(gradient.mT, x)


def bias_gradient(gradient: Tensor) -> Tensor:
    """Σ gradient [..., n, o]: that of a bias [..., o], in float32 or double."""
    return from_bf16(gradient.sum(-2))


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [..., i] weight^T + bias, as F.linear, with autograd; or of several networks, x [k, n, i], weight [k, o, i].

    In inference mode it is F.linear itself: rows that are acted for keep their bits however many there are.
    """
    if weight.dim() == 3:
        return _affine(x, weight, bias)
    n = x.numel() // x.shape[-1]
    sizes = n, x.shape[-1], weight.shape[0]
    if torch.is_inference_mode_enabled() or not (_use_onednn(*sizes, x) or _use_bf16_on_gpu(*sizes, x)):
        return F.linear(x, weight, bias)
    found: Tensor = _Linear.apply(x.reshape(n, -1), weight, bias)
    return found.view(*x.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    """dL/dx = g W, dL/dW = g^T x, dL/db = Σ g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x, weight = cast_inputs(x, weight)
        ctx.save_for_backward(x, weight)
        return from_bf16(affine(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rounded = gradient.to(weight.dtype)
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            from_bf16(product(rounded, weight)) if of_x else None,
            from_bf16(weight_gradient(rounded, x)) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )
