"""An update on a GPU as one CUDA graph: its kernels are launched at once, instead of one by one from Python."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlframe.algos.optimizer_step import OptimizerStep
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.kernels.device import in_bf16

Learn = Callable[[Tree], Any]  # from what an update learns from to a tree of tensors; see `graphed`

_WARM_UPS = 3  # calls before capture, in which libraries choose their kernels and gradients get their memory

_log = logging.getLogger("rlframe")


def graphed(
    learn: Learn,
    device: torch.device,
    steps: Sequence[OptimizerStep],
    generators: Sequence[torch.Generator] = (),
    looks: bool = False,
) -> Learn:
    """`learn` as a CUDA graph where it can be one, else itself: so a CPU calls it as if this were not here.

    Ranks that train together run it as it is, since they exchange gradients.

    Args:
        learn: makes one step of each of `steps` by what is in its argument, all on `device`. Nothing that it does on
            the host may matter to the next call, for it does that only a few times: it counts nothing and looks at no
            value, and a number that changes is a float of its argument. What it reads beside that is changed in place.
        generators: of the device, that it draws from.
        looks: at values, to decide what to do, and so can be no graph.
    """
    if device.type != "cuda" or looks or any(step.progress.ranks.world_size > 1 for step in steps):
        return learn
    return Graphed(learn, steps, CudaGraph(device, generators))


class Graph(ABC):
    """What runs a function, and records it once to be run again."""

    @abstractmethod
    def warm_up(self, run: Callable[[], Tree]) -> Tree:
        """Run it, as it may be captured later."""

    @abstractmethod
    def capture(self, run: Callable[[], Tree]) -> Tree:
        """Record it, without any effect; the result is where `replay` will leave its own. Forgets what was recorded.

        Raises:
            RuntimeError: it cannot be; nothing has changed.
        """

    @abstractmethod
    def replay(self) -> None:
        """Run what was recorded."""


class Graphed:
    """A function of a tree of tensors, run many times: first as it is, then captured, then replayed.

    Every call is one run of it: what warms up are updates too. It runs as it is while shapes change, and for good if it
    cannot be captured. It is captured anew in another precision.
    """

    def __init__(self, learn: Learn, steps: Sequence[OptimizerStep], graph: Graph) -> None:
        self.captured = False  # and so replayed
        self._learn, self._steps, self._graph = learn, list(steps), graph
        self._failed = False
        self._n_warm_ups = 0
        self._made_for: list[Any] = []  # precision and shapes
        self._inputs: Tree = ()  # in fixed places, as the result is
        self._results: Tree = ()

    def __call__(self, inputs: Tree) -> Any:
        """What `learn` returns, in memory of its own."""
        made_for = [in_bf16(), *(_form(leaf) for leaf in leaves(inputs))]
        if made_for != self._made_for:
            self._made_for, self._n_warm_ups, self.captured = made_for, 0, False
        if self._failed:
            return self._learn(inputs)
        if self._n_warm_ups < _WARM_UPS:
            self._n_warm_ups += 1
            return self._graph.warm_up(lambda: self._learn(inputs))
        if not self.captured and not self._capture(inputs):
            return self._learn(inputs)
        return self._replay(inputs)

    def _capture(self, inputs: Tree) -> bool:
        device = next(leaf.device for leaf in leaves(inputs) if isinstance(leaf, Tensor))
        self._inputs = map_tree(lambda leaf: _place(leaf, device), inputs)
        for step in self._steps:
            step.is_captured = True
        try:
            self._results = self._graph.capture(lambda: self._learn(self._inputs))
            self.captured = True
        except RuntimeError as error:
            self._failed, self._inputs = True, ()
            reason = str(error.__context__ or error).partition("\n")[0]  # of several, the first: that of the function
            _log.warning(f"updates run without a CUDA graph, for they cannot be captured: {reason}")
        finally:
            for step in self._steps:
                step.is_captured = False
        return self.captured

    def _replay(self, inputs: Tree) -> Tree:
        for step in self._steps:
            step.before_launch()
        places, given = leaves(self._inputs), leaves(inputs)
        pairs = [pair for pair in zip(places, given, strict=True) if isinstance(pair[1], Tensor)]
        torch._foreach_copy_([place for place, _ in pairs], [leaf for _, leaf in pairs], non_blocking=True)
        for place, leaf in zip(places, given, strict=True):
            if isinstance(leaf, float):
                place.fill_(leaf)
        self._graph.replay()
        for step in self._steps:
            step.after_launch(inputs)
        return map_tree(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self._results)


def _form(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None


def _place(leaf: Any, device: torch.device) -> Any:
    """A fixed place for a leaf; anything but tensors and floats is not learned from, such as numbers of rows."""
    if isinstance(leaf, float):
        return torch.full((), leaf, device=device)
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


class CudaGraph(Graph):
    """The real one. Warming up and capture happen beside the stream that is current; replays are part of it."""

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator]) -> None:
        """`generators`: of the device, that what is recorded draws from; each replay draws what comes next."""
        self._device, self._generators = device, list(generators)
        self._stream = torch.cuda.Stream(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []  # the newest, also if it failed: the allocator may ask it still

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
        for generator in self._generators:
            graph.register_generator_state(generator)
        with torch.cuda.device(self._device):
            drawn_from = [*self._generators, torch.cuda.default_generators[torch.cuda.current_device()]]
        states = [generator.get_state() for generator in drawn_from]
        try:
            # The stream twice: where a capture fails, graph() leaves its own the current one.
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                recording = torch.cuda.graph(graph, stream=self._stream)
                with recording:
                    return run()
        except RuntimeError:
            torch.cuda.synchronize(self._device)
            for generator, state in zip(drawn_from, states, strict=True):
                _renew(generator, state)
            raise

    def replay(self) -> None:
        self._graphs[0].replay()


def _renew(generator: torch.Generator, state: Tensor) -> None:
    """Give it memory of its own again: what a failed capture has left says that it is still captured."""
    fresh = torch.Generator(generator.device)
    fresh.set_state(state)
    generator.graphsafe_set_state(fresh)
