"""A function recorded once as a CUDA graph, whose kernels are then launched together: of updates and of acting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from rlframe.core.struct import Tree
from rlframe.system.machine import gc_paused

WARM_UPS = 3  # calls before capture: libraries choose kernels and allocate in them, gradients get memory


class Graph(ABC):
    """Runs a function, and records it once to replay it."""

    @abstractmethod
    def warm_up(self, run: Callable[[], Tree]) -> Tree:
        """Run the function before capture."""

    @abstractmethod
    def capture(self, run: Callable[[], Tree]) -> Tree:
        """Record the function without running it, in place of an earlier record; `replay` overwrites the result.

        Raises:
            RuntimeError: the function cannot be captured; nothing has changed.
        """

    @abstractmethod
    def replay(self) -> None:
        """Run the recorded function."""


class CudaGraph(Graph):
    """torch's CUDA graph. Warm-up and capture use a stream of their own; replays use the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []  # the newest, kept if it failed: the allocator may still use it

    def warm_up(self, run: Callable[[], Tree]) -> Tree:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            results = run()
        current.wait_stream(self._stream)
        return results

    def capture(self, run: Callable[[], Tree]) -> Tree:
        graph = torch.cuda.CUDAGraph()
        self._graphs = [graph]
        with torch.cuda.device(self._device):
            generator = torch.cuda.default_generators[torch.cuda.current_device()]  # dropout draws from it
        state = generator.get_state()
        try:
            # Also set the stream here: after a failed capture, graph() does not restore the current stream.
            # A graph that is collected meanwhile, of an algorithm that has ended, would end the capture.
            recording = torch.cuda.graph(graph, stream=self._stream)
            with gc_paused(), torch.cuda.device(self._device), torch.cuda.stream(self._stream), recording:
                return run()
        except RuntimeError:
            torch.cuda.synchronize(self._device)
            _renew(generator, state)
            raise

    def replay(self) -> None:
        self._graphs[0].replay()


def _renew(generator: torch.Generator, state: Tensor) -> None:
    """Give the generator new state memory, since a failed capture leaves it marked as captured."""
    fresh = torch.Generator(generator.device)
    fresh.set_state(state)
    generator.graphsafe_set_state(fresh)
