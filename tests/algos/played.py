"""A CUDA graph on the CPU, as strict as a real one: what torch does is recorded, undone and done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlframe.core.struct import Tree
from rlframe.system.cuda_graph import Graph
from rlframe.updates.graphed import Graphed, Graphs

LOOKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)  # at values, for which a GPU stops


class NoLooks(TorchDispatchMode):
    """Inside, a look at a value raises."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in LOOKS:
            raise RuntimeError("operation not permitted when stream is capturing")
        return function(*args, **(kwargs or {}))


class _Recording(NoLooks):
    """Inside, every operation is kept, with what it was given, what it gave, and whether it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any, bool]] = []
        self.before: list[tuple[Tensor, Tensor]] = []  # what was written to, and its values
        self.generators: dict[torch.Generator, Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for generator in (x for x in kwargs.values() if isinstance(x, torch.Generator)):
            self.generators.setdefault(generator, generator.get_state())
        written = _written(function, args, kwargs)
        for tensor in written:
            self.before.append((tensor, tensor.clone()))
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.done.append((function, args, kwargs, result, bool(written)))
        return result

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, values in reversed(self.before):
            tensor.copy_(values)
        for generator, state in self.generators.items():
            generator.set_state(state)

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, result, writes in self.done:
            if function.is_view:  # of memory that is written anew by itself
                continue
            again = function(*args, **kwargs)
            if not writes:
                for place, value in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(place, Tensor):
                        place.copy_(value)


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call writes into."""
    named = {a.name: x for a, x in zip(function._schema.arguments, args, strict=False)} | kwargs
    written = [named.get(a.name) for a in function._schema.arguments if a.alias_info and a.alias_info.is_write]
    if function is torch.ops.aten._fused_adam_.tensor_lr:
        written = written[:1] + written[2:]  # gradients are only written to with a scale
    return [x for x in tree_leaves(written) if isinstance(x, Tensor)]


class PlayedGraph(Graph):
    """Raises where the function looks at a value, as a capture does."""

    def __init__(self) -> None:
        self.n = {"warm_up": 0, "capture": 0, "replay": 0}
        self._recording = _Recording()

    def warm_up(self, run: Callable[[], Tree]) -> Tree:
        self.n["warm_up"] += 1
        return run()

    def capture(self, run: Callable[[], Tree]) -> Tree:
        self.n["capture"] += 1
        self._recording = _Recording()
        try:
            with self._recording:
                return run()
        finally:
            self._recording.undo()

    def replay(self) -> None:
        self.n["replay"] += 1
        self._recording.replay()


def steps_of(algo: Any) -> list[Any]:
    """Its optimizer steps, by their attributes."""
    return [value for name, value in vars(algo).items() if name.endswith("optimizer")]


def launch(algo: Any) -> None:
    """Let its steps be launched, as they are on a GPU, and not waited for."""
    for step in steps_of(algo):
        step.waits = False


def play(algo: Any) -> None:
    """Let its updates be graphs, as they are on a GPU, and schedules be read from tensors."""
    launch(algo)
    algo.schedules.place("cpu")
    if isinstance(vars(algo).get("learn"), Graphs):
        algo.learn.graph = lambda learn: Graphed(learn, algo.learn.steps, PlayedGraph())
        return
    for name in functions_of(algo):
        learn = getattr(algo, name)
        setattr(algo, name, Graphed(learn._learn, learn._steps, PlayedGraph()))


def graphs_of(algo: Any) -> list[Any]:
    """Those of its updates; empty where there are none."""
    parts = algo.learn.made.values() if isinstance(vars(algo).get("learn"), Graphs) else vars(algo).values()
    return [part for part in parts if isinstance(part, Graphed)]


def functions_of(algo: Any) -> list[str]:
    """The functions that may be graphs or compiled, each of an equation with a _ before its name."""
    names = "learn", "learn_critics", "learn_policy", "learn_statistics"
    return [name for name in names if vars(algo).get(name) and not isinstance(vars(algo)[name], Graphs)]


def as_equations(algo: Any) -> None:
    """Let it learn by its equations as they are."""
    if isinstance(vars(algo).get("learn"), Graphs):
        algo.learn.graph = lambda learn: learn
    for name in functions_of(algo):
        setattr(algo, name, getattr(algo, f"_{name}"))
