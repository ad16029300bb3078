"""What kernels ask of a device: the precision of matrix products, denormals, and what is recorded.

Learning may multiply in bfloat16 where the hardware does that faster. Sums, parameters, losses, targets and optimizers
stay float32, and so does acting: all samplers give the same bits. Used by models, algorithms, replay and the runners.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.core.context import set_within
from rlframe.core.errors import ConfigError, one_line

PRECISIONS = ("auto", "fp32", "bf16")
_ROUNDS, _MOST_ROUNDS, _LEAST_GAIN = 6, 24, 1.2  # of the comparison of both

_current: ContextVar[str] = ContextVar("rlframe_precision", default="fp32")


def choose_device(name: str, gpus: Sequence[int] = (), key: str = "device") -> torch.device:
    """The torch device for `device=name`; `auto` is the first of `gpus`, else the first GPU, else the CPU.

    Args:
        key: for messages.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        return torch.device(f"cuda:{gpus[0]}" if gpus else "cuda") if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{key}={name!r} is not a device; use auto, cpu or cuda:0") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{key}={name}: {torch.cuda.device_count()} GPUs are visible; use {key}=cpu or auto")
    if device.type not in ("cpu", "cuda"):
        try:
            torch.ones(2, device=device).sum().item()
        except Exception as error:  # torch raises one of many types where there is no such device
            reason = one_line(error, 100)
            raise ConfigError(f"{key}={name} cannot be used here ({reason}); use auto, cpu or cuda:0") from None
    return device


def gpu_has_bf16_units(device: torch.device) -> bool:
    """Whether this GPU is present and multiplies bfloat16 in hardware; older ones emulate it."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


@cache
def has_bf16_units() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware, and oneDNN does so: ONEDNN_MAX_CPU_ISA may forbid it."""
    if not torch.backends.mkldnn.is_available():
        return False
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    try:
        capabilities = torch.cpu.get_capabilities()
        torch.ops.mkldnn._linear_pointwise.default(x, x, None, "none", [], "")
    except (AttributeError, RuntimeError):  # an older torch; forbidden instructions
        return False
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@cache
def bf16_is_faster() -> bool:
    """Whether this CPU convolves faster in bfloat16 than in float32; measured once a process, in some milliseconds.

    Its units do not decide: Intel's avx512_bf16 without amx_bf16 is slower than float32, AMD's faster. What
    counts is the time of one thread on the CPU, so that other processes do not decide either; since they share its
    caches, up to 24 rounds are measured before the answer is no.
    """
    if not has_bf16_units():
        return False
    x, weight = torch.ones(16, 32, 20, 20), torch.ones(64, 32, 4, 4)
    inputs = [tuple(t.to(dtype) for t in (x, weight)) for dtype in (torch.float32, torch.bfloat16)]
    with one_thread():
        rounds: list[list[float]] = []
        while len(rounds) < _MOST_ROUNDS:
            rounds += [[_cpu_seconds(*each) for each in inputs] for _ in range(_ROUNDS)]
            single, half = (min(times) for times in zip(*rounds, strict=True))
            if single > _LEAST_GAIN * half:
                return True
    return False


@contextmanager
def restoring_threads() -> Iterator[None]:
    """Context at whose end torch computes in as many threads as before."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread, for networks so small that several take far more CPU time."""
    with restoring_threads():
        torch.set_num_threads(1)
        yield


@torch.inference_mode()
def _cpu_seconds(x: Tensor, weight: Tensor) -> float:
    start = time.thread_time()
    F.conv2d(x, weight, stride=2)
    return time.thread_time() - start


def choose_precision(name: str, device: torch.device) -> str:
    """Resolve `auto`: bf16 on a CPU that is faster in it and on a GPU with units for it, else fp32.

    On a GPU large networks gain by it, small ones nothing (`python -m benchmarks.gpu`).

    Raises:
        ConfigError: bf16 on a device without bfloat16 units.
    """
    on_cpu = device.type == "cpu"
    if name == "bf16" and not (on_cpu and has_bf16_units()) and not gpu_has_bf16_units(device):
        cpu = "this CPU, which has, or may use, neither avx512_bf16 nor amx_bf16"
        where = cpu if on_cpu else f"device={device}"
        raise ConfigError(f"precision=bf16 is not supported on {where}; use precision=auto or fp32")
    gains = bf16_is_faster() if on_cpu else gpu_has_bf16_units(device)
    return ("bf16" if gains else "fp32") if name == "auto" else name


def in_bf16() -> bool:
    """Whether products take bfloat16 inputs now: inside `learning_in("bf16")`, except in inference mode (acting)."""
    return _current.get() == "bf16" and not torch.is_inference_mode_enabled()


@contextmanager
def learning_in(precision: str) -> Iterator[None]:
    """Context in which learning multiplies in `precision`, fp32 or bf16; outside, it is fp32."""
    products = torch.backends.cuda.matmul
    token, sums_in_bf16 = _current.set(precision), products.allow_bf16_reduced_precision_reduction
    products.allow_bf16_reduced_precision_reduction = False  # cuBLAS sums in bfloat16 by default
    try:
        yield
    finally:
        products.allow_bf16_reduced_precision_reduction = sums_in_bf16
        _current.reset(token)


_DENORMAL, _ONE = 1e-310, 1.0  # of Python's floats, which the processor's setting is for too


def flushes_denormals() -> bool:
    """Whether this thread takes denormals, numbers below 1.2e-38, for zero."""
    return _DENORMAL * _ONE == 0.0


@contextmanager
def flushing_denormals() -> Iterator[None]:
    """Context in which this thread takes denormals for zero, where the processor can; others are as before.

    Arithmetic with denormals takes several times as long. It is a setting of a thread: those that torch starts for an
    operation keep their own.
    """
    if flushes_denormals() or not torch.set_flush_denormal(True):
        yield
        return
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


_recording: ContextVar[bool] = ContextVar("rlframe_records", default=False)


def recording() -> AbstractContextManager[None]:
    """Context in which an update is recorded as a graph: values are not looked at, and steps are equations."""
    return set_within(_recording, True)


def is_recording() -> bool:
    """Whether an update is recorded as a graph now."""
    return _recording.get()


def held(numbers: Tensor) -> Tensor:
    """The same numbers [n]; a compiler computes them once, where it would do so again for every element of a loop."""
    return numbers.unsqueeze(-1).cumsum(-1).squeeze(-1)


def held_both_ways(numbers: Tensor) -> Tensor:
    """`held`, and so is their gradient, in an update that is recorded for a CPU; elsewhere just the numbers."""
    if not (is_recording() and numbers.is_cpu):
        return numbers
    if numbers.requires_grad:
        numbers.register_hook(held)
    return held(numbers)
