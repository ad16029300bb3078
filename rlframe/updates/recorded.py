"""An update recorded as a graph: what `_learn` of an algorithm computes, from its inputs and all tensors that it meets.

These are ordinary torch operations, of gradients and the optimizer's step too. Recording them changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from rlframe.core.errors import one_line
from rlframe.core.ranks import Ranks, current_ranks
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.kernels.device import recording
from rlframe.record.metrics import noting
from rlframe.updates.optimizer_step import OptimizerStep
from rlframe.updates.progress import Progress
from rlframe.updates.schedules import Schedules
from rlframe.updates.side_effects import Reading, SideEffect, without_numbers, without_side_effects

Learn = Callable[[Any], Any]  # from the data of an update to a tree of tensors


class NotCompiled(Exception):
    """Why an update cannot be compiled, and what to do."""


class CompilerFailed(NotCompiled):
    """The compiler is missing, fails or hangs; another time it may not."""


def record(
    learn: Learn, inputs: Tree, schedules: Schedules, steps: Sequence[OptimizerStep]
) -> tuple[Any, list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The graph of `learn`, the tensors that it has after those of the inputs, and what makes its result of them.

    The result is that of `learn`, and what it has logged; see `noting`.

    Raises:
        NotCompiled: it decides by values, leaves torch, draws or counts in Python, or fails.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    results: list[Any] = []
    undo = _Undo()

    def function(*tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        with undo, noting() as noted:
            result = learn(map_tree(lambda x: next(given) if isinstance(x, Tensor) else x, without_numbers(inputs)))
        found: list[Tensor] = []
        results[:] = [_maker((result, noted.values), found)]
        return [x.detach() for x in found]

    examples = [x for x in leaves(inputs) if isinstance(x, Tensor)]
    with ExitStack() as stack:
        parts: list[Any] = [schedules, *steps, _RecordedRanks(schedules.progress)]
        for part in parts:
            stack.enter_context(part.recorded())
        stack.enter_context(recording())
        try:
            with without_side_effects(learn, undo):
                graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
        except SideEffect as error:
            raise NotCompiled(str(error)) from error
        except Exception as error:
            raise NotCompiled(f"{_place(error)} cannot be recorded: {_why(error)}") from error
        finally:
            undo.restore()
    _transpose_products(graph.graph)
    return graph, _lift(graph), results[0]


class _Undo(Reading):
    """Keeps tensors as they were: an operation that no input reaches is run while it is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]  # also `out`
        if func._schema.is_mutable and all(type(x) in (Tensor, nn.Parameter) for x in given):
            with _disable_current_modes():
                for x in given:
                    self._kept.setdefault(id(x), (x, x.detach().clone()))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the tensors their numbers back."""
        for x, kept in self._kept.values():
            x.copy_(kept)


def _maker(result: Any, found: list[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    """What makes such a result, of dicts, tuples and constants, from its tensors, which are added to `found`."""
    if isinstance(result, Tensor):
        found.append(result)
        return itemgetter(len(found) - 1)
    if isinstance(result, dict):
        makers = {name: _maker(x, found) for name, x in result.items()}
        return lambda tensors: {name: make(tensors) for name, make in makers.items()}
    if isinstance(result, tuple):
        parts = [_maker(x, found) for x in result]
        cls: Any = type(result)
        build = cls._make if issubclass(cls, tuple) and cls is not tuple else tuple  # a NamedTuple
        return lambda tensors: build(part(tensors) for part in parts)
    return lambda _: result


class _RecordedRanks(Ranks):
    """The ranks of an algorithm while its update is recorded: the graph has a call where gradients are exchanged."""

    def __init__(self, progress: Progress) -> None:
        self.progress, ranks = progress, progress.ranks
        self.ranks, self.rank, self.world_size, self.n_samplers = ranks, ranks.rank, ranks.world_size, ranks.n_samplers

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which they stand for the ranks."""
        self.progress.ranks = self
        try:
            yield
        finally:
            self.progress.ranks = self.ranks

    def sum_tensor(self, tensor: Any) -> Any:
        if self.world_size == 1:
            return tensor
        found = tensor.clone()
        _exchange()([found], torch.ones(()), True)
        return found

    def average(self, tensors: Sequence[Any], weight: Any = 1.0) -> None:
        if self.world_size > 1:
            _exchange()(list(tensors), torch.as_tensor(weight, dtype=torch.float32), False)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotCompiled("it asks other ranks for more than means and sums of tensors")

    sum = max = stack = gather = scatter = forward_signal = _refuse


@cache
def _exchange() -> Callable[[list[Tensor], Tensor, bool], None]:
    """The operation of a graph that averages or sums tensors over ranks in place."""

    @torch.library.custom_op("rlframe::exchange", mutates_args=("tensors",))
    def exchange(tensors: list[Tensor], weight: Tensor, sums: bool) -> None:
        ranks = current_ranks()
        if not sums:
            ranks.average(tensors, weight)
            return
        for x in tensors:
            x.copy_(ranks.sum_tensor(x))

    return exchange


def _transpose_products(nodes: Any) -> None:
    """Replace (A B)^T by B^T A^T, of matrices [k, n, m], where a product is used in no other way.

    Autograd makes the gradients of k networks' weights so. Made in the layout of the weights instead, they are read
    three times as fast by the optimizer's step.
    """
    aten = torch.ops.aten
    for product in nodes.find_nodes(op="call_function", target=aten.bmm.default):
        uses = list(product.users)
        if not all(use.target is aten.transpose.int and {axis % 3 for axis in use.args[1:]} == {1, 2} for use in uses):
            continue
        with nodes.inserting_before(product):
            b, a = (nodes.call_function(aten.transpose.int, (x, 1, 2)) for x in reversed(product.args))
            transposed = nodes.call_function(aten.bmm.default, (b, a))
        for use in uses:
            use.replace_all_uses_with(transposed)
            nodes.erase_node(use)
        nodes.erase_node(product)


def _lift(graph: Any) -> list[Tensor]:
    """Make the tensors that were met while recording inputs of the graph, after its own; returns them."""
    nodes = graph.graph
    last = [node for node in nodes.nodes if node.op == "placeholder"][-1]
    state: dict[str, Any] = {}
    places: dict[str, Any] = {}
    for node in [node for node in nodes.nodes if node.op == "get_attr"]:
        name = node.target
        if name not in places:
            state[name] = getattr(graph, name)
            if not isinstance(state[name], Tensor):
                raise NotCompiled("it draws random numbers from a generator of its own; give it them with the batch")
            with nodes.inserting_after(last):
                last = places[name] = nodes.placeholder(f"state_{len(places)}")
                last.meta = dict(node.meta)
        node.replace_all_uses_with(places[name])
        nodes.erase_node(node)
    for name in state:
        delattr(graph, name)
    graph.recompile()
    return list(state.values())


_BY_VALUES = ("GuardOnDataDependentSymNode", "DataDependentOutputException")  # names of torch's errors


def _why(error: BaseException) -> str:
    if type(error).__name__ in _BY_VALUES:
        return "it decides by the value of a tensor; use torch.where, or compile=false"
    return cause(error)


def cause(error: BaseException) -> str:
    """What an error says, in a line."""
    return one_line(error) or type(error).__name__


def _place(error: BaseException) -> str:
    """Where in the recorded function it was raised: the last line outside of torch."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if f"{os.sep}torch{os.sep}" not in code.co_filename and code.co_filename != __file__:
            place = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
