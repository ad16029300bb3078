"""Precision: whether matrix products of learning take bfloat16 inputs, where a CPU or a GPU has units for them.

Sums, parameters, losses, targets and optimizers are float32 either way, and so is acting: samplers agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

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
