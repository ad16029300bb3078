"""Runs in several ranks, by the launch command and by torchrun: their files, errors, stops and restarts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import PIPE, STDOUT

import psutil
import pytest

from rlframe.core.ranks import RankLost, current_ranks
from rlframe.launch import main
from rlframe.record.snapshot import list_snapshots, load_snapshot, resolve_snapshot
from rlframe.runners import Callback
from rlframe.system.distributed import RankInfo, join
from tests.fork_server import Popen
from tests.processes import DEADLINE_S, descendants, is_running, launched, until
from tests.tables import read_csv

ROOT = Path(__file__).parents[2]
PATIENCE_S = 2 * DEADLINE_S
SMALL = ["env=CartPole-v1", "sampler=serial", "sampler.batch_T=16", "sampler.batch_B=4", "algo=ppo"]
SMALL += ["algo.minibatches=2", "algo.epochs=2", "eval.n_envs=2", "eval.n_episodes=2", "affinity=none"]
SHORT = [*SMALL, "runner.n_steps=512", "runner.log_interval_steps=128"]
LONG = [*SMALL, "runner.n_steps=1e7", "runner.log_interval_steps=500"]
STANDALONE = ["torchrun", "--standalone", "--nproc-per-node", "2"]


def command(program: list[str], log_dir: Path, *words: str) -> list[str]:
    """Launch by a program such as torchrun; by Python itself if there is none."""
    runner = [sys.executable, "-m", "torch.distributed.run", *program[1:]] if program else [sys.executable]
    return [*runner, "-m", "rlframe.launch", f"log_dir={log_dir}", *words]


class LogsItsRank(Callback):
    def on_log(self, row: Mapping[str, float]) -> None:
        self.log("mine/rank", float(current_ranks().rank))


@contextlib.contextmanager
def started(*words: str) -> Iterator[Popen]:
    """A command in a process group of its own, all its processes are killed at the end."""
    process = Popen(words, stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True, cwd=ROOT)
    try:
        yield process
    finally:
        for pid in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def output_of(process: Popen) -> str:
    """Wait for the end, and return the output."""
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, printed
    return printed


def column(run: Path, name: str) -> list[float]:
    return [float(row[name]) for row in read_csv(run / "progress.csv")[1] if row[name]]


def rank_1_of(process: Popen) -> int:
    """The child of the launch command that is rank 1."""
    children = psutil.Process(process.pid).children()
    (found,) = [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]
    return found


@pytest.mark.quick
@pytest.mark.usefixtures("forked_ranks")
def test_a_run_of_two_ranks_has_the_files_of_one_and_is_resumed(tmp_path: Path) -> None:
    """And all follow a stop rule on what the first one logs."""
    words = [f"callbacks={__name__}:LogsItsRank", "stop=mine/rank > 0.5", "trust=true"]
    assert main([f"log_dir={tmp_path}", "world_size=2", *SHORT, *words]) == 0
    run = tmp_path / "run_0"
    config = json.loads((run / "params.json").read_text())["config"]
    assert (config["world_size"], config["runner"]) == (2, "sync_rl")
    assert {path.name.split(".tfevents")[0] for path in run.iterdir()} == {
        *("debug.log", "episodes.csv", "events.out", "params.json", "progress.csv", "progress.jsonl"),
        *("result.json", "snapshot"),
    }
    assert column(run, "env_steps")[0] == 0
    assert column(run, "env_steps")[-1] >= 512
    assert column(run, "mine/rank") == [0.0] * len(column(run, "env_steps"))
    assert column(run, "eval/n_episodes") == [2] * len(column(run, "env_steps"))
    snapshot = resolve_snapshot(run)
    states = [load_snapshot(snapshot, rank)[0] for rank in (0, 1)]
    assert states[0]["sampler"] != states[1]["sampler"]
    assert all((states[0]["agent"][name] == value).all() for name, value in states[1]["agent"].items())
    assert main([f"resume={run}", "runner.n_steps=700", "trust=true"]) == 0
    assert column(run, "env_steps") == sorted(column(run, "env_steps"))
    assert column(run, "env_steps")[-1] >= 700


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["world_size=0"], "world_size=0 must be at least 1"),
        (["world_size=3"], "eval.n_episodes=2 must be at least world_size=3"),
        (["world_size=3", "eval.n_episodes=3"], "eval.n_envs=2 must be at least world_size=3: each rank plays some"),
        (["world_size=2", "affinity=1cpu"], "1 cores are too few for 2 ranks on this machine"),
        (["world_size=2", "runner=tests.ranks.own_runner"], "needs runner=sync_rl"),
        (["world_size=2", "runner.timeout_s=0"], "runner.timeout_s=0"),
    ],
    ids=lambda words: words[-1] if isinstance(words, list) else "",
)
def test_wrong_settings_of_ranks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    replaced = tuple(f"{word.partition('=')[0]}=" for word in words)
    kept = [word for word in SHORT if not word.startswith(replaced)]
    kept = [word for word in kept if "runner=tests.ranks.own_runner" not in words or not word.startswith("runner.")]
    assert main([f"log_dir={tmp_path}", *kept, *words]) == 2
    assert says in capsys.readouterr().err


def test_another_number_of_ranks_does_not_resume_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"log_dir={tmp_path}", "runner=sync_rl", *SHORT]) == 0
    assert main([f"resume={tmp_path / 'run_0'}", "world_size=2"]) == 2
    assert "world_size cannot change" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_all_ranks_none_of_which_can_be_reached_by_others(tmp_path: Path) -> None:
    with launched(tmp_path, "world_size=2", *LONG) as process:
        ranks = descendants(process.pid)
        assert not [each for pid in [process.pid, *ranks] for each in psutil.Process(pid).net_connections("inet")]
        os.kill(process.pid, signal.SIGINT)
        printed, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, printed
        assert "snapshot written" in printed
        until(lambda: not any(map(is_running, ranks)))
    state, meta = load_snapshot(tmp_path / "run_0", rank=1)
    assert state["runner"]["env_steps"] == meta["env_steps"] > 0


LEARNERS = ["learners=2", *(word for word in LONG if not word.startswith("algo"))]
LEARNERS += ["algo=dqn", "algo.learning_starts=100", "algo.replay.size=5000"]


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("rank 1", ["world_size=2", *LONG]),
        pytest.param("rank 0", ["world_size=2", *LONG], marks=pytest.mark.slow),
        pytest.param("rank 1", LEARNERS, marks=pytest.mark.slow),
    ],
    ids=["rank 1", "rank 0", "a learner"],
)
def test_the_death_of_a_rank_ends_the_run_and_its_snapshot_remains(
    tmp_path: Path, which: str, words: list[str]
) -> None:
    with launched(tmp_path, *words) as process:
        ranks = descendants(process.pid)
        killed = rank_1_of(process) if which == "rank 1" else process.pid
        os.kill(killed, signal.SIGKILL)
        printed, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == (1 if which == "rank 1" else -signal.SIGKILL)
        until(lambda: not any(map(is_running, ranks)))
    if which == "rank 1":
        assert f"error: rank 1 (process {killed}) was killed by SIGKILL" in printed
    newest = list_snapshots(tmp_path / "run_0" / "snapshot")[-1]
    assert load_snapshot(newest, rank=1)[1]["env_steps"] in column(tmp_path / "run_0", "env_steps")


@pytest.mark.usefixtures("forked_ranks")
def test_an_error_of_another_rank_is_printed_and_logged_by_the_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [f"log_dir={tmp_path}", "env=tests.ranks.envs:FaultyOnOne", "world_size=2", *SHORT[1:]]
    assert main(words) == 1
    assert "it is broken here" in "".join(capfd.readouterr())
    assert "it is broken here" in (tmp_path / "run_0" / "debug.log").read_text()


@pytest.mark.slow
def test_torchrun_starts_ranks_of_one_run(tmp_path: Path) -> None:
    with started(*command(STANDALONE, tmp_path, *SHORT)) as process:
        printed = output_of(process)
    assert printed.count("evaluate:") == 1
    assert column(tmp_path / "run_0", "env_steps")[-1] >= 512
    config = json.loads((tmp_path / "run_0" / "params.json").read_text())["config"]
    assert (config["world_size"], config["runner"]) == (2, "sync_rl")


@pytest.mark.slow
def test_torchrun_restarts_a_job_whose_rank_was_killed_and_it_completes_from_its_snapshot(tmp_path: Path) -> None:
    run = tmp_path / "run_0"
    words = [*SMALL, "runner.n_steps=30_000", "runner.log_interval_steps=2_000"]
    with started(*command([*STANDALONE, "--max-restarts", "1"], tmp_path, *words)) as process:
        until(lambda: (run / "progress.csv").exists() and len(column(run, "env_steps")) > 3, PATIENCE_S)
        ranks = [p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"]
        assert len(ranks) == 1
        ranks[0].kill()
        output_of(process)
    env_steps = column(run, "env_steps")
    assert env_steps == sorted(set(env_steps))
    assert env_steps[-1] >= 30_000
    (resumed,) = json.loads((run / "params.json").read_text())["resumed"]
    assert resumed["changed"] == {}
    assert column(run, "time/elapsed_s") == sorted(column(run, "time/elapsed_s"))


def test_torchrun_with_restarts_needs_log_dir(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_MAX_RESTARTS": 1}
    for name, value in {**there, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert main(SHORT) == 2
    assert "give log_dir=DIR" in capsys.readouterr().err
    assert main(["env=CartPole-v1", "algo=a2c", "world_size=3"]) == 2
    assert "world_size=3, but 2 ranks were started" in capsys.readouterr().err


@pytest.mark.slow
def test_jobs_at_the_same_time_do_not_interfere(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(started(*command(program, tmp_path / name, *SHORT, *words)))
            for name, program, words in (
                ("one", [], ["world_size=2"]),
                ("two", [], ["world_size=2"]),
                ("three", STANDALONE, []),
                ("four", STANDALONE, []),
            )
        ]
        for job in jobs:
            output_of(job)
    for name in ("one", "two", "three", "four"):
        assert column(tmp_path / name / "run_0", "env_steps")[-1] >= 512


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ppo_solves_cartpole_in_two_ranks(tmp_path: Path) -> None:
    words = ["experiment=classic/ppo_cartpole", "world_size=2", "sampler.batch_B=4", "snapshot_mode=none"]
    assert main([f"log_dir={tmp_path}", *words]) == 0
    assert max(column(tmp_path / "run_0", "eval/return_mean")) >= 475


def test_a_port_that_is_taken_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with (
            pytest.raises(RankLost, match=rf"port {port} is taken \(MASTER_PORT\), perhaps .*; choose a free one"),
            join(RankInfo(0, 2), timeout_s=20.0),
        ):
            pass
