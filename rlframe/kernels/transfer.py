"""Copies between host and GPU that nobody waits for: through pinned memory, many arrays in one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlframe.core.struct import Tree, leaves, map_tree

_ALIGNMENT = 64  # bytes, of each array in a block
_FIRST_BLOCK = 1 << 16  # bytes


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to `device` without waiting; returns it unchanged if it is there already.

    The copy goes through pinned memory: a copy from other memory may wait for all work queued on the GPU. The caller
    may overwrite `tensor` after this returns, unless it is pinned itself.
    """
    if tensor.device == device:
        return tensor
    if device.type != "cuda" or not tensor.is_cpu:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Fetched:
    """A tensor of a GPU, copied to the host again and again; of a CPU, copied there."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._on_gpu = tensor, tensor.device.type == "cuda"
        self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu)
        self._arrived = torch.cuda.Event() if self._on_gpu else None

    def start(self) -> None:
        """Start a copy of what is there now, which overwrites the last one."""
        self._here.copy_(self._tensor, non_blocking=self._on_gpu)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(self._tensor.device))  # perhaps not the current device

    def wait(self) -> Tensor:
        """The copy, once it is complete; valid until the next `start`."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here


class Gathered:
    """Arrays that are read on the host one after another, and go to a device together, in one copy."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._size = device, _FIRST_BLOCK
        self._blocks: list[_Block] = []  # since the last delivery

    def take(self, array: np.ndarray, at: np.ndarray) -> Tensor:
        """The rows [*at, ...] of an array, on the host until they are delivered; `at` is from 0 to len(array) - 1."""
        shape = (*at.shape, *array.shape[1:])
        if not (n := _aligned(math.prod(shape) * array.itemsize)):
            return torch.from_numpy(array.take(at, axis=0)).to(self._device)
        if not self._blocks or self._blocks[-1].left < n:
            self._size = max(self._size, n)
            self._blocks.append(_Block(self._size, self._device))
        found = self._blocks[-1].place(shape, array.dtype)
        array.take(at, axis=0, out=found, mode="clip")  # the index is right; to check it costs a copy
        return torch.from_numpy(found)

    def delivered(self, tree: Tree) -> Tree:
        """The tree with what was taken, and views of it, on the device; other leaves as they are."""
        if not self._blocks:
            return tree
        blocks, self._blocks = self._blocks, []
        self._size = max(self._size, sum(block.used for block in blocks))  # next time one block holds all
        for block in blocks:
            block.send()

        def move(leaf: Tree) -> Tree:
            if not isinstance(leaf, Tensor) or not leaf.is_cpu:
                return leaf
            block = next((block for block in blocks if 0 <= leaf.data_ptr() - block.address < block.used), None)
            return leaf if block is None else block.there(leaf)

        return map_tree(move, tree)


class _Block:
    """Bytes of the host, used from their start on, and then of a device."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.device, self.used, self._here = device, 0, _host_bytes(n, device)
        self.address = self._here.data_ptr()
        self._bytes = self._here.numpy()
        self._there: dict[torch.dtype, Tensor] = {}  # once sent

    @property
    def left(self) -> int:
        return len(self._bytes) - self.used

    def place(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Its next bytes as an array, which takes NumPy less time than torch, with three views."""
        found: np.ndarray = np.ndarray(shape, dtype, self._bytes, self.used)
        self.used += _aligned(found.nbytes)
        return found

    def send(self) -> None:
        self._there = {
            torch.uint8: self._here[: self.used].to(self.device, non_blocking=self.device.type == "cuda", copy=True)
        }

    def there(self, here: Tensor) -> Tensor:
        """What a tensor in these bytes is on the device."""
        if here.dtype not in self._there:
            self._there[here.dtype] = self._there[torch.uint8].view(here.dtype)
        offset = (here.data_ptr() - self.address) // here.element_size()
        return self._there[here.dtype].as_strided(here.shape, here.stride(), offset)


class Packed:
    """The arrays of a tree in one piece of memory of the host, and in one of a device, so that one copy moves all."""

    def __init__(self, example: Tree, device: torch.device) -> None:
        """`example`: tensors or arrays, for shapes and dtypes."""
        like = map_tree(torch.as_tensor, example)
        self._on_gpu = device.type == "cuda"
        n = sum(_aligned(x.numel() * x.element_size()) for x in leaves(like))
        self._host, self._there = _host_bytes(n, device), torch.empty(n, dtype=torch.uint8, device=device)
        self.host: Tree = _placed(like, self._host)  # tensors
        self.there: Tree = _placed(like, self._there)

    def send(self) -> None:
        """Copy from the host to the device."""
        self._there.copy_(self._host, non_blocking=self._on_gpu)

    def fetch(self) -> None:
        """Copy from the device to the host; wait for the device before reading."""
        self._host.copy_(self._there, non_blocking=self._on_gpu)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _host_bytes(n: int, device: torch.device) -> Tensor:
    return torch.empty(n, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _placed(like: Tree, memory: Tensor) -> Tree:
    """Tensors of the same shapes and dtypes one after another in `memory`, bytes."""
    used = 0

    def place(x: Tensor) -> Tensor:
        nonlocal used
        begin, used = used, used + _aligned(x.numel() * x.element_size())
        return memory[begin : begin + x.numel() * x.element_size()].view(x.dtype).view(x.shape)

    return map_tree(place, like)
