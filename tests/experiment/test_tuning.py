"""threads=auto and learners=auto: the fastest way to learn is measured, and remembered for the machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chz
import pytest
import torch

from rlframe import launch
from rlframe.algos import dqn, ppo
from rlframe.core.config import AUTO
from rlframe.core.types import BatchSpec
from rlframe.experiment import tuning
from rlframe.experiment.config import Experiment
from rlframe.experiment.hardware import affinity_of
from rlframe.experiment.settings import from_flat
from rlframe.experiment.trust import read_config
from rlframe.experiment.tuning import Way, _learning_at_once, fastest, ways_to_learn
from rlframe.replay import InMemory

PPO = ppo.Config(epochs=1, minibatches=1)
DQN = dqn.Config(replay=InMemory(size=10**6), learning_starts=10**5, replay_ratio=64.0)
SMALL = {"env": "CartPole-v1", "sampler": "serial", "sampler.batch_T": "8", "sampler.batch_B": "2"}


class Quiet:
    """FreeCpus of a machine on which others use a number of CPUs."""

    n, busy = 2, 0.0

    def look(self) -> float:
        return self.n - self.busy


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure one batch each, and remember nothing of other tests."""
    monkeypatch.setattr(tuning, "_MIN_S", 0.0)
    monkeypatch.setattr(tuning, "FreeCpus", Quiet)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def chosen(experiment: Experiment, threads: int = 2) -> tuple[Way, str]:
    return fastest(experiment, affinity_of(experiment, 0, 1), ways_to_learn(experiment, threads))


def test_a_measurement_has_the_updates_of_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpe2")
    measured, seconds_of = set(), tuning._seconds_of_updates
    monkeypatch.setattr(
        tuning, "_seconds_of_updates", lambda algo: measured.add(type(algo).__name__) or seconds_of(algo)
    )
    tag = {"agents.map.adversary_*": "pred", "agents.map.agent_*": "prey", "agents.policies.prey.algo": "dqn"}
    way, _ = chosen(from_flat({**SMALL, **tag, "env": "mpe2/simple_tag_v3", "algo": "a2c", "threads": "auto"}))
    assert way in (Way(1, 1), Way(1, 2))
    assert measured == {"A2C", "DQN"}


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_the_fastest_number_of_threads_is_chosen_with_its_reason(algo: str) -> None:
    before = torch.get_num_threads()
    way, reason = chosen(from_flat({**SMALL, "algo": algo, "threads": "auto"}), threads=3)
    assert way in (Way(1, 1), Way(1, 2))
    assert reason.startswith(f"learning: {way}; ")
    measured = {int(n): float(ms) for ms, n in re.findall(r"([\d.e+-]+) ms with (\d) thread", reason)}
    assert measured.keys() == {1, 2}
    assert measured[way.threads] == min(measured.values())
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        ({"threads": "auto"}, ["1 thread", "2 threads", "4 threads"]),
        ({"learners": "auto"}, ["1 thread", "2 threads", "4 threads", "2 learners"]),  # of two environments
        ({"learners": "auto", "threads": "3"}, ["3 threads", "2 learners"]),
        (
            {"learners": "auto", "algo": "dqn", "algo.batch_size": "36"},
            ["1 thread", "2 threads", "4 threads", "2 learners", "4 learners"],
        ),
        ({"learners": "auto", "sampler.batch_B": "3"}, ["1 thread", "2 threads", "4 threads"]),
    ],
    ids=str,
)
def test_ways_are_those_that_the_keys_leave_open_and_that_divide_a_batch(
    words: Mapping[str, str], ways: list[str]
) -> None:
    assert [*map(str, ways_to_learn(from_flat({**SMALL, **words}), 5))] == ways


def test_a_single_way_is_not_measured() -> None:
    experiment = from_flat({"env": "no such environment", "threads": "auto"})
    assert chosen(experiment, threads=1) == (Way(1, 1), "learning: 1 thread, there is no other way to choose")


def test_what_was_measured_is_remembered_for_this_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = from_flat({**SMALL, "threads": "auto", "seed": "1"})
    monkeypatch.setattr(tuning, "_measure", lambda experiment, affinity, ways: {str(w): w.threads * 1e-6 for w in ways})
    assert chosen(experiment)[0] == Way(1, 1)
    monkeypatch.setattr(tuning, "_measure", lambda experiment, affinity, ways: {str(w): 1e-6 / w.threads for w in ways})
    way, reason = chosen(chz.replace(experiment, seed=2))
    assert way == Way(1, 1)
    assert reason == (
        "learning: 1 thread; an env_step and what is learned from it takes 0.001 ms with 1 thread, "
        "0.002 ms with 2 threads, as measured before"
    )
    assert chosen(from_flat({**SMALL, "threads": "auto", "model.hidden": "32"}))[0] == Way(1, 2), "another network"


def test_nothing_is_remembered_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Quiet, "busy", 1.0)
    chosen(from_flat({**SMALL, "threads": "auto"}))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"KEY": 3}', "\xff", '{"KEY": {"1 thread": "fast", "2 threads": -1}}'])
def test_a_damaged_memory_is_measured_again(tmp_path: Path, content: str) -> None:
    experiment = from_flat({**SMALL, "threads": "auto"})
    file = tmp_path / "cache/rlframe/learning.json"
    file.parent.mkdir(parents=True)
    file.write_text(content.replace("KEY", tuning._key(experiment)), encoding="latin-1")
    assert "as measured before" not in chosen(experiment)[1]
    saved: dict[str, Any] = json.loads(file.read_text())
    assert {*saved[tuning._key(experiment)]} == {"1 thread", "2 threads"}


def test_a_memory_that_cannot_be_written_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert chosen(from_flat({**SMALL, "threads": "auto"}))[0].learners == 1


def test_a_trial_learns_at_once_from_a_small_replay() -> None:
    changed = _learning_at_once(chz.replace(DQN, prioritized=True, unique=True), BatchSpec(4, 2))
    assert (changed.learning_starts, changed.replay.size) == (0, 20_000)
    small = {"learning_starts": 0, "replay": chz.replace(DQN.replay, size=20_000), "prioritized": True}
    assert changed == chz.replace(DQN, **small), "drawn with repetition, which a small replay always can"
    assert _learning_at_once(PPO, BatchSpec(4, 2)) == PPO


def test_threads_are_chosen_at_each_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*(f"{key}={value}" for key, value in SMALL.items()), "threads=auto", "algo.minibatches=1"]
    assert launch.main([f"log_dir={tmp_path}", *words, "runner.n_steps=64", "eval.n_episodes=1"]) == 0
    assert "learning: " in capsys.readouterr().out
    assert read_config(tmp_path / "run_0/params.json", False)["threads"] == AUTO


@pytest.mark.parametrize(("fast", "n"), [("2 learners", 2), ("2 threads", 1)])
@pytest.mark.usefixtures("forked_ranks")
def test_learners_are_chosen_at_the_start_of_a_run_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fast: str, n: int
) -> None:
    measured = {"1 thread": 3e-6, "2 threads": 2e-6, "2 learners": 2e-6, fast: 1e-6}
    monkeypatch.setattr(tuning, "_measure", lambda *_: measured)
    monkeypatch.setattr(
        "rlframe.experiment.hardware.ways_to_learn", lambda experiment, threads: ways_to_learn(experiment, 2)
    )
    words = [*(f"{key}={value}" for key, value in SMALL.items()), "affinity=none", "learners=auto"]
    words += ["algo.minibatches=1", "runner.n_steps=64", "eval.n_episodes=2"]
    assert launch.main([f"log_dir={tmp_path}", *words]) == 0
    assert f"learning: {fast}; " in capsys.readouterr().out
    assert read_config(tmp_path / "run_0/params.json", False)["learners"] == n


@pytest.mark.usefixtures("forked_ranks")
def test_learners_are_measured_in_processes_of_their_own() -> None:
    words = {**SMALL, "algo": "dqn", "algo.batch_size": "8", "learners": "auto", "threads": "1"}
    assert chosen(from_flat(words))[1].count(" ms with ") == 2
