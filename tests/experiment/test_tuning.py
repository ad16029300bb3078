"""threads=auto: the number of torch threads is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import chz
import pytest
import torch

from rlframe import launch
from rlframe.algos import dqn, ppo
from rlframe.core.config import AUTO
from rlframe.experiment.config import from_flat
from rlframe.experiment.hardware import _learning_at_once, affinity_of, fastest_threads
from rlframe.experiment.trust import read_config
from rlframe.replay import ReplayConfig

PPO = ppo.Config(epochs=1, minibatches=1)
DQN = dqn.Config(replay=ReplayConfig(size=10**6), learn_from=10**5, replay_ratio=64.0)


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure one batch each."""
    monkeypatch.setattr("rlframe.experiment.hardware._MIN_S", 0.0)


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_number_of_threads_up_to_the_cores_is_chosen_with_its_reason(algo: str) -> None:
    words = {"env": "CartPole-v1", "algo": algo, "sampler": "serial", "sampler.batch_T": "8", "sampler.batch_B": "2"}
    experiment = from_flat(words)
    affinity = replace(affinity_of(experiment, 0, 1), threads=3)
    before = torch.get_num_threads()
    threads, reason = fastest_threads(experiment, affinity)
    assert threads in (1, 2)
    assert reason.startswith(f"threads: {threads}, ")
    assert "us with 1 thread," in reason
    assert "us with 2 threads" in reason
    assert torch.get_num_threads() == before


def test_a_single_core_is_not_measured() -> None:
    experiment = from_flat({"env": "no such environment"})
    affinity = replace(affinity_of(experiment, 0, 1), threads=1)
    assert fastest_threads(experiment, affinity) == (1, "threads: 1, there is one core to compute with")


def test_a_trial_learns_at_once_from_a_small_replay() -> None:
    changed = _learning_at_once(DQN)
    assert (changed.learn_from, changed.replay.size) == (0, 20_000)
    assert changed == chz.replace(DQN, learn_from=0, replay=chz.replace(DQN.replay, size=20_000))
    assert _learning_at_once(PPO) == PPO


def test_the_choice_is_printed_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["env=CartPole-v1", "threads=auto", "sampler.batch_T=16", "runner.n_steps=200", "eval.n_episodes=1"]
    assert launch.main([f"log_dir={tmp_path}", *words]) == 0
    assert "threads: " in capsys.readouterr().out
    assert 0 < read_config(tmp_path / "run_0/params.json", False)["threads"] != AUTO
