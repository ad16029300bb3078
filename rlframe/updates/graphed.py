"""Updates as CUDA graphs: PPO, SAC and the others launch all kernels of a gradient step on a GPU at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.kernels.device import in_bf16
from rlframe.record.metrics import add, noting
from rlframe.system.cuda_graph import WARM_UPS, CudaGraph, Graph
from rlframe.updates.optimizer_step import OptimizerStep
from rlframe.updates.recorded import Learn
from rlframe.updates.side_effects import Reading, without_numbers, without_side_effects

_log = logging.getLogger("rlframe")


def graphed(learn: Learn, device: torch.device, steps: Sequence[OptimizerStep]) -> Learn:
    """`learn` as a CUDA graph; on a CPU, with several ranks or a step that waits, `learn` itself.

    Args:
        learn: makes at most a step of each of `steps` from its argument, on `device`. Its Python code runs only a few
            times, so it must not count, draw or read values; pass changing numbers as floats of the argument, and
            change other tensors that it reads in place.
    """
    waits = any(step.waits or step.progress.ranks.world_size > 1 for step in steps)
    return learn if waits or device.type != "cuda" else Graphed(learn, steps, CudaGraph(device))


class Graphs:
    """`learn(*case, inputs)` for each case of what is due, which on a GPU is a CUDA graph of its own; see graphed."""

    def __init__(self, learn: Callable[..., Any], device: torch.device, steps: Sequence[OptimizerStep]) -> None:
        """`steps`: that a case may make."""
        self.learn, self.steps, self.made = learn, list(steps), dict[tuple[bool, ...], Learn]()
        self.graph: Callable[[Learn], Learn] = lambda learn: graphed(learn, device, self.steps)

    def __call__(self, *case: bool) -> Learn:
        """`learn` of this case."""
        if case not in self.made:
            self.made[case] = self.graph(partial(self.learn, *case))
        return self.made[case]


class Graphed:
    """A function of a tree of tensors that is run directly a few times, then captured, then replayed.

    New shapes, whole numbers or another precision start over with the warm-up, in which calls count too. A function
    that cannot be captured keeps running directly.
    """

    def __init__(self, learn: Learn, steps: Sequence[OptimizerStep], graph: Graph) -> None:
        self.captured = False  # calls are replayed
        self.learn, self._steps, self._graph = learn, list(steps), graph
        self._launched: list[OptimizerStep] = []  # of the steps, those in the graph
        self._failed = False
        self._n_warm_ups = 0
        self._made_for: list[Any] = []  # precision and shapes
        self._placed: Tree = ()  # inputs in fixed memory
        self._results: Tree = ()
        self._numbers: Tensor | None = None  # [n] float32 of the results, which are read together

    def __call__(self, inputs: Tree) -> Any:
        """The result of `learn`, in new memory."""
        given = leaves(inputs)
        made_for = [in_bf16(), *map(_form, given)]
        if made_for != self._made_for:
            self._made_for, self._n_warm_ups, self.captured = made_for, 0, False
        if self._failed:
            return self.learn(inputs)
        if self._n_warm_ups < WARM_UPS:
            self._n_warm_ups += 1
            placed = _placed(inputs)  # of the form that is captured, so that a compiler meets it before
            return self._graph.warm_up(lambda: self.learn(placed))
        if not self.captured and not self._capture(inputs):
            return self.learn(inputs)
        return self._replay(inputs, given)

    def _capture(self, inputs: Tree) -> bool:
        self._placed = _placed(inputs)
        with ExitStack() as stack:
            for step in self._steps:
                stack.enter_context(step.recorded())
            try:
                self._results, self._numbers = self._graph.capture(self._learn_in_place)
                self.captured, self._launched = True, [step for step in self._steps if step.launched]
            except RuntimeError as error:
                self._failed, self._placed = True, ()
                reason = str(error.__context__ or error).partition("\n")[0]  # the first of several, from the function
                _log.warning(f"updates run without a CUDA graph, since they cannot be captured: {reason}")
        return self.captured

    def _learn_in_place(self) -> tuple[Tree, Tensor | None]:
        """What `learn` makes of the inputs in their places, and logs; and all numbers of these, together, if any."""
        with without_side_effects(self.learn, reading := Reading()), reading, noting() as noted:
            results = self.learn(without_numbers(self._placed)), noted.values
        numbers = [leaf for leaf in leaves(results) if _is_number(leaf)]
        return results, torch.stack(numbers) if numbers else None

    def _replay(self, inputs: Tree, given: list[Any]) -> Tree:
        for step in self._launched:
            step.before_launch()
        _copy_in(leaves(self._placed), given)
        self._graph.replay()
        for step in self._launched:
            step.after_launch(inputs)
        numbers = iter(() if self._numbers is None else self._numbers.clone().unbind())

        def own(leaf: Any) -> Any:
            return next(numbers) if _is_number(leaf) else leaf.clone() if isinstance(leaf, Tensor) else leaf

        result, logged = map_tree(own, self._results)
        for values in logged:
            add(values)
        return result


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.dtype is torch.float32


def _form(leaf: Any) -> Any:
    """What a graph is made for; a whole number becomes part of it."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, int) else None


def _placed(inputs: Tree) -> Tree:
    """In memory of its own, floats too; other leaves are as they are."""
    device = next(leaf.device for leaf in leaves(inputs) if isinstance(leaf, Tensor))

    def place(leaf: Any) -> Any:
        if isinstance(leaf, float):
            return torch.full((), leaf, device=device)
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    return map_tree(place, inputs)


def _copy_in(places: Sequence[Any], given: Sequence[Any]) -> None:
    """Copy inputs to where a graph reads them; tensors of a dtype and of equal strides by one kernel."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, leaf in zip(places, given, strict=True):
        if isinstance(leaf, Tensor):
            to, tensors = by_dtype.setdefault(leaf.dtype, ([], []))
            to.append(place)
            tensors.append(leaf)
        elif isinstance(leaf, float):
            place.fill_(leaf)
    for to, tensors in by_dtype.values():
        torch._foreach_copy_(to, tensors, non_blocking=True)
