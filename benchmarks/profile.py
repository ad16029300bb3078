"""Where the time of one training goes.

    python -m benchmarks.profile env=CartPole-v1 algo=ppo
    python -m benchmarks.profile experiment=mujoco/sac_halfcheetah algo.learning_starts=1000 seconds=20 out=profile.json

It takes the keys of rlframe.launch that describe a run (not resume=, sweeps or ranks), trains as `launch` does, in a
temporary run directory, and prints the parts of the time after the first update: in percent, and in microseconds for
each env step. `seconds` is the length of the measurement, to the end of an iteration; replay algorithms begin it only
after algo.learning_starts env steps. Only the main thread of the main process is measured: work in other processes,
such as workers that step or act, shows as the time that the main thread waits for them.

Method: a timer interrupts the main thread every millisecond, and the time since the last interrupt counts for the part
that the stack is in (benchmarks/parts/stacks.py lists the functions of each part). A call into C or torch cannot be
interrupted; it counts as a whole for its caller. So the times of parts shorter than a millisecond are right on average
only. The cost of a sample counts for the part sampled; the output also has the rate of the training during the
measurement. On a GPU work is queued: its time shows where the loop waits for it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlframe.core.command_line import KeyValues, run_command
from rlframe.core.errors import ConfigError
from rlframe.experiment.presets import DEFAULT_PRESET, competing_work
from rlframe.system.machine import limit_threads

REFUSED = ("resume", "world_size", "learners", "dry_run", "tune_sampler", "log_dir", "runner.n_steps")


class Enough(BaseException):
    """Raised when the measurement is long enough."""


@dataclass(frozen=True)
class Profile:
    """The result of a profile."""

    seconds: dict[str, float]  # of each part
    env_steps: int
    updates: int

    def lines(self) -> list[str]:
        """The table, the largest part first."""
        total = sum(self.seconds.values())
        rate = f"{self.env_steps / total:,.0f} env steps and {self.updates / total:,.1f} updates a second"
        rows = [f"{'part':<30} {'share':>7} {'us an env step':>15}"]
        for name, each in sorted(self.seconds.items(), key=lambda item: -item[1]):
            rows.append(f"{name:<30} {100 * each / total:>6.1f}% {1e6 * each / self.env_steps:>15,.1f}")
        return [f"{total:.1f} s, {self.env_steps:,} env steps: {rate}", *rows]


def profile(words: dict[str, str], seconds: float) -> Profile:
    """Train until so many seconds after the first update have been profiled."""
    from benchmarks.parts.stacks import Stacks
    from rlframe.experiment import hardware
    from rlframe.experiment.build import build
    from rlframe.experiment.presets import load_preset
    from rlframe.experiment.settings import from_flat
    from rlframe.record import logger_context
    from rlframe.system.affinity import pin
    from rlframe.system.machine import retain_freed_memory

    preset = words.pop("experiment", "" if {"env", "algo"} & set(words) else DEFAULT_PRESET)
    experiment = from_flat(*([load_preset(preset)] if preset else []), {**words, "runner.n_steps": "1e9"})
    retain_freed_memory()
    resolved = hardware.resolve(experiment)
    pin(resolved.affinity.master)
    stacks, begin = Stacks(), (0, 0)
    with ExitStack() as stack:
        built = build(resolved.experiment, resolved.affinity)
        stack.callback(built.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(
            logger_context(log_dir=folder, snapshot_mode=experiment.snapshot_mode, config={}, console=False)
        )
        print("\n".join([*resolved.notes, *(f"{name}: {fact}" for name, fact in built.summary.items())]), flush=True)
        runner, iterate = built.runner, built.runner.iterate

        def looked_at() -> None:
            nonlocal begin
            progress = runner.algo.progress
            if not stacks.running and progress.updates:
                begin = (progress.env_steps, progress.updates)
                stacks.start()
            elif sum(stacks.seconds.values()) >= seconds and progress.env_steps > begin[0]:
                stacks.stop()
                raise Enough
            iterate()

        runner.iterate = looked_at  # type: ignore[method-assign]
        with suppress(Enough):
            built.train()
    progress = runner.algo.progress
    return Profile(stacks.seconds, progress.env_steps - begin[0], progress.updates - begin[1])


def run(argv: Sequence[str]) -> int:
    """Profile the run that the words of a command line describe.

    Raises:
        ConfigError: a word is wrong.
    """
    words = KeyValues(argv)
    if refused := [key for key in words.remaining if key in REFUSED or key.startswith("sweep.")]:
        raise ConfigError(f"{refused[0]}= cannot be profiled; give the config of a single run in one process")
    out = words.text("out")
    try:
        seconds = float(words.text("seconds", "10"))
    except ValueError:
        raise ConfigError("seconds= must be a number") from None
    if not seconds > 0:
        raise ConfigError(f"seconds={seconds} must be above 0")
    limit_threads(competing_work(words.remaining))
    found = profile(words.remaining, seconds)
    print("\n".join(found.lines()))
    if out:
        Path(out).write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    if {"-h", "--help", "help"} & set(sys.argv[1:]):
        print(__doc__)
    else:
        sys.exit(run_command(run, sys.argv[1:]))
