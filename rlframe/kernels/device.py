"""What kernels ask of a device: the precision of matrix products, and copies between host and GPU.

Learning may multiply in bfloat16 where the hardware does that faster. Sums, parameters, losses, targets and optimizers
stay float32, and so does acting: all samplers give the same bits. Used by models, algorithms, replay and the runners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from rlframe.core.errors import ConfigError

PRECISIONS = ("auto", "fp32", "bf16")

_current: ContextVar[str] = ContextVar("rlframe_precision", default="fp32")


def gpu_has_bf16_units(device: torch.device) -> bool:
    """Whether this GPU is here and multiplies bfloat16 itself; older ones only imitate it."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def has_bf16_units() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32, and torch has what uses that."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        capabilities = torch.cpu.get_capabilities()
    except AttributeError:  # an older torch does not tell
        return False
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def choose_precision(name: str, device: torch.device) -> str:
    """fp32 or bf16: `auto` is bf16 on a CPU that has units for it, else fp32: on a GPU its gain was never measured.

    Raises:
        ConfigError: bf16 is asked for where nothing is gained by it.
    """
    able = device.type == "cpu" and has_bf16_units()
    if name == "bf16" and not able and not gpu_has_bf16_units(device):
        what = f"device={device}" if device.type != "cpu" else "this CPU, which has neither avx512_bf16 nor amx_bf16"
        raise ConfigError(f"precision=bf16 is not for {what}; use precision=auto or fp32")
    return ("bf16" if able else "fp32") if name == "auto" else name


def in_bf16() -> bool:
    """Whether what is computed now takes bfloat16 inputs: inside `learning_in("bf16")`, but for acting."""
    return _current.get() == "bf16" and not torch.is_inference_mode_enabled()


@contextmanager
def learning_in(precision: str) -> Iterator[None]:
    """Inside, learning multiplies in this precision, fp32 or bf16; outside it is fp32."""
    products = torch.backends.cuda.matmul
    token, sums_in_bf16 = _current.set(precision), products.allow_bf16_reduced_precision_reduction
    products.allow_bf16_reduced_precision_reduction = False  # which cuBLAS else may do
    try:
        yield
    finally:
        products.allow_bf16_reduced_precision_reduction = sums_in_bf16
        _current.reset(token)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`: from pinned memory, since a copy from other memory may wait for all that a GPU has to do.

    Itself, where it is there already; else the host's memory may be written again as soon as this returns, unless it
    is pinned (see samplers.device.Pinned).
    """
    if tensor.device == device:
        return tensor
    if device.type != "cuda" or not tensor.is_cpu:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy to the host; a call of the result waits until the copy is complete, and gives it."""
    if tensor.device.type != "cuda":
        here = tensor.to("cpu", copy=True)
        return lambda: here
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        arrived.synchronize()
        return pinned

    return wait
