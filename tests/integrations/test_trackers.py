"""Weights & Biases, MLflow and Trackio: what they have of a run is what progress.csv has, also after kills."""

import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.wandb_file import history
from tests.tables import read_csv

TRACKERS = ("wandb", "mlflow", "trackio")
KEYS = ["env=CartPole-v1", "sampler=serial", "eval.n_episodes=1", "affinity=none", "threads=1"]
N_KILLS = int(os.environ.get("KILLS", "5"))
MEASURED = ("time/", "memory/", "system/", "record/")  # not the same when a row is made again

Point = tuple[int, str, float]

each = pytest.mark.parametrize("tracker", TRACKERS)


def launch(directory: Path, *words: str, wait: bool = True) -> subprocess.Popen[str]:
    """Start a run with all that a tracker writes inside `directory`, and by default wait for its end."""
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{directory}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(directory / "trackio"),
    }
    command = [sys.executable, "-m", "rlframe.launch", *words]
    output = (directory / "output.txt").open("a")
    process = subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environment)
    output.close()
    if wait:
        assert process.wait(90) == 0, (directory / "output.txt").read_text()
    return process


def points_of_wandb(directory: Path) -> list[Point]:
    newest = max((directory / "run_0/wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    rows = history(newest)
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    return [
        (row["env_steps"], name, float(value))
        for row in rows
        for name, value in row.items()
        if name != "env_steps" and not name.startswith("_")
    ]


def points_of_mlflow(directory: Path) -> list[Point]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    (run,) = client.search_runs(["0"])
    found = [metric for name in run.data.metrics for metric in client.get_metric_history(run.info.run_id, name)]
    return [(metric.step, metric.key, metric.value) for metric in found]


def points_of_trackio(directory: Path) -> list[Point]:
    with sqlite3.connect(directory / "trackio/rlframe.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    return [(step, name, float(value)) for _, step, row in rows for name, value in json.loads(row).items()]


POINTS_OF: dict[str, Callable[[Path], list[Point]]] = {
    "wandb": points_of_wandb,
    "mlflow": points_of_mlflow,
    "trackio": points_of_trackio,
}


def assert_nothing_lost_or_doubled(directory: Path, tracker: str) -> None:
    rows = read_csv(directory / "run_0/progress.csv")[1]
    logged = {
        (int(row["env_steps"]), name): float(cell)
        for row in rows
        for name, cell in row.items()
        if cell and name != "env_steps"
    }
    found = POINTS_OF[tracker](directory)
    counts = Counter((env_steps, name) for env_steps, name, _ in found)
    assert set(counts) == set(logged)
    assert max(counts.values()) == 1
    for env_steps, name, value in found:
        if tracker == "wandb" or not name.startswith(MEASURED):
            assert math.isclose(value, logged[env_steps, name], rel_tol=1e-12), (env_steps, name)


@each
def test_a_tracker_has_the_points_of_progress_csv(tracker: str, tmp_path: Path) -> None:
    pytest.importorskip(tracker)
    steps = ("runner.n_steps=2000", "runner.log_interval_steps=500")
    launch(tmp_path, *KEYS, *steps, f"loggers={tracker}", f"log_dir={tmp_path}")
    assert len(read_csv(tmp_path / "run_0/progress.csv")[1]) > 2
    assert_nothing_lost_or_doubled(tmp_path, tracker)


@each
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*noload:DeprecationWarning")  # of SQLAlchemy, in MLflow
def test_kills_at_random_moments_lose_and_double_nothing(tracker: str, tmp_path: Path) -> None:
    pytest.importorskip(tracker)
    steps = ("runner.n_steps=120_000", "runner.log_interval_steps=1000")
    draw = random.Random(tracker)
    words = [*KEYS, *steps, f"loggers={tracker}", f"log_dir={tmp_path}"]
    for _ in range(N_KILLS):
        process = launch(tmp_path, *words, wait=False)
        n_before = n_rows(tmp_path)
        deadline = time.monotonic() + 60
        while n_rows(tmp_path) <= n_before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.7))
        assert process.poll() is None, (tmp_path / "output.txt").read_text()
        process.send_signal(signal.SIGKILL)
        process.wait()
        words = [f"resume={tmp_path / 'run_0'}"]
    launch(tmp_path, *words)
    assert int(read_csv(tmp_path / "run_0/progress.csv")[1][-1]["env_steps"]) >= 120_000 - 8 * 128
    assert_nothing_lost_or_doubled(tmp_path, tracker)


def n_rows(directory: Path) -> int:
    file = directory / "run_0/progress.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def test_the_config_is_a_runs_params_in_mlflow_and_the_run_is_finished(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    launch(tmp_path, *KEYS, "runner.n_steps=500", "loggers=mlflow", f"log_dir={tmp_path}", "name=mine")
    (run,) = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["0"])
    config = json.loads((tmp_path / "run_0/params.json").read_text())["config"]
    assert run.data.params == {key: str(value) for key, value in config.items()}
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")


@pytest.mark.parametrize("n_arrived", range(4))
def test_wandb_online_sends_the_steps_that_the_server_does_not_count(
    n_arrived: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    from rlframe.integrations.wandb import WandbLogger

    server: list[dict[str, Any]] = []
    given: list[dict[str, Any]] = []

    class Run:
        def define_metric(self, name: str, step_metric: str = "") -> None: ...

        @property
        def step(self) -> int:
            return len(server)

        def log(self, row: dict[str, Any]) -> None:
            server.append(row)

        def finish(self, exit_code: int) -> None: ...

    def init(**options: Any) -> Run:
        given.append(options)
        return Run()

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "setup", lambda: wandb_setup("online"))
    rows = [{"env_steps": 10, "a": 1.0}, {"env_steps": 20, "a": 2.0}, {"env_steps": 10, "b": 3.0}]
    write_rows(tmp_path, rows)
    first = WandbLogger(tmp_path, {}, "run")
    first.close()
    assert server == rows
    del server[n_arrived:]  # the others were on their way when the run was killed
    write_rows(tmp_path, [rows[0], rows[2], rows[1]])  # made again in another order
    second = WandbLogger(tmp_path, {}, "run")
    second.close()
    assert sorted(map(str, server)) == sorted(map(str, rows))
    assert [options["resume"] for options in given] == [None, "allow"]
    assert given[0]["id"] == given[1]["id"]


def wandb_setup(mode: str) -> Any:
    settings = type("Settings", (), {"mode": mode})()
    return type("Setup", (), {"settings": settings})()


def write_rows(directory: Path, rows: list[dict[str, Any]]) -> None:
    (directory / "progress.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
