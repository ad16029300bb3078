"""resume=URI: a run continues on another machine from its copy, exactly; copies of other people are bounded."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest

import rlframe
from rlframe import launch
from rlframe.core.errors import ConfigError
from rlframe.experiment.fetch import with_fetched
from rlframe.record.rank_state import list_snapshots
from tests.fork_server import Popen
from tests.processes import DEADLINE_S, until
from tests.record.filesystems import Fault, Store
from tests.runners.resumed import assert_runs_equal, stop_at, words

CASE = (
    "algo=ppo algo.epochs=2 algo.minibatches=2 env=CartPole-v1 model.hidden=[16] sampler=serial sampler.batch_T=16 "
    "sampler.batch_B=4 "
    "runner.log_interval_steps=64 runner.n_steps=256 eval.n_episodes=1 eval.n_envs=1 eval.n_workers=0 "
    "snapshot_mode=best"
)


def test_a_run_continues_elsewhere_from_its_copy_as_if_it_had_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(words(CASE, tmp_path / "whole")) == 0
    monkeypatch.chdir(tmp_path)
    stop_at(130, f"{CASE} sync=copies", tmp_path / "parts", monkeypatch)
    shutil.rmtree(tmp_path / "parts")  # the machine is gone
    uri = f"file://{tmp_path}/copies/parts/run_0"
    assert launch.main([f"resume={uri}", "log_dir=elsewhere"]) == 0
    assert_runs_equal(tmp_path / "whole/run_0", tmp_path / "elsewhere/run_0")
    assert_runs_equal(tmp_path / "whole/run_0", tmp_path / "copies/parts/run_0")
    assert os.readlink(tmp_path / "elsewhere/run_0/snapshot/best") == os.readlink(
        tmp_path / "whole/run_0/snapshot/best"
    )
    capsys.readouterr()
    assert launch.main([f"resume={uri}", "log_dir=elsewhere"]) == 2, "a run is never overwritten"
    assert "is not empty" in capsys.readouterr().err
    assert launch.main(["resume=elsewhere/run_0"]) == 2, "a directory cannot prove whose place it names"
    assert "copies the run to sync=copies; give sync= again" in capsys.readouterr().err
    result = rlframe.train(resume=uri, log_dir="third", sync="", **{"runner.n_steps": 320})
    assert result.directory == tmp_path / "third/run_0"
    assert not list((tmp_path / "copies").glob("third")), "it is not copied"


@pytest.fixture
def stored(trained: Path) -> dict[str, bytes]:
    """The keys of a store that has a copied run; a test may change them."""
    Fault.reset()
    paths = [
        path for path in trained.rglob("*") if path.is_file() and not path.is_relative_to(trained / "snapshot/last")
    ]
    Store.content |= {f"bucket/x/run_3/{path.relative_to(trained)}": path.read_bytes() for path in paths}
    return Store.content


URI = "store://bucket/x/run_3"


def test_a_copy_is_fetched_with_its_complete_snapshots_only(stored: dict[str, bytes], tmp_path: Path) -> None:
    base = "bucket/x/run_3"
    stored |= {
        f"{base}/snapshot/step_000000009999/arrays.safetensors": b"half of a newer one",
        f"{base}/snapshot/last": b"../../../etc",
        f"{base}/lock.json": b"{}",
        f"{base}/../escaped": b"x",
        f"{base}/.hidden": b"x",
        f"{base}/videos/step_1.gif": b"GIF",
    }
    keys = with_fetched({"resume": f"{URI}/", "log_dir": tmp_path / "here", "runner.n_steps": 96})
    run = tmp_path / "here/run_3"
    assert keys == {"resume": str(run), "sync": "store://bucket/x", "runner.n_steps": 96}
    names = [snapshot.name for snapshot in list_snapshots(run / "snapshot")]
    assert names == ["step_000000000032", os.readlink(run / "snapshot/last")]
    assert sorted(path.name for path in run.iterdir() if "tfevents" not in path.name) == [
        *("debug.log", "episodes.csv", "params.json", "progress.csv", "progress.jsonl", "result.json"),
        *("snapshot", "videos"),
    ]
    assert json.loads((run / "params.json").read_text())["chosen"]["sync"] == URI
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["run_3"]


def test_what_a_fetch_that_was_killed_left_goes_with_the_next(stored: dict[str, bytes], tmp_path: Path) -> None:
    left = tmp_path / f".fetching-run_3-{2**22 + 1}"  # no process has this number
    left.mkdir()
    (left / "params.json").write_text("{}")
    with_fetched({"resume": f"{URI}/", "log_dir": tmp_path, "runner.n_steps": 96})
    assert [path.name for path in tmp_path.iterdir()] == ["run_3"]


def foreign(stored: dict[str, bytes]) -> None:
    params = json.loads(stored["bucket/x/run_3/params.json"])
    params["config"]["algo"] = "./evil.py"
    stored["bucket/x/run_3/params.json"] = json.dumps(params).encode()


@pytest.mark.parametrize(
    ("change", "uri", "problem"),
    [
        (foreign, URI, f"{URI}/params.json names code .*trust=true"),
        (lambda x: x.clear(), URI, "is the run there"),
        (lambda x: x.pop("bucket/x/run_3/params.json"), URI, "holds no run"),
        (lambda _: None, "store://bucket/x", "it holds run_3: give one of them"),
        (lambda _: None, "store://bucket", "names no run"),
        (lambda x: x.update({"bucket/x/run_3/params.json": b"{" * 20_000_000}), URI, "more than the limit"),
        (lambda x: x.update({"bucket/x/run_3/params.json": b"[" * 20_000}), URI, "nested too deeply"),
        pytest.param(
            lambda x: x.update({f"bucket/x/run_3/{n}": b"" for n in range(140_000)}),
            *(URI, "more than 131,072 files"),
            marks=pytest.mark.slow,
        ),
        (lambda x: x.update({"bucket/x/run_3/big": Huge()}), URI, "cannot be written: it needs"),
    ],
)
def test_a_copy_that_is_no_run_of_ours_leaves_nothing_behind(
    change: Any, uri: str, problem: str, stored: dict[str, bytes], tmp_path: Path
) -> None:
    change(stored)
    (tmp_path / "kept").touch()
    with pytest.raises(ConfigError, match=problem):
        with_fetched({"resume": uri, "log_dir": tmp_path / "here"})
    assert not (tmp_path / "here").exists()


class Huge(bytes):
    """Says that it has a petabyte."""

    def __len__(self) -> int:
        return 10**15


N_KILLS = 12
LONG = CASE.replace("n_steps=256", "n_steps=12800")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_that_are_killed_and_lose_their_machine_equal_one_that_is_not(tmp_path: Path) -> None:
    """Each process continues from the copy in a new directory, and is killed at a random moment."""
    assert launch.main(words(LONG, tmp_path / "whole")) == 0
    choose, place, n_kills = random.Random(0), tmp_path / "copies/first/run_0", 0
    program = "import sys, tests.record.filesystems; from rlframe.launch import main; sys.exit(main(sys.argv[1:]))"
    while True:
        resumes = (place / "params.json").is_file()
        log_dir = tmp_path / (f"machine_{n_kills}" if resumes else "first")
        first = [*words(LONG, Path("first")), f"sync=slow://{tmp_path}/copies"]
        given = [f"resume=slow://{place}", f"log_dir={log_dir}"] if resumes else first
        with Popen(
            [sys.executable, "-c", program, *given], stdout=DEVNULL, start_new_session=True, cwd=tmp_path
        ) as process:
            log = log_dir / "run_0/debug.log"
            until(lambda log=log, process=process: process.poll() is not None or log.exists(), 4 * DEADLINE_S)
            if n_kills < N_KILLS:
                time.sleep(choose.uniform(0.1, 1.0))  # a random moment
                ended = process.poll()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            else:
                ended = process.wait(300)
        assert ended in (None, 0)
        shutil.rmtree(tmp_path / "first", ignore_errors=True)
        if ended == 0:
            break
        n_kills += 1
    assert n_kills > 3
    assert_runs_equal(tmp_path / "whole/run_0", log_dir / "run_0")
    assert_runs_equal(tmp_path / "whole/run_0", place)


@pytest.mark.slow
@pytest.mark.parametrize("n_signals", [1, 2])
def test_ctrl_c_ends_a_run_promptly_although_its_copy_hangs(n_signals: int, tmp_path: Path) -> None:
    program = (
        "import sys; from tests.record.filesystems import Fault; Fault.reset(); Fault.gate.clear()\n"
        "from rlframe.launch import main; sys.exit(main(sys.argv[1:]))"
    )
    command = words(CASE.replace("n_steps=256", "n_steps=1e9"), tmp_path)
    arguments = [sys.executable, "-c", program, *command, "sync=torn://bucket"]
    with Popen(arguments, stderr=PIPE, stdout=PIPE, start_new_session=True, text=True) as process:
        table, log = tmp_path / "run_0/progress.csv", tmp_path / "run_0/debug.log"
        until(lambda: table.exists() and len(table.read_text().splitlines()) > 3)
        process.send_signal(signal.SIGINT)
        start_s = time.monotonic()
        if n_signals == 2:
            until(lambda: "copying the end of the run" in log.read_text())
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - start_s < (30 if n_signals == 1 else 8)
    assert n_signals == 2 or "has no snapshot of this process, not its end" in output


@pytest.mark.slow
def test_each_run_of_a_study_copies_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = ["sweep.algo.learning_rate=1e-3,3e-4", "repeats=2", "log_dir=study", "affinity=none", "sync=copies"]
    command = [word for word in words(CASE, tmp_path) if not word.startswith(("log_dir=", "affinity="))]
    assert launch.main([*command, *study]) == 0
    for setting in ("learning_rate=1e-3", "learning_rate=3e-4"):
        for run in ("run_0", "run_1"):
            place = f"study/{setting}/{run}"
            assert_runs_equal(tmp_path / place, tmp_path / "copies" / place)
