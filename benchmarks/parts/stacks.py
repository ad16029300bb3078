"""A sampling profiler: it samples a thread's stack every millisecond, and adds up the time of named parts."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

OTHER = "anything else"
_LATE_S = 0.01  # after the last tick, which another thread may still handle; the former handler must not get it


@dataclass(frozen=True)
class Part:
    """A name for everything that some functions call."""

    name: str
    file: str  # the end of a file's path; or a folder, with a / at its end
    functions: tuple[str, ...] = ()  # of the file; none: all

    def holds(self, file: str, function: str) -> bool:
        """Whether a frame of this file and function belongs to the part."""
        inside = f"/{self.file}" in file if self.file.endswith("/") else file.endswith(f"/{self.file}")
        return inside and (not self.functions or function in self.functions)


# The first part that has any frame of a stack wins, so an inner part stands before the parts that may call it.
PARTS: Sequence[Part] = (
    Part("snapshots", "rlframe/runners/report.py", ("save_snapshot",)),
    Part("evaluation", "rlframe/evaluation/evaluator.py"),
    Part("logging", "rlframe/runners/base.py", ("report", "record_episodes")),
    Part("replay: writing", "rlframe/replay/buffer.py", ("append",)),
    Part("replay: sampling", "rlframe/replay/"),
    Part("target updates", "rlframe/algos/targets.py", ("soft_update", "copy_into")),
    Part("updates, compiled", "rlframe/updates/compiled.py", ("_run",)),
    Part("compiling updates", "rlframe/updates/compiled.py", ("compile_update",)),
    Part("optimizer", "torch/optim/"),
    Part("optimizer", "rlframe/updates/optimizer_step.py", ("_step", "_launch")),
    Part("backward", "torch/_tensor.py", ("backward",)),
    Part("backward", "rlframe/updates/optimizer_step.py", ("minimize",)),
    Part("backward", "torch/autograd/"),
    Part("waiting for processes", "rlframe/rollout/worker_pool.py"),
    Part("waiting for processes", "rlframe/samplers/background.py"),
    Part("stepping environments", "rlframe/envs/"),
    Part("stepping environments", "rlframe/rollout/stepper.py"),
    Part("acting", "rlframe/rollout/inference.py"),
    Part("batches: writing and reading", "rlframe/samplers/"),
    Part("forward and losses", "rlframe/algos/"),
    Part("forward and losses", "rlframe/updates/"),
)


def part_of(stack: Sequence[tuple[str, str]]) -> str:
    """The part of a stack of (file, function)."""
    return next((part.name for part in PARTS if any(part.holds(*frame) for frame in stack)), OTHER)


class Stacks:
    """Samples the main thread's stack at every tick of a timer, and adds the time since the last sample to its part.

    Python handles signals between instructions, so a call into C counts for its caller, however long it takes. Sets the
    handler of SIGALRM and restores a former one. Without a former one its own stays and does nothing, since a late tick
    would end the process. For the main thread only, and not on Windows.
    """

    def __init__(self, interval_s: float = 1e-3) -> None:
        self.interval_s, self.seconds = interval_s, dict[str, float]()
        self._names: dict[tuple[object, ...], str] = {}  # parts of the stacks seen, by their code objects
        self._before: Any = signal.SIG_DFL
        self._last = 0.0
        self.running = self._looking = False

    def start(self) -> None:
        """Start sampling."""
        self.running = True
        self._last = time.perf_counter()
        self._before = signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, self.interval_s, self.interval_s)

    def stop(self) -> None:
        """Stop sampling."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)  # first, so that the time of a last tick is counted
        self.running = False
        if callable(self._before):
            time.sleep(_LATE_S)
            signal.signal(signal.SIGALRM, self._before)

    def _look(self, number: int, frame: FrameType | None) -> None:
        # A tick during a sample that takes longer than a period (the next sample counts its time), or a late tick.
        if self._looking or not self.running:
            return
        self._looking = True
        now = time.perf_counter()
        stack = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        key = tuple(stack)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = part_of([(code.co_filename, code.co_name) for code in stack])
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
        self._looking = False
