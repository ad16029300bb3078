"""record=NAME: a run writes its episodes beside learning, exactly, also if it is killed and resumed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import rlframe
from rlframe import evaluate, launch
from rlframe.core.errors import ConfigError
from rlframe.core.types import Trajectory
from rlframe.data import NewDataset, open_dataset
from rlframe.data.episodes import as_batches
from rlframe.evaluation.recording import EvaluationRecorder
from rlframe.experiment.job import check_words
from rlframe.record.snapshot import list_snapshots
from rlframe.runners.recording import named_for
from tests.data.episodes import CARTPOLE, arrays, episodes
from tests.data.telling import check_told
from tests.processes import launching, until
from tests.tables import read_csv

RUN = (
    *("algo=a2c", "env=CartPole-v1", "sampler=serial", "sampler.batch_T=32", "sampler.batch_B=4", "eval.n_episodes=0"),
    *("runner.log_interval_steps=512", "model.hidden=[8]", "log_level=WARNING", "affinity=none"),
)


def returns(path: Path) -> list[float]:
    return [episode.return_ for episode in open_dataset(path).episodes()]


def test_a_run_records_the_episodes_of_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*RUN, "runner.n_steps=1024", f"log_dir={tmp_path}", f"record={tmp_path}/a2c-{{seed}}-v0", "seed=3"]
    assert launch.main(words) == 0
    dataset = open_dataset(tmp_path / "a2c-3-v0")
    logged = read_csv(tmp_path / "run_0/episodes.csv")[1]
    assert dataset.n_episodes == len(logged) > 10
    assert sorted(returns(dataset.path)) == sorted(float(each["return"]) for each in logged)
    assert dataset.env_id == "CartPole-v1"
    assert dataset.metadata["algorithm_name"] == "a2c"
    assert all(np.isfinite(episode.info["log_prob"]).all() for episode in dataset.episodes())
    others = [f"log_dir={tmp_path}/other" if word.startswith("log_dir") else word for word in words]
    assert launch.main(others) == 2
    assert "a2c-3-v0: a dataset is there already" in capsys.readouterr().err
    assert evaluate.main([str(tmp_path / "run_0"), "n_episodes=3", "n_envs=2", f"dataset={tmp_path}/ev-v0"]) == 0
    shown = capsys.readouterr().out
    played = [float(line.split()[3]) for line in shown.splitlines() if line.startswith("Episode #")]
    assert sorted(returns(tmp_path / "ev-v0")) == sorted(played)
    assert all(not episode.info for episode in open_dataset(tmp_path / "ev-v0").episodes()), "greedy: no log_prob"


def test_a_run_that_has_ended_leaves_no_thread(tmp_path: Path) -> None:
    assert launch.main([*RUN, "runner.n_steps=512", f"log_dir={tmp_path}", f"record={tmp_path}/a2c-v0"]) == 0
    writing = [thread for thread in threading.enumerate() if thread.name == "recording"]
    for thread in writing:
        thread.join(10)
    assert not any(thread.is_alive() for thread in writing)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("algo=es",), "record=x-v0 writes the batches of a sampler"),
        (
            ("algo=ppo", "env.normalize_reward=true"),
            "writes the sampler's rewards, not those of env.normalize_reward=true",
        ),
        (("algo=ppo", "record=x"), "record: 'x' is no dataset"),
        (("algo=ppo", "record=x-{env}-v0"), "may have {seed} and {run_ID} in braces"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str], says: str
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    given = {"env": "CartPole-v1", "record": "x-v0", **dict(word.split("=", 1) for word in words)}
    assert launch.main([f"{key}={value}" for key, value in given.items()] + [f"log_dir={tmp_path}/runs"]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def is_that_of(run: Path, path: Path) -> bool:
    logged = [float(each["return"]) for each in read_csv(run / "episodes.csv")[1]]
    return sorted(returns(path)) == sorted(logged) and len(logged) > 5


@pytest.mark.slow
def test_a_run_killed_before_its_first_snapshot_overwrites_its_own_dataset_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path, kept = tmp_path / "run_0", tmp_path / "own-v0", tmp_path / "kept"
    words, short = [*RUN, f"record={path}"], "runner.n_steps=512"
    endless = [word for word in words if "log_interval" not in word] + ["runner.log_interval_steps=1e7"]
    endless += ["snapshot_mode=gap", "snapshot_gap=1e6"]
    with launching(*endless, f"log_dir={tmp_path}", "runner.n_steps=1e7") as process:
        until(lambda: path.exists() and open_dataset(path).n_episodes > 5)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not list_snapshots(run / "snapshot")
    assert launch.main([*words, short, f"log_dir={tmp_path}/other"]) == 2
    assert "own-v0: a dataset is there already" in capsys.readouterr().err
    shutil.copytree(tmp_path, kept)

    def back(to: Path) -> None:
        """Everything is as it was after the kill, but for the place of the run directory."""
        for each, source in ((run, kept / "run_0"), (path, kept / "own-v0")):
            shutil.rmtree(each)
            shutil.copytree(source, to if each == run else path)

    assert launch.main([f"resume={run}", short, "runner.log_interval_steps=512"]) == 0
    assert is_that_of(run, path)
    back(to=tmp_path / ".run_0.1")  # an attempt of retries= or a study, which then starts anew
    assert launch.main([*words, short, f"log_dir={tmp_path}"]) == 0
    assert is_that_of(run, path)
    shutil.rmtree(tmp_path / ".run_0.1")
    back(to=run)
    there = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "job"}
    for name, value in there.items():
        monkeypatch.setenv(name, str(value))
    assert launch.main([*words, short, f"log_dir={tmp_path}"]) == 0  # by torchrun, which starts the same command again
    assert is_that_of(run, path)


def test_a_run_from_the_state_of_another_leaves_its_dataset_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x-v0"
    assert launch.main([*RUN, "runner.n_steps=512", f"log_dir={tmp_path}/runs", f"record={path}"]) == 0
    before = returns(path)
    for own in ({}, {"log_dir": str(tmp_path / "own")}):
        with rlframe.restore(tmp_path / "runs/run_0", n_steps=1024, **own) as run:
            run.train()
            run.save(tmp_path / "saved" / str(len(own)))
        assert "nothing is recorded here" in caplog.text
        caplog.clear()
    assert returns(path) == before
    assert launch.main([f"resume={tmp_path}/runs/run_0", "runner.n_steps=1024"]) == 0
    assert len(returns(path)) > len(before)


def test_a_run_whose_copy_recorded_on_leaves_the_episodes_of_the_copy_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, run, copy = tmp_path / "x-v0", tmp_path / "runs/run_0", tmp_path / "runs/copy"
    assert launch.main([*RUN, "runner.n_steps=512", f"log_dir={tmp_path}/runs", f"record={path}"]) == 0
    shutil.copytree(run, copy, symlinks=True)
    assert launch.main([f"resume={copy}", "runner.n_steps=1536"]) == 0
    before = returns(path)
    assert "nothing is recorded here" not in caplog.text
    assert launch.main([f"resume={run}", "runner.n_steps=1024"]) == 0
    assert "goes on with a copy of this run, which was resumed since; nothing is recorded here" in caplog.text
    assert returns(path) == before
    assert launch.main([f"resume={copy}", "runner.n_steps=2048"]) == 0
    assert len(returns(path)) > len(before)


def test_a_study_that_is_resumed_finds_datasets_of_its_runs(tmp_path: Path) -> None:
    (tmp_path / "1-v0").mkdir()
    words = dict(word.split("=", 1) for word in RUN) | {"runner.n_steps": "512", "record": f"{tmp_path}/{{seed}}-v0"}
    check_words({**words, "seed": "1"})  # the run itself refuses one that is not its own
    with pytest.raises(ConfigError, match="record: 'x' is no dataset"):
        check_words({**words, "record": "x"})


@pytest.mark.parametrize(
    "words",
    [
        ("algo=dqn", "runner=async_rl", "runner.n_samplers=2", "algo.learning_starts=100"),
        pytest.param(("sampler=gpu", "sampler.n_workers=2", "sampler.n_groups=2"), marks=pytest.mark.slow),
        pytest.param(("world_size=2",), marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("forked_ranks")
def test_every_step_is_recorded_of_whatever_samples(tmp_path: Path, words: tuple[str, ...]) -> None:
    own = dict(word.split("=", 1) for word in (*RUN, *words)) | {"env": "tests.data.telling:TellingEnv"}
    given = [f"{key}={value}" for key, value in own.items()]
    assert launch.main([*given, "runner.n_steps=2048", f"log_dir={tmp_path}", f"record={tmp_path}/x-v0"]) == 0
    found = [episode for path in sorted(tmp_path.glob("x*-v0")) for episode in open_dataset(path).episodes()]
    n_envs, n_steps = check_told(found)
    assert n_envs == (8 if "world_size=2" in words else 4)
    assert 2048 - 23 * n_envs < n_steps <= 2048 + 64 * n_envs, "all but the episodes that the end interrupts"


def test_an_evaluation_records_all_lives_of_the_games_that_it_counts(tmp_path: Path) -> None:
    given = episodes([3, 4, 5, 2], *CARTPOLE)
    recorder = EvaluationRecorder(NewDataset(f"{tmp_path}/x-v0", *CARTPOLE), sampled=False)
    for batch in as_batches(given, CARTPOLE[1], 5, whole=True):
        recorder.on_batch(batch.torch())
    recorder.on_episode(Trajectory(1.0, 3 + 4, terminated=True, env=0))
    recorder.on_episode(Trajectory(1.0, 5, terminated=True, env=0))
    recorder.close()
    for one, other in zip(given[:3], open_dataset(tmp_path / "x-v0").episodes(), strict=True):
        assert np.array_equal(one.observation, other.observation)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_leaves_whole_episodes_and_records_on(tmp_path: Path) -> None:
    whole = [*RUN, "runner.n_steps=200_000", f"log_dir={tmp_path}/whole", f"record={tmp_path}/whole-v0"]
    assert launch.main(whole) == 0
    command = [sys.executable, "-m", "rlframe.launch"]
    words = [*RUN, "runner.n_steps=200_000", f"log_dir={tmp_path}/parts", f"record={tmp_path}/parts-v0"]
    rng, kills, path = np.random.default_rng(0), 0, tmp_path / "parts-v0"
    while True:
        resume = (tmp_path / "parts/run_0/params.json").exists()
        process = subprocess.Popen([*command, *([f"resume={tmp_path}/parts/run_0"] if resume else words)])
        try:
            if process.wait(rng.uniform(4, 9) if kills < 6 else None) == 0:
                break
            pytest.fail("the run failed")
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            time.sleep(0.2)
        if (path / "data/metadata.json").exists():
            found = list(open_dataset(path).episodes())  # every one of them is whole
            assert len(found) == open_dataset(path).n_episodes
    assert kills >= 2
    expected, recorded = open_dataset(tmp_path / "whole-v0"), open_dataset(path)
    assert (expected.n_episodes, expected.n_steps) == (recorded.n_episodes, recorded.n_steps)
    for one, other in zip(expected.episodes(), recorded.episodes(), strict=True):
        assert all(map(np.array_equal, arrays(one), arrays(other)))


PENDULUM = "env=Pendulum-v1 env.max_episode_steps=20"


@pytest.mark.parametrize(
    "words",
    [
        "algo=a2c env=CartPole-v1 algo.explore=none",
        f"algo=a2c {PENDULUM} algo.explore=gsde",
        f"algo=sac {PENDULUM} algo.explore=gsde algo.random_steps=100 algo.learning_starts=250",
        f"algo=sac {PENDULUM} algo.explore=sample_hold algo.random_steps=100 algo.learning_starts=250",
    ],
)
def test_probabilities_of_actions_that_were_not_drawn_by_them_are_not_recorded(tmp_path: Path, words: str) -> None:
    others = [word for word in RUN if not word.startswith(("algo=", "env="))]
    given = [*others, *words.split(), "runner.n_steps=256", f"log_dir={tmp_path}", f"record={tmp_path}/own-v0"]
    assert launch.main(given) == 0
    found = np.concatenate([each.info["log_prob"] for each in open_dataset(tmp_path / "own-v0").episodes()])
    assert np.isnan(found).all()
    with pytest.raises(ConfigError, match="are not known"):
        rlframe.load_policy(tmp_path / "run_0").target()


def test_how_probable_actions_of_dqn_were_is_recorded_as_its_epsilon_falls(tmp_path: Path) -> None:
    dqn = ("algo=dqn", "env=CartPole-v1", "sampler.batch_T=8", "sampler.batch_B=2", "eval.n_episodes=0", "threads=1")
    small = ("model.hidden=[8]", "log_level=WARNING", "affinity=none", "algo.learning_starts=64", "algo.replay_ratio=1")
    words = [*dqn, *small, "runner.n_steps=640", "explore.epsilon=linear(1,0.2)", "algo.target_interval=10"]
    recorded = {}
    for name, more in (
        ("serial", ("sampler=serial",)),
        ("cpu", ("sampler=cpu", "sampler.n_workers=2")),
        ("ahead", ("sampler=serial", "runner=async_rl", "runner.sampler_waits=true")),
    ):
        assert launch.main([*words, *more, f"log_dir={tmp_path / name}", f"record={tmp_path}/{name}-v0"]) == 0
        recorded[name] = [*open_dataset(tmp_path / f"{name}-v0").episodes()]
    assert all(not episode.info for episode in recorded["ahead"]), "not known of parameters that were sent before"
    for one, other in zip(recorded["serial"], recorded["cpu"], strict=True):
        assert np.array_equal(one.info["log_prob"], other.info["log_prob"])
    p = [np.exp(episode.info["log_prob"]) for episode in recorded["serial"]]
    assert p[0][:8] == pytest.approx(0.5), "all are random at first"
    late = p[-1]  # about epsilon 0.2: 0.1 if not the best action, else 0.9
    assert all(abs(x - 0.5) > 0.2 for x in late)
    assert (late > 0.7).mean() > 0.5

    explored = [str(tmp_path / "serial/run_0"), "n_episodes=4", "explore=true", "epsilon=0.4"]
    assert evaluate.main([*explored, f"dataset={tmp_path}/explored-v0"]) == 0
    p = np.exp(np.concatenate([each.info["log_prob"] for each in open_dataset(tmp_path / "explored-v0").episodes()]))
    assert {round(float(x), 4) for x in p} == {0.2, 0.8}


def test_a_run_that_is_saved_before_its_first_row_records_once_it_goes_on(tmp_path: Path) -> None:
    keys = {"n_steps": 128, "sampler": {"name": "serial", "batch_T": 16, "batch_B": 4}, "eval": {"n_episodes": 0}}
    with rlframe.build("ppo", "CartPole-v1", record=f"{tmp_path}/data-v0", log_dir=str(tmp_path), **keys) as run:
        run.save(tmp_path / "saved")
    with rlframe.restore(tmp_path / "saved", log_dir=str(tmp_path / "restored"), trust=True) as run:
        run.train()
    assert open_dataset(tmp_path / "data-v0").n_episodes > 0


@pytest.mark.parametrize(
    ("name", "of_rank_1"),
    [
        ("pong-v0", "pong-rank1-v0"),
        ("./data/pong", "./data/pong-rank1"),
        ("./data/pong/", "./data/pong-rank1"),
        ("./my-videos/pong", "./my-videos/pong-rank1"),
    ],
)
def test_each_rank_has_a_dataset_of_its_own(name: str, of_rank_1: str) -> None:
    assert named_for(name, 0, 0, rank=0) == name
    assert named_for(name, 0, 0, rank=1) == of_rank_1
