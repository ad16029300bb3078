"""`launch retries=N` of one run, with real faults: it is as without retries, but goes on after a failure."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from rlframe.record.snapshot import list_snapshots
from rlframe.study import process
from rlframe.study.plan import PlannedRun
from tests.fork_server import Popen
from tests.processes import DEADLINE_S, descendants, is_running, launching, until
from tests.tables import read_csv

ROOT = Path(__file__).parents[2]
FAULTY = """
import os
import signal
from pathlib import Path
import gymnasium

class Faulty(gymnasium.Wrapper):
    steps = 0

    def step(self, action):
        self.steps += 1
        marks = [Path(f"{self.marks}.{n}") for n in range(self.n_faults)]
        left = [mark for mark in marks if not mark.exists()]
        if self.steps == self.at and left:
            left[0].touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

def make(marks="", at=0, n_faults=0):
    env = Faulty(gymnasium.make("CartPole-v1"))
    env.marks, env.at, env.n_faults = marks, at, n_faults
    return env
"""
SHORT = ("sampler=serial", "sampler.batch_T=32", "sampler.batch_B=1", "eval.n_envs=1", "eval.n_episodes=1")
STEPS = (*SHORT, "runner=minibatch_rl", "runner.n_steps=1024", "runner.log_interval_steps=256")


def launching_in(folder: Path, *words: str) -> AbstractContextManager[Popen]:
    """The launch command in a folder with the faulty environment."""
    (folder / "faulty.py").write_text(FAULTY)
    path = os.pathsep.join([str(folder), str(ROOT)])
    return launching(*words, cwd=folder, env={**os.environ, "PYTHONPATH": path})


def launch(folder: Path, *words: str) -> tuple[int, str]:
    with launching_in(folder, *words) as process:
        output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def faults(folder: Path, n: int, at: int) -> tuple[str, ...]:
    """A run that kills itself at this step of its environment, in its first n attempts."""
    return (
        "env=faulty:make",
        f"env_kwargs.marks={folder / 'mark'}",
        f"env_kwargs.at={at}",
        f"env_kwargs.n_faults={n}",
    )


@pytest.mark.slow
def test_a_run_that_is_killed_once_continues_from_its_snapshot_and_ends(tmp_path: Path) -> None:
    words = (*faults(tmp_path, 1, at=700), *STEPS, "retries=2", f"log_dir={tmp_path / 'runs'}", "run_ID=4")
    status, output = launch(tmp_path, *words)
    assert status == 0, output
    run = tmp_path / "runs/run_4"
    assert f"{run} failed, killed by signal 9, Killed; it continues from its snapshot; retries left: 1" in output
    assert "evaluate: " in output
    assert [path.name for path in run.parent.iterdir()] == ["run_4"]
    steps = [int(row["env_steps"]) for row in read_csv(run / "progress.csv")[1]]
    assert steps == sorted(set(steps))
    assert steps[-1] >= 1024
    assert len(json.loads((run / "params.json").read_text())["resumed"]) == 1


@pytest.mark.slow
def test_a_resumed_run_is_retried_with_its_new_settings(tmp_path: Path) -> None:
    words = (*faults(tmp_path, 1, at=1500), *STEPS, f"log_dir={tmp_path / 'runs'}")
    run = tmp_path / "runs/run_0"
    assert launch(tmp_path, *words)[0] == 0
    resume = ("runner.n_steps=2048", "trust=true", "retries=1", f"resume={run}")
    status, output = launch(tmp_path, *resume)
    assert status == 0, output
    assert "it continues from its snapshot; retries left: 0" in output
    assert int(read_csv(run / "progress.csv")[1][-1]["env_steps"]) >= 2048


@pytest.mark.slow
def test_a_run_that_is_killed_without_a_snapshot_starts_anew_below_data(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()  # the project's root
    status, output = launch(
        tmp_path, *faults(tmp_path, 1, at=5), *STEPS, "snapshot_mode=none", "retries=1", "name=mine"
    )
    assert status == 0, output
    assert "it starts anew, as it has no snapshot; retries left: 0" in output, output
    (run,) = tmp_path.glob("data/local/*/*/mine/run_0")
    assert (run / "progress.csv").is_file()
    assert (run.parent / ".run_0.1").is_dir()


@pytest.mark.slow
def test_after_its_last_retry_a_run_has_the_exit_status_of_its_failure(tmp_path: Path) -> None:
    status, output = launch(tmp_path, *faults(tmp_path, 9, at=5), *STEPS, "retries=1", f"log_dir={tmp_path / 'runs'}")
    assert status == 128 + signal.SIGKILL, output
    assert output.count(" failed, ") == 1
    assert len(list(tmp_path.glob("mark.*"))) == 2


@pytest.mark.slow
def test_a_run_that_is_refused_is_not_retried_and_leaves_nothing(tmp_path: Path) -> None:
    status, output = launch(tmp_path, "env=faulty:missing", "retries=3", f"log_dir={tmp_path / 'runs'}")
    assert status == 2, output
    assert "retries left" not in output
    assert not list(tmp_path.glob("runs/*"))


def test_a_resumed_run_without_a_snapshot_is_started_anew_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run_0").mkdir()
    (tmp_path / "run_0/params.json").write_text("{}")
    command, statuses = ("launch", f"resume={tmp_path / 'run_0'}"), [1, 0]
    monkeypatch.setattr(process, "_attempt", lambda given, _: statuses.pop(0) if given == command else 9)
    assert process.run_with_retries(PlannedRun("", 0, {}, tmp_path / "run_0", command, command), 3) == 0
    assert "it starts anew, as it has no snapshot; retries left: 2" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run_0"]


def test_a_directory_with_a_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "runs/run_0/snapshot/step_000000000100").mkdir(parents=True)
    status, output = launch(tmp_path, "env=CartPole-v1", "retries=3", f"log_dir={tmp_path / 'runs'}")
    assert status == 2
    assert "run_0 is not empty: a run is never overwritten" in output


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[Popen, Path]]:
    """A run with retries that has logged rows, and its directory."""
    words = (*SHORT, "env=CartPole-v1", "runner.n_steps=1e8", "runner.log_interval_steps=256", "retries=3")
    with launching_in(tmp_path, *words, f"log_dir={tmp_path / 'runs'}") as process:
        rows = tmp_path / "runs/run_0/progress.csv"
        until(lambda: rows.is_file() and len(read_csv(rows)[1]) > 1, DEADLINE_S)
        yield process, rows.parent


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_with_a_snapshot_and_its_exit_status(
    endless: tuple[Popen, Path], signum: int, status: int
) -> None:
    process, run = endless
    process.send_signal(signum)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == status, output
    assert "retries left" not in output
    assert list_snapshots(run / "snapshot")


def test_the_run_ends_with_the_process_that_restarts_it(endless: tuple[Popen, Path]) -> None:
    process, _ = endless
    family = descendants(process.pid)
    assert family
    process.kill()
    for pid in family:
        until(lambda pid=pid: not is_running(pid))
