"""Matrix products of training: the fastest library on a CPU, bfloat16 where learning uses it; for mlp and q_network.

torch multiplies float32 matrices with MKL, whose kernels for AMD use half of the vector width: 256 x 256 x 256 takes
355 us on one core of an AMD EPYC, 172 with oneDNN (part of torch, for its convolutions) and 92 in bfloat16. On an Intel
Xeon MKL takes 221, and 10 to 20 % less than oneDNN for weight gradients and for two networks at once. The last bits
differ. Shapes alone decide, so one machine reproduces its results. A leading dimension counts networks.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlframe.kernels.device import in_bf16

_LEAST = 3 * 2**18  # multiplications; below, the overhead of oneDNN exceeds its gain
_SHORT = 12  # shortest side of a matrix for oneDNN
_LEAST_ON_GPU = 2**27  # below, rounding the factors may cost more than it gains (from data sheets, not measured)
_LEAST_SIDE = 64  # of a weight that compiled updates multiply in bfloat16
_NARROW = 64  # columns of x; below, the transposed product takes half the time

_plain: ContextVar[bool] = ContextVar("rlframe_plain_networks", default=False)


@contextmanager
def plain_networks() -> Iterator[None]:
    """Use ordinary torch operations for networks and losses: for hooks, double backward, torch.func, debugging."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def is_plain() -> bool:
    """Whether networks and losses use ordinary torch operations: in `plain_networks`, torch.func and torch.compile."""
    return _plain.get() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


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


def _use_onednn(n: int, i: int, o: int, x: Tensor) -> bool:
    if torch.compiler.is_compiling():  # a compiled program must not depend on n
        return False
    if n * i * o < _LEAST or min(n, i, o) < _SHORT:
        return False
    return x.is_cpu and x.dtype == torch.float32 and _LINEAR is not None and (in_bf16() or not _IS_INTEL)


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert _LINEAR is not None  # checked by _use_onednn
    if x.dim() == 2:
        return _LINEAR(x, weight, bias, "none", [], "")  # its fused relu would turn NaN into 0
    biases = [None] * len(x) if bias is None else bias
    return torch.stack([_LINEAR(*each, "none", [], "") for each in zip(x, weight, biases, strict=True)])


def on_cpu(x: Tensor) -> bool:
    """Whether to use the fast paths of a CPU; the tests of the GPU's paths replace this function."""
    return x.is_cpu


def _use_bf16_on_gpu(n: int, i: int, o: int, x: Tensor) -> bool:
    """Whether a GPU multiplies these in bfloat16; its float32 products are torch's own."""
    if on_cpu(x) or torch.compiler.is_compiling():
        return False
    return in_bf16() and n * i * o >= _LEAST_ON_GPU and x.dtype == torch.float32


def cast_inputs(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs for `affine`: in bfloat16 if learning uses it and the layer is large, else in the type of the weight."""
    sizes = x.shape[-2], weight.shape[-1], weight.shape[-2]
    rounded = in_bf16() and (_use_onednn(*sizes, weight) or _use_bf16_on_gpu(*sizes, weight))
    dtype = torch.bfloat16 if rounded else weight.dtype
    return x.to(dtype), weight.to(dtype)


def from_bf16(x: Tensor) -> Tensor:
    """bfloat16 to float32; other types unchanged."""
    return x.float() if x.dtype == torch.bfloat16 else x


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., n, k] @ b [..., k, m] of one type, without autograd."""
    if a.shape[-1] == 1:  # a single output: a quarter of the time
        return a * b
    return _onednn_linear(a, b.mT) if _use_onednn(a.shape[-2], a.shape[-1], b.shape[-1], a) else a @ b


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [..., n, i] weight^T [..., i, o] + bias [..., o], x and weight of one type, without autograd."""
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
    """dL/d weight [..., o, i] = gradient [..., n, o]^T @ x [..., n, i], contiguous, without autograd."""
    if x.shape[-1] < _NARROW and x.dtype != torch.bfloat16:
        return (x.mT @ gradient).mT.contiguous()
    return product(gradient.mT, x)


def bias_gradient(gradient: Tensor) -> Tensor:
    """dL/d bias [..., o] = Σ_n gradient [..., n, o], in float32 or double."""
    return from_bf16(gradient.sum(-2))


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """F.linear with autograd; also for k networks at once: x [k, n, i], weight [k, o, i], bias [k, o].

    In inference mode it is F.linear itself, so that acting gives a row the same bits for any number of rows.
    """
    if is_plain() and in_bf16() and min(weight.shape[-2:]) >= _LEAST_SIDE:
        return (x.bfloat16() @ weight.bfloat16().mT).float() + bias.unsqueeze(-2)
    if weight.dim() == 3:
        return _affine(x, weight, bias)
    n = x.numel() // x.shape[-1]
    sizes = n, x.shape[-1], weight.shape[0]
    fast = not torch.is_inference_mode_enabled() and (_use_onednn(*sizes, x) or _use_bf16_on_gpu(*sizes, x))
    if not fast or is_plain():
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x.reshape(n, -1), weight, bias)
    return y.view(*x.shape[:-1], -1)


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
