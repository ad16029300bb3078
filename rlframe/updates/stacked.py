"""Updates of several runs of one configuration as one: the recorded update, mapped over stacked parameters.

Each run has its own agent and algorithm, in a thread of its own (see system.meeting). Their updates are recorded as for
the compiler (see compiled): pure functions, which are equal but for their tensors. torch.vmap makes one of them a
function of S runs. Parameters, moments and whatever else an update reads or changes are then stacked on a leading axis,
[S, ...], of which each run's own tensors become views: what acts, evaluates or saves finds them where they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlframe.core.errors import ConfigError
from rlframe.core.struct import Tree, leaves
from rlframe.system.meeting import Meeting
from rlframe.updates.compiled import CompileChoice, Update, compile_graph
from rlframe.updates.optimizer_step import OptimizerStep, flushing_for
from rlframe.updates.recorded import Learn, NotCompiled, cause, record
from rlframe.updates.schedules import Schedules

Run = Callable[..., Sequence[Tensor]]

REMEDY = "run them one by one: leave stack=true out"  # for what cannot be stacked
_IN_PLACE = ("clamp_", "lerp_", "scatter_")  # vmap has rules for them only where the result is new

_log = logging.getLogger("rlframe")


@dataclass
class _Recorded:
    """The update of one run; see `record`."""

    graph: Any
    given: list[Tensor]
    state: list[Tensor]
    steps: list[OptimizerStep]


class UpdateStack:
    """The updates of the runs of a meeting."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._choices: list[CompileChoice] = []  # at most one, of all
        self._agent: list[Tensor] = []  # parameters and buffers of all agents, stacked
        self._slots: dict[int, tuple[Tensor, int]] = {}  # of a stack, by the address of what is in it

    def agreed(self, choice: CompileChoice) -> CompileChoice:
        """Whether the update is compiled, by what the first run says; else it is made of torch's operations."""
        self._choices = self._choices or [choice if choice.compiles else CompileChoice(False)]
        return self._choices[0]

    def place(self, agent: nn.Module, seat: int) -> None:
        """Move the parameters and buffers of a run's agent into the stack, before anything has views of them."""
        own = [*agent.parameters(), *agent.buffers()]
        if not self._agent:
            self._agent = [x.detach().new_empty(self.meeting.n, *x.shape) for x in own]
        for x, stack in zip(own, self._agent, strict=True):
            self._put(x, stack, seat)

    def _put(self, x: Tensor, stack: Tensor, seat: int) -> None:
        """Make a tensor a view of its place in a stack."""
        stack[seat] = x.detach()
        x.data = stack[seat]
        self._slots[x.data_ptr()] = stack, seat

    def prepare(
        self, seat: int, learn: Learn, inputs: Tree, schedules: Schedules, steps: Sequence[OptimizerStep]
    ) -> Update:
        """As `compile_update`, of a run whose calls meet those of the others.

        Raises:
            ConfigError: that of one of the runs cannot be recorded, or they cannot be mapped.
        """
        given = [x for x in leaves(inputs) if isinstance(x, Tensor)]
        brought: _Recorded | NotCompiled
        try:
            graph, state, rebuild = record(learn, inputs, schedules, steps)
            launched = [step for step in steps if step.launched]
            brought = _Recorded(graph, given, state, launched)
        except NotCompiled as error:
            brought = error
        key = getattr(learn, "__name__", ""), [(x.shape, x.dtype) for x in given]
        try:
            mapped = self.meeting.meet(seat, ("prepare", key), brought, self._map)
        except NotCompiled as reason:
            raise ConfigError(f"stack=true: updates cannot be made at once: {reason}; {REMEDY}") from reason
        for step in steps:
            step.optimizer.renew_views()

        def run(*tensors: Tensor) -> Sequence[Tensor]:
            return self.meeting.meet(seat, mapped, tensors[: len(given)], mapped)

        return Update(run, state, launched, rebuild)

    def _map(self, brought: Sequence[_Recorded | NotCompiled | None]) -> list[_Mapped]:
        """The updates of all runs as one."""
        for each in brought:
            if isinstance(each, NotCompiled):
                raise each
        found = [each if isinstance(each, _Recorded) else None for each in brought]
        first = next(each for each in found if each is not None)
        if any(each is not None and each.graph.code != first.graph.code for each in found):
            raise NotCompiled("they differ between seeds")
        given = [torch.stack([(each or first).given[i] for each in found]) for i in range(len(first.given))]
        state = [self._stacked([each.state[i] if each else None for each in found]) for i in range(len(first.state))]
        graph = mapped_graph(first.graph, [*given, *state])
        mapped = _Mapped(self._compiled(graph, [*given, *state]), given, state, first.steps)
        return [mapped] * self.meeting.n

    def _compiled(self, graph: Any, examples: list[Tensor]) -> Run:
        run: Run = graph
        if self._choices[0].compiles:
            try:
                run = compile_graph(graph, examples)
            except NotCompiled as reason:
                _log.warning(f"stacked updates run uncompiled: {reason}")
        return run

    def _stacked(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The stack that these tensors are in, or come into now; None: of a run that has ended."""
        like = next(x for x in tensors if x is not None)
        stack, _ = self._slots.get(like.data_ptr(), (None, 0))
        if stack is None:
            stack = torch.zeros(self.meeting.n, *like.shape, dtype=like.dtype, device=like.device)
        for seat, x in enumerate(tensors):
            if x is not None and self._slots.get(x.data_ptr(), (None, 0)) != (stack, seat):
                self._put(x, stack, seat)
        return stack


class _Mapped:
    """An update of all runs, from the inputs of each. Of a run that has ended it is repeated, which nobody looks at."""

    def __init__(self, run: Run, given: list[Tensor], state: list[Tensor], steps: Sequence[OptimizerStep]) -> None:
        self._run, self._given, self._state, self._steps = run, given, state, steps
        self._places = {x.untyped_storage().data_ptr() for x in given}
        self._newest: list[Sequence[Tensor]] = [*zip(*(x.clone().unbind() for x in given), strict=True)]

    def __call__(self, brought: Sequence[Sequence[Tensor] | None]) -> list[Sequence[Tensor]]:
        self._newest = [new or last for new, last in zip(brought, self._newest, strict=True)]
        for place, tensors in zip(self._given, zip(*self._newest, strict=True), strict=True):
            torch.stack(tensors, out=place)
        with torch.no_grad(), flushing_for(self._steps):
            found = [self._kept(x) for x in self._run(*self._given, *self._state)]
        return [*zip(*(x.unbind() for x in found), strict=True)] or [()] * len(brought)

    def _kept(self, result: Tensor) -> Tensor:
        """A result; a copy of what is an input, or a view of it, which the next call overwrites."""
        return result.clone() if result.untyped_storage().data_ptr() in self._places else result


def mapped_graph(graph: Any, examples: Sequence[Tensor]) -> Any:
    """A graph of `record` as one of stacked tensors [S, ...], each of its operations for all S.

    Raises:
        NotCompiled: there is no rule for one of them.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with _only_by_rules():
            mapped = torch.vmap(_WithRules(graph).run)
            return make_fx(lambda *x: list(mapped(*x)), tracing_mode="fake")(*(x.detach() for x in examples))
    except Exception as error:
        raise NotCompiled(f"they cannot be mapped over runs: {cause(error)}") from error


@contextmanager
def _only_by_rules() -> Iterator[None]:
    """Context in which vmap raises where it has no rule, instead of taking one run after another."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


class _WithRules(torch.fx.Interpreter):
    """Runs a graph by operations that vmap has rules for: on one tensor, not on a list; and few of them in place."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(target).partition(".")[2].partition(".")[0]
        if name.startswith("_foreach_"):
            each = [[x[i] if isinstance(x, list | tuple) else x for x in args] for i in range(len(args[0]))]
            return [self._one(name.removeprefix("_foreach_"), own, kwargs) for own in each]
        return self._one(name, args, kwargs) if name in _IN_PLACE else super().call_function(target, args, kwargs)

    def _one(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name in _IN_PLACE:
            return args[0].copy_(getattr(torch.ops.aten, name.removesuffix("_"))(*args, **kwargs))
        return getattr(torch.ops.aten, name)(*args, **kwargs)
