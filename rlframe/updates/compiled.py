"""Updates compiled from their plain equations: `_learn` of an algorithm as one function of its tensors.

Algorithms whose critics and policy take turns have `_learn_critics` and `_learn_policy`, which are compiled each.
The first call records what `_learn` computes, with ordinary torch operations, from its inputs and from every tensor
that it reads or changes: parameters, moments, targets, statistics. That is a pure function, which torch's compiler
turns into C++ (on a GPU into kernels), and which later calls run in place of the Python. The equations know nothing of
it. What they must keep to is what CUDA graphs ask for too: they decide nothing by the values of tensors, and numbers
that change during a run are tensors (see Schedules and OptimizerStep). Where that does not hold, or there is no
compiler, the same `_learn` runs as it is, and one line of the log says why.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from rlframe.core.context import set_within
from rlframe.core.struct import Tree, leaves
from rlframe.kernels.barriers import loops_in_order
from rlframe.kernels.device import in_bf16
from rlframe.models.memory import cuts_episodes
from rlframe.record import current_run
from rlframe.record.metrics import add
from rlframe.system.machine import gc_paused
from rlframe.system.meeting import NotTogether
from rlframe.system.signals import asked_to_stop
from rlframe.updates.graphed import Graphed, graphed
from rlframe.updates.optimizer_step import OptimizerStep, flushing_for
from rlframe.updates.recorded import CompilerFailed, Learn, NotCompiled, cause, record
from rlframe.updates.schedules import Schedules

_MOST_FORMS = 8  # of inputs; more would be compiled for ever
_LONG_S, _TIMEOUT_S = 60.0, 300.0
_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)

_log = logging.getLogger("rlframe")


@dataclass(frozen=True)
class CompileChoice:
    """Whether updates are compiled, how, and a file that is made once the compiler has made them."""

    compiles: bool
    marker: Path | None = None
    prepare: Callable[..., Update] = field(default_factory=lambda: compile_update)  # see there
    shared: bool = False  # with other runs: `prepare` is called also where nothing is compiled

    @property
    def name(self) -> str:
        """As a value of the key compile."""
        return "true" if self.compiles else "false"

    def mark(self) -> None:
        """Make the file, which says that a later run finds the update in the compiler's cache."""
        if self.marker is not None:
            with suppress(OSError):
                self.marker.parent.mkdir(parents=True, exist_ok=True)
                self.marker.touch()


@dataclass
class Update:
    """A compiled update, and what it needs in each call."""

    run: Callable[..., Sequence[Tensor]]
    state: list[Tensor]  # what it reads and changes besides its inputs
    steps: list[OptimizerStep]  # that take part in it
    rebuild: Callable[[Sequence[Tensor]], tuple[Any, Any]]  # of the result of `learn`, and of what it logs


class Compiled:
    """`learn`, compiled once for each form of its inputs while `compiling`; otherwise `learn` itself.

    Its results are new tensors. Where one of an algorithm's functions cannot be compiled, none is from then on.
    """

    def __init__(self, learn: Learn, schedules: Schedules, steps: Sequence[OptimizerStep], looks: str = "") -> None:
        """Args:
        learn: makes at most one step with each of `steps`, from a tree of tensors; its Python runs once a form, so it
            must not count, draw or read values.
        schedules: whose numbers it reads.    looks: why it cannot be compiled, if that is known.
        """
        self._learn, self._schedules, self._steps, self._looks = learn, schedules, list(steps), looks
        self.__wrapped__ = learn  # whose Python is watched, see side_effects
        self._updates: dict[Any, Update | None] = {}
        part = getattr(learn, "__name__", "").removeprefix("_learn").strip("_")
        self._name = f"updates of the {part}" if part.isidentifier() else "updates"

    @property
    def compiles(self) -> bool:
        """Whether the next call is compiled, or shared with other runs."""
        choice = _current.get()
        return (choice.compiles or choice.shared) and self._schedules.compiles

    def __call__(self, inputs: Tree) -> Any:
        """The result of `learn`."""
        if not self.compiles:
            return self._learn(inputs)
        tensors = leaves(inputs)
        form = (in_bf16(), *map(_form, tensors))
        if form not in self._updates:
            self._updates[form] = self._prepare(inputs)
        update = self._updates[form]
        if update is None:
            return self._learn(inputs)
        try:
            return self._run(update, inputs, [x for x in tensors if isinstance(x, Tensor)])
        except NotTogether:
            return self._learn(inputs)

    def _run(self, update: Update, inputs: Tree, tensors: list[Tensor]) -> Any:
        for step in update.steps:
            step.launched = True
        steps = [step for step in update.steps if not step.is_captured]  # a CUDA graph does the host's part itself
        for step in steps:
            step.before_launch()
        with torch.no_grad(), flushing_for(update.steps):
            found, logged = update.rebuild(update.run(*tensors, *update.state))
        for step in steps:
            step.after_launch(inputs)
        for values in logged:
            add(values)
        if steps:
            steps[0].progress.between_steps()
        return found

    def _prepare(self, inputs: Tree) -> Update | None:
        if len(self._updates) == _MOST_FORMS:
            _log.warning(f"updates of further shapes run uncompiled, since {_MOST_FORMS} are compiled already")
        if len(self._updates) >= _MOST_FORMS:
            return None
        begin, choice = time.monotonic(), _current.get()
        try:
            if self._looks:
                raise NotCompiled(self._looks)
            update = choice.prepare(self._learn, inputs, self._schedules, self._steps)
        except NotTogether:  # the other runs are at other functions, for example after they were resumed
            return None
        except NotCompiled as reason:
            self._schedules.compiles = False
            if isinstance(reason, CompilerFailed) and asked_to_stop():  # Ctrl-C reaches the compiler too
                _log.info("the compiler was stopped with the run; a resumed run compiles again")
                return None
            _log.warning(f"updates run uncompiled: {reason}")
            if choice.compiles and isinstance(reason, CompilerFailed):  # a resumed run computes as this one
                current_run().record_choices({"compile": "false"})
            return None
        choice.mark()
        _log.info(
            f"{self._name} are {'compiled' if choice.compiles else 'stacked'}, which took "
            f"{time.monotonic() - begin:.1f} s"
        )
        return update


def updates_of(learn: Learn, schedules: Schedules, steps: Sequence[OptimizerStep], looks: str = "") -> Learn:
    """`learn` as a function that may be compiled, and on a GPU is a CUDA graph.

    Args:
        learn: see Compiled.    schedules: whose numbers it reads.    looks: what decides by values in it; see looks_of.
        steps: which it makes; none if it only moves statistics.
    """
    learn = Compiled(learn, schedules, steps, looks)
    return learn if looks else graphed(learn, schedules.device, steps)


def has_updates(owner: Any) -> bool:
    """Whether an algorithm makes its updates by functions of `updates_of`."""
    return any(isinstance(x, Compiled | Graphed) for x in vars(owner).values())


def looks_of(model: nn.Module) -> str:
    """What decides by values in a model, which no graph can; empty if nothing does."""
    return "model.memory cuts sequences where episodes begin" if cuts_episodes(model) else ""


def _form(leaf: Any) -> Any:
    """What a graph is made for; a number becomes part of it."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return leaf if isinstance(leaf, int | float) else None


def compile_update(learn: Learn, inputs: Tree, schedules: Schedules, steps: Sequence[OptimizerStep]) -> Update:
    """Record and compile `learn` for inputs of this form; changes nothing.

    Raises:
        NotCompiled: it cannot be recorded or compiled.
    """
    _import_compiler()  # first, as its cache may have no place
    given = [x for x in leaves(inputs) if isinstance(x, Tensor)]
    graph, state, outputs = record(learn, inputs, schedules, steps)
    run = compile_graph(graph, [*given, *state])
    return Update(run, state, [step for step in steps if step.launched], outputs)


_NOT = CompileChoice(False)
_current: ContextVar[CompileChoice] = ContextVar("rlframe_compiles", default=_NOT)


def compiling(choice: CompileChoice) -> AbstractContextManager[None]:
    """Context in which updates are compiled, or not."""
    return set_within(_current, choice)


def compile_graph(graph: Any, examples: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """A graph of `record`, compiled for inputs of these forms.

    Raises:
        CompilerFailed: the compiler cannot be imported, fails or hangs.
    """
    _import_compiler()
    with gc_paused(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run: Callable[..., Sequence[Tensor]] = _within_time(lambda: _compile(graph, examples))
    return run


def _import_compiler() -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("torch._inductor.compile_fx")
            importlib.import_module("torch._inductor.codecache").cache_dir()  # made here
    except Exception as error:
        why = f"torch's compiler cannot be imported ({cause(error)}); reinstall torch"
        raise CompilerFailed(_remedy(error) if isinstance(error, OSError) else why) from error


def _compile(graph: Any, examples: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with config.patch("cpp.vec_isa_ok", True):
        width = pick_vec_isa().bit_width()
    on_cpu = all(x.is_cpu for x in examples)
    patches = {
        "cpp_wrapper": on_cpu,
        "fallback_random": True,  # dropout draws what it draws uncompiled
        "compile_threads": 1,  # no processes that stay
        "size_asserts": False,  # Compiled knows the form of its inputs
        "cpp.vec_isa_ok": True,  # torch's own kernels found the processor's instructions: no process is started to try
        "cpp.use_decompose_tanh": True,  # by one exponential, exact to 2e-7, in half of the time of torch's own
        "cpp.simdlen": width,  # the cache's key has it, and not ATEN_CPU_CAPABILITY, by which it is chosen
        "cpp_cache_precompile_headers": False,  # a warm start would run the compiler to compare them
        "cpp.dynamic_threads": torch.get_num_threads() > 1,  # the number may change during a run
    }
    if not on_cpu:  # it fails at groups of small kernels (torch 2.11)
        patches["loop_ordering_after_fusion"] = False
    patches = {key: value for key, value in patches.items() if hasattr(config, key)}  # older versions have not all
    repairs = nullcontext() if on_cpu else loops_in_order()
    # Without an environment of shapes torch 2.11 keeps nothing in its cache.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(assume_static_by_default=True))
    with torch.no_grad(), repairs, tracing(TracingContext(mode)):
        compiled: Any = compile_fx(graph, [x.detach() for x in examples], config_patches=patches)
    return compiled


def _within_time(function: Callable[[], Any]) -> Any:
    """What it returns, from a thread that is left to itself if it hangs."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=copy_context().run, args=(run,), name="compile", daemon=True)
    thread.start()
    thread.join(_LONG_S)
    if not found:
        _log.info(f"the compiler has not ended after {_LONG_S:.0f} s; it has until {_TIMEOUT_S:.0f} s")
        thread.join(_TIMEOUT_S - _LONG_S)
    if not found:
        for process in _started_by(thread):
            with suppress(psutil.Error):
                process.kill()
        raise CompilerFailed(f"the compiler has not ended after {_TIMEOUT_S:.0f} s; use compile=false")
    if isinstance(found[0], BaseException):
        raise CompilerFailed(_remedy(found[0])) from found[0]
    return found[0]


def _started_by(thread: threading.Thread) -> list[psutil.Process]:
    """The processes that a thread has started, with theirs; none where the system does not say."""
    found: list[psutil.Process] = []
    with suppress(OSError, psutil.Error):
        numbers = Path(f"/proc/self/task/{thread.native_id}/children").read_text().split()
        for process in map(psutil.Process, map(int, numbers)):
            found += [*process.children(recursive=True), process]
    return found


def _remedy(error: BaseException) -> str:
    for each in _causes(error):
        if isinstance(each, OSError) and each.errno in _NO_PLACE:
            return f"{cause(each)}; set TORCHINDUCTOR_CACHE_DIR to a directory that can be written and has room"
    return (
        f"torch's compiler failed: {cause(error)}; use compile=false, or another compiler by CXX; if its cache may be "
        f"damaged, remove {os.environ.get('TORCHINDUCTOR_CACHE_DIR', 'it')}"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from, or what torch has put into one of its own."""
    while error is not None:
        yield error
        inner, context = vars(error).get("inner_exception"), None if error.__suppress_context__ else error.__context__
        error = inner or error.__cause__ or context
