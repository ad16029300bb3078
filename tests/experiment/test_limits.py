"""Settings that no machine can have are refused by their numbers before anything is allocated; large ones are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces

from rlframe.core.errors import ConfigError
from rlframe.experiment import limits
from rlframe.experiment.presets import load_preset, preset_names
from rlframe.experiment.settings import from_flat
from rlframe.launch import main

CPU = torch.device("cpu")
VECTOR = spaces.Box(-1, 1, (4,))
OF_MANY_ATOMS = ("mujoco/xqc_", "mujoco/flashsac_", "mujoco/simbav2_", "atari/qrdqn_")
IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
CHOICE, BOX = spaces.Discrete(2), spaces.Box(-1, 1, (3,))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 16 GB and two CPUs."""
    monkeypatch.setattr(limits, "available_memory", lambda: 16 * 10**9)
    monkeypatch.setattr(limits, "n_cpus", lambda: 2)


def check(settings: dict[str, Any], observation: Space = VECTOR, action: Space = CHOICE) -> None:
    experiment = from_flat(settings)
    limits.check_machine(experiment, experiment.n_ranks)
    limits.check_networks(experiment, observation, action, CPU)


SAC, RND = {"algo": "sac"}, {"reward.bonus": "rnd"}
TRANSFORMER = {"model.memory": "transformer", "model.memory_window": 65536}


@pytest.mark.parametrize(
    ("settings", "action", "message"),
    [
        (
            {"model.hidden": [10**9]},
            CHOICE,
            "model.hidden=[1000000000]: 13,000,000,003 weights for observations of 4 nu",
        ),
        ({"model.hidden": [10**18]}, CHOICE, "model.hidden=[1000000000000000000] must be at most"),
        ({"model.hidden": [20_000] * 4}, CHOICE, "model.hidden=[20000, 20000, 20000, 20000]: 2,400,380,003 weights"),
        ({"model.memory": "gru", "model.memory_size": 10**5}, CHOICE, "model.memory_size=100000: 60,0"),
        ({"algo": "dqn", "algo.value": "categorical", "algo.n_atoms": 10**9}, CHOICE, "algo.n_atoms=1000000000: 130,"),
        ({"algo": "dqn", "algo.value": "quantile", "algo.n_atoms": 10**5}, CHOICE, "n_atoms=100000, the pairs of quan"),
        ({**SAC, "algo.n_critics": 10**4, "model.hidden": [512, 512]}, BOX, "algo.n_critics=10000: 2,6"),
        ({**SAC, "algo.n_critics": 10**5}, BOX, "algo.n_critics=100000 must be from 1 to 10000"),
        ({**RND, "reward.bonus.embedding": 10**9}, CHOICE, "reward.bonus.embedding=1000000000: 2,000,000,132,0"),
        ({**RND, "reward.bonus.epochs": 10**9}, CHOICE, "reward.bonus.epochs=1000000000 must be from 1 to 10000"),
        ({**RND, "reward.bonus.batch_size": 10**12}, CHOICE, "reward.bonus.batch_size=1000000000000 would take at"),
        ({**TRANSFORMER, "model.memory_layers": 1000}, CHOICE, "sampler.batch_B=8, the rows that it remembers, would"),
        ({"algo.epochs": 10**9}, CHOICE, "algo.epochs=1000000000 must be from 1 to 10000"),
        ({"algo.optimizer": "muon", "algo.optimizer.n_iterations": 10**9}, CHOICE, "n_iterations=1000000000 must be"),
        (
            {"algo": "dqn", "algo.batch_size": 10**12},
            CHOICE,
            "algo.batch_size=1000000000000 would take at least 16,000",
        ),
        (
            {"algo": "r2d1", "algo.learn_T": 10**9},
            CHOICE,
            "algo.batch_size=64 sequences of algo.burn_in + algo.learn_T",
        ),
        (
            {"sampler.batch_B": 60_000, "sampler.batch_T": 16_000_000},
            CHOICE,
            "a batch of 960,000,000,000 rows would ta",
        ),
        (
            {"sampler.batch_B": 10**9, "sampler.batch_T": 1},
            CHOICE,
            "sampler.batch_B=1000000000 environments would take",
        ),
        ({"runner": "async_rl", "runner.n_slots": 4096, "sampler.batch_T": 10**6}, CHOICE, "sampler.batch_T=1000000"),
        (
            {"sampler.decorrelation_steps": 10**15},
            CHOICE,
            "sampler.decorrelation_steps=1000000000000000 must be from 0",
        ),
        (
            {"eval.n_envs": 10**9, "eval.n_episodes": 10**9},
            CHOICE,
            "eval.n_episodes=1000000000 must be from 0 to 1e+07",
        ),
        ({"threads": 1000}, CHOICE, "threads=1000 are more than 32, 16 for each of 2 CPUs; use threads=2 or less"),
        (
            {"world_size": 10**5, "eval.n_episodes": 10**6, "eval.n_envs": 10**5},
            CHOICE,
            "100,000 processes are too many for this machine",
        ),
        (
            {"learners": 10**5, "eval.n_episodes": 10**6, "eval.n_envs": 10**5},
            CHOICE,
            "100,000 processes are too many for this machine",
        ),
        (
            {"sampler": "cpu", "sampler.n_workers": 10**6, "sampler.batch_B": 10**6},
            CHOICE,
            "1,000,001 processes are too many for this machine",
        ),
    ],
)
def test_what_no_machine_can_have_is_refused_by_its_numbers(
    settings: dict[str, Any], action: Space, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check(settings, action=action)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "observation", "action"),
    [
        ({"model.hidden": [8192, 8192, 8192]}, VECTOR, CHOICE),
        ({"model.hidden": [64] * 200, "algo.epochs": 1000, "threads": 32}, VECTOR, CHOICE),
        ({"algo": "dqn", "algo.value": "quantile", "algo.n_atoms": 1000, "algo.batch_size": 1024}, VECTOR, CHOICE),
        ({"model.memory": "lstm", "model.memory_size": 8192}, VECTOR, CHOICE),
        ({**SAC, "algo.n_critics": 1000}, VECTOR, BOX),
        ({"model.channels": [64, 128, 128]}, IMAGE, CHOICE),
        ({"sampler.batch_B": 65_536, "sampler.batch_T": 1024}, VECTOR, CHOICE),
        ({}, spaces.Box(-1, 1, (100_000,)), spaces.Discrete(100_000)),
        ({"algo": "es", "runner": "evolution", "algo.directions": 10_000, "sampler.batch_T": 10**9}, VECTOR, CHOICE),
    ],
)
def test_large_settings_of_research_are_allowed(settings: dict[str, Any], observation: Space, action: Space) -> None:
    check(settings, observation, action)


def test_every_preset_is_far_from_the_limits_and_starts_without_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = {name: from_flat(load_preset(name)) for name in preset_names()}
    counted = {name: each for name, each in experiments.items() if name.startswith(OF_MANY_ATOMS)}  # in milliseconds
    monkeypatch.setattr(limits, "available_memory", lambda: 10**9)
    for experiment in counted.values():
        vectors = spaces.Box(-1, 1, (400,)), spaces.Box(-1, 1, (18,))
        limits.check_networks(experiment, *((IMAGE, CHOICE) if "ALE/" in experiment.env else vectors), CPU)
    monkeypatch.setattr(limits, "available_memory", lambda: 10**8)
    for name, experiment in experiments.items():
        limits.check_machine(experiment, experiment.n_ranks)
        observation = IMAGE if "ALE/" in experiment.env else spaces.Box(-1, 1, (400,))
        assert name in counted or limits._is_small(experiment, observation, spaces.Discrete(18)), name


@pytest.mark.parametrize(
    ("settings", "observation", "action"),
    [
        ({}, VECTOR, CHOICE),
        ({"model.memory": "lstm", "model.normalize_observation": True}, VECTOR, BOX),
        pytest.param({}, IMAGE, CHOICE, marks=pytest.mark.slow),
        ({"algo": "dqn", "algo.dueling": True, "algo.value": "categorical"}, VECTOR, CHOICE),
        ({"algo": "dqn", "algo.explore": "noisy"}, VECTOR, CHOICE),
        ({"algo": "sac", "model.norm": "layer"}, VECTOR, BOX),
        ({"algo": "es", "runner": "evolution"}, VECTOR, CHOICE),
    ],
)
def test_weights_are_counted_without_memory_and_without_a_random_number(
    settings: dict[str, Any], observation: Space, action: Space
) -> None:
    experiment, before = from_flat(settings), torch.get_rng_state()
    counted = limits._count(lambda: [experiment.algo.make_agent(observation, action, experiment.model, 0)])
    assert torch.equal(torch.get_rng_state(), before)
    agent = experiment.algo.make_agent(observation, action, experiment.model, experiment.seed)
    assert counted == sum(x.numel() for x in (*agent.parameters(), *agent.buffers()))


@pytest.mark.parametrize(
    ("optimizer", "n"),
    [("adam", 2), ("adamw", 2), ("radam", 2), ("rmsprop", 1), ("sgd", 0), ("muon", 1), ("torch.optim:NAdam", 2)],
)
def test_the_moments_of_an_optimizer_are_counted(optimizer: str, n: int) -> None:
    assert limits._moments(from_flat({"algo.optimizer": optimizer}).algo) == n


def test_a_batch_of_large_observations_is_refused_before_it_is_allocated() -> None:
    experiment = from_flat({"sampler.batch_B": 64, "sampler.batch_T": 100_000})
    agent = experiment.algo.make_agent(IMAGE, CHOICE, experiment.model, 0)
    limits.check_machine(experiment, 1)
    with pytest.raises(
        ConfigError, match=r"sampler.batch_T=100000 sampler.batch_B=64, 1 x 6,400,000 rows of 28,2\d\d by"
    ):
        limits.check_batch(experiment, agent, IMAGE, CHOICE)


@pytest.mark.parametrize(
    ("algo", "n", "most"),
    [
        (["dqn"], "31,250,000,000,000,000", 32_000),
        (["r2d1", "algo.learn_T=80"], "390,625,000,000,000", 2_560_000),
    ],
    ids=["rows", "sequences"],
)
def test_updates_without_end_are_refused(
    algo: list[str], n: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["env=CartPole-v1", f"algo={algo[0]}", *algo[1:], "algo.batch_size=32", "sampler=serial"]
    words += ["eval.n_episodes=0", "runner=minibatch_rl", "snapshot_mode=none"]
    assert main([*words, "algo.replay_ratio=1e18"]) == 2
    assert (
        f"error: algo.replay_ratio=1e+18 with algo.batch_size=32 makes {n} updates for each env_step, more than 1,000; "
        f"use algo.replay_ratio={most} or less"
    ) in capsys.readouterr().err


def test_a_network_that_does_not_fit_ends_launch_before_a_run_exists(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env=CartPole-v1", "model.hidden=[1000000000]", "sampler=serial", f"log_dir={tmp_path}"]) == 2
    assert "would take at least 52.0 GB of memory, but 16.0 GB are available; use less" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
