"""Signals to real runs in every part of the loop: the run ends within 10 s, can be resumed, and no process remains."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from rlframe import launch
from rlframe.record.snapshot import load_snapshot, resolve_snapshot
from tests.processes import DEADLINE_S, descendants, is_running, launched, until

PPO = ["env=CartPole-v1", "algo=ppo", "sampler.batch_B=4", "runner.n_steps=1e8"]
PPO += ["algo.minibatches=1", "eval.n_envs=2"]
DQN = ["env=CartPole-v1", "algo=dqn", "sampler.batch_T=16", "sampler.batch_B=4", "runner.n_steps=1e8"]
DQN += ["algo.learning_starts=64", "algo.batch_size=32", "algo.replay.size=100000"]
PHASES = {  # where the time of a run goes
    "sampling": [*PPO, "sampler.batch_T=512", "algo.epochs=1", "runner.log_interval_steps=4096", "eval.n_episodes=2"],
    "learning": [*DQN, "algo.replay_ratio=1024", "runner.log_interval_steps=64", "eval.n_episodes=2"],
    "evaluating": [*PPO, "sampler.batch_T=16", "runner.log_interval_steps=64", "eval.n_episodes=300"],
    "snapshotting": [*DQN, "algo.replay_ratio=1", "runner.log_interval_steps=64", "eval.n_episodes=2"],
}
HOW = {
    "serial": ["sampler=serial"],
    "cpu": ["sampler=cpu", "sampler.n_workers=2"],
    "gpu": ["sampler=gpu", "sampler.n_workers=2"],
    "async": ["sampler=serial", "runner=async_rl"],
    "ranks": ["sampler=serial", "world_size=2", "affinity=none"],
}


def stop(log_dir: Path, words: list[str], signum: int, after_s: float) -> None:
    with launched(log_dir, *words) as process:
        time.sleep(after_s)  # into the phase, at a different moment each time
        children = descendants(process.pid)
        os.kill(process.pid, signum)
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signum, output
    assert "Traceback" not in output
    until(lambda: not any(map(is_running, children)))
    run = log_dir / "run_0"
    assert load_snapshot(resolve_snapshot(run))[1]["env_steps"] > 0
    assert not (run / "lock.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)  # on a machine with other work
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_any_phase_ends_the_run_in_time_and_it_can_be_resumed(phase: str, how: str, tmp_path: Path) -> None:
    for index, signum in enumerate((signal.SIGTERM, signal.SIGHUP)):
        words = [*PHASES[phase], *HOW[how]]
        log_dir = tmp_path / str(index)
        stop(log_dir, words, signum, 0.3 + 0.4 * index)
        before = load_snapshot(resolve_snapshot(log_dir / "run_0"))[1]["env_steps"]
        again = [f"resume={log_dir / 'run_0'}", f"runner.n_steps={before + 64}", "eval.n_episodes=2"]
        assert launch.main(again) == 0


def test_a_run_at_its_time_limit_exits_with_0_and_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *PPO,
        "sampler.batch_T=16",
        "sampler=serial",
        "eval.n_episodes=1",
        "runner.log_interval_steps=1e6",
        "runner.max_time_s=0.5",
    ]
    assert launch.main([f"log_dir={tmp_path}", *words]) == 0
    assert "the time is over (runner.max_time_s=0.5)" in capsys.readouterr().out
    steps = load_snapshot(resolve_snapshot(tmp_path / "run_0"))[1]["env_steps"]
    assert json.loads((tmp_path / "run_0/result.json").read_text())["env_steps"] == steps > 0
    assert launch.main([f"resume={tmp_path / 'run_0'}", f"runner.n_steps={steps + 64}", "runner.max_time_s=0"]) == 0


def raises_at_ctrl_c(pid: int) -> bool:
    """Whether a process has a handler of SIGINT, as Python installs at its start; False where nothing says so."""
    status = Path(f"/proc/{pid}/status")
    caught = re.search(r"SigCgt:\s*(\w+)", status.read_text()) if status.exists() else None
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGINT - 1) & 1)


def has_imported(package: str, pid: int) -> bool:
    """Whether a process has loaded a compiled module of a package; True where nothing says so."""
    maps = Path(f"/proc/{pid}/maps")
    return f"/{package}/" in maps.read_text() if maps.exists() else True


@pytest.mark.parametrize(
    ("command", "after_s"), [("launch", 0.1), pytest.param("launch", 1.5, marks=pytest.mark.slow), ("evaluate", 0.6)]
)
def test_ctrl_c_during_the_imports_ends_a_command_without_a_traceback(
    command: str, after_s: float, tmp_path: Path
) -> None:
    words = [f"log_dir={tmp_path}", "runner.n_steps=1e8"] if command == "launch" else [str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", f"rlframe.{command}", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    time.sleep(after_s)  # Python itself may still start then, which takes longer on a busy machine
    until(lambda: not raises_at_ctrl_c(process.pid) or has_imported("numpy", process.pid))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode in (-signal.SIGINT, 130, 1), output  # 1: there was no run to evaluate
    assert "Traceback" not in output


@pytest.mark.parametrize("after_s", [0.05, pytest.param(0.3, marks=pytest.mark.slow)])
def test_a_second_ctrl_c_shows_no_traceback_and_leaves_no_process(after_s: float, tmp_path: Path) -> None:
    words = [*PPO, "sampler.batch_T=16", "runner.log_interval_steps=640", "eval.n_episodes=2", *HOW["gpu"]]
    with launched(tmp_path, *words) as process:
        children = descendants(process.pid)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(after_s)
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode in (-signal.SIGINT, 130), output
    assert "Traceback" not in output + (tmp_path / "run_0/debug.log").read_text()
    until(lambda: not any(map(is_running, children)))


LEAVES = """
import sys, threading
import rlframe.core.command_line as commands
commands.EXIT_S = 0.2
threading.Thread(target=threading.Event().wait, name="viewer", daemon=len(sys.argv) > 1).start()
print("done")
commands.exit_with(3)
"""


def test_a_command_ends_with_its_status_although_a_thread_of_an_environment_runs_on() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stdout) == (3, "done\n")
    assert ended.stderr == "warning: ended although threads still run after 0.2 s: viewer\n"
    ended = subprocess.run([sys.executable, "-c", LEAVES, "daemon"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stderr) == (3, "")


CLINGS = """
import threading, time, gymnasium

class Clings(gymnasium.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        threading.Thread(target=threading.Event().wait, name="viewer").start()

    def close(self):
        time.sleep(1000)

def make():
    return Clings(gymnasium.make("CartPole-v1"))
"""


@pytest.mark.slow
def test_a_run_ends_well_although_an_environment_never_closes_and_its_thread_never_ends(tmp_path: Path) -> None:
    (tmp_path / "clings.py").write_text(CLINGS)
    words = ["env=clings:make", "runner=minibatch_rl", "sampler=serial", "affinity=none", "runner.n_steps=64"]
    words += ["algo.minibatches=1", "sampler.batch_T=16", "sampler.batch_B=1", f"log_dir={tmp_path}"]
    ended = subprocess.run(
        [sys.executable, "-m", "rlframe.launch", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert "environment 0 did not close within 5 s" in ended.stderr
    assert "threads still run after 5 s: viewer" in ended.stderr
    assert load_snapshot(resolve_snapshot(tmp_path / "run_0"))[1]["env_steps"] >= 64
