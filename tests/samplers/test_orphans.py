"""Workers end with their parent, however it ends and whatever they are doing, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import descendants, is_running, until
from tests.samplers.supervised import SLOW

ROOT = Path(__file__).parents[2]
BOTH = ["forkserver", pytest.param("spawn", marks=SLOW)]


class Master:
    """A script in its own process group, and the processes that it has started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.workers = [int(word) for word in self.line().split()]
        self.pids = set(self.workers)  # some masters end at once, and theirs with them
        self.look()

    def look(self) -> None:
        """Record all processes that it has started by now."""
        self.pids |= set(descendants(self.process.pid))

    def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout
        return self.process.stdout.readline()

    def ended(self, timeout_s: float = 30.0) -> tuple[int, str, str]:
        """Its exit status and the rest of its output; checks that no process is left."""
        out, err = self.process.communicate(timeout=timeout_s)
        until(lambda: not any(map(is_running, self.pids)))
        return self.process.returncode, out, err


@contextmanager
def master_for(*arguments: str) -> Iterator[Master]:
    """`master.py` with arguments, once its workers are stepping."""
    script = str(Path(__file__).with_name("master.py"))
    with subprocess.Popen(
        [sys.executable, script, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Master(process)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("forkserver", "hang_in_c"),
        pytest.param("spawn", "hang_in_c", marks=SLOW),
        ("forkserver", "start_program"),
        pytest.param("spawn", "step", marks=SLOW),
        pytest.param("forkserver", "stop", marks=SLOW),
        pytest.param("forkserver", "hang_in_python", marks=SLOW),
        pytest.param("spawn", "hang_in_python", marks=SLOW),
    ],
)
def test_workers_end_with_a_parent_that_is_killed(method: str, what: str, tmp_path: Path) -> None:
    with master_for(method, what, str(tmp_path / "hangs"), "endless") as master:
        assert master.line() == "ready\n"
        if what != "step":
            until((tmp_path / "hangs.0").exists)
        master.look()
        maps = Path(f"/proc/{master.process.pid}/maps").read_text()
        assert re.search(r"/memfd:rlframe-rows \(deleted\)", maps)
        inodes = {int(inode) for inode in re.findall(r"(\d+) +/dev/shm/\S+", maps)}
        assert inodes, "its semaphores"
        assert not inodes & {each.inode() for each in os.scandir("/dev/shm")}, "no name of ours may stay"
        master.process.kill()
        until(lambda: not any(map(is_running, master.pids)))


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize(
    ("ending", "status"), [("raise", 1), pytest.param("leave", 0, marks=SLOW), pytest.param("exit", 5, marks=SLOW)]
)
def test_a_parent_may_end_without_closing(ending: str, status: int, method: str) -> None:
    with master_for(method, "step", "", ending) as master:
        code, _, said = master.ended()
    assert code == status
    assert said.count("Traceback") == (ending == "raise")


@pytest.mark.parametrize("method", BOTH)
def test_ctrl_c_interrupts_only_the_parent_and_once(method: str) -> None:
    with master_for(method, "step", "", "endless") as master:
        assert master.line() == "ready\n"
        os.killpg(master.process.pid, signal.SIGINT)
        code, _, said = master.ended()
    assert code == -signal.SIGINT
    assert said.count("Traceback") == 1
    assert said.count("KeyboardInterrupt") == 1


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=SLOW), signal.SIGTERM])
def test_workers_ignore_signals_until_the_parent_has_stopped(signum: int, method: str) -> None:
    with master_for(method, "step", "", "stop") as master:
        assert master.line() == "ready\n"
        os.killpg(master.process.pid, signum)
        code, out, said = master.ended()
    assert said == ""
    assert (code, out) == (0, "0 restarts\n")


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_parent_that_waits_for_a_hanging_worker(tmp_path: Path) -> None:
    with master_for("forkserver", "hang_in_c", str(tmp_path / "hangs"), "close") as master:
        until((tmp_path / "hangs.0").exists)
        for _ in range(2):
            os.killpg(master.process.pid, signal.SIGINT)
            if not master.line():
                break
        code, _, _ = master.ended()
    assert code == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["raise", "exit", "leave"])
def test_a_parent_may_end_while_a_worker_hangs(ending: str, tmp_path: Path) -> None:
    with master_for("forkserver", "hang_in_c", str(tmp_path / "hangs"), ending) as master:
        code, _, said = master.ended()
    assert code == {"raise": 1, "exit": 5, "leave": 0}[ending]
    assert said.count("Traceback") == (ending == "raise")


@pytest.mark.slow
def test_a_parent_stopped_for_longer_than_the_timeout_restarts_no_worker() -> None:
    with master_for("forkserver", "step", "", "many") as master:
        os.kill(master.process.pid, signal.SIGSTOP)
        start = time.monotonic()
        until(lambda: time.monotonic() - start > 1.5)
        os.kill(master.process.pid, signal.SIGCONT)
        code, out, _ = master.ended(60.0)
    assert (code, out) == (0, "0 restarts\n")


SCRIPT = """
import torch
import gymnasium
from rlframe.envs import EnvConfig
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.samplers import GpuSampler
from rlframe.system.service import Supervision
from tests.samplers.faulty import Modules
from tests.samplers.made import agent_for

print("here")

class Here(Modules):
    def reset(self, **kwargs):
        return super().reset(**kwargs)

envs = WorkerPool(EnvConfig(lambda: Here(), {}, "python"), 2, [1, 2], 2, (), Supervision(60.0, 0, "METHOD"))
sampler = GpuSampler(envs, agent_for(envs.observation_space, envs.action_space), 16)
sampler.collect()
print(*[f"{each.diagnostics['torch']:g} {each.diagnostics['rss_mb']:.0f}" for each in sampler.trajectories()[:2]])
"""


@pytest.mark.parametrize("method", BOTH)
def test_a_script_without_a_main_guard_runs_once_and_its_workers_load_no_torch(method: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("METHOD", method))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    here, *reported = done.stdout.split()
    assert here == "here"
    assert reported[0] == reported[2] == "0"
    assert max(int(reported[1]), int(reported[3])) < 150
