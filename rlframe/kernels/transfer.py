"""Copies between the host's memory and a GPU's that nobody waits for; on a CPU there is nothing to copy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`: from pinned memory, since a copy from other memory may wait for all that a GPU has to do.

    Itself, where it is there already; else the host's memory may be written again as soon as this returns, unless it
    is pinned (see samplers.device.Pinned).
    """
    if tensor.device == device:
        return tensor
    if device.type != "cuda" or not tensor.is_cpu:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fetched(tensor: Tensor) -> Callable[[], Tensor]:
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
