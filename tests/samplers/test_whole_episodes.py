"""sampler.complete_episodes, sampler.env_restarts, and the first random steps of each environment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs import EnvConfig, EnvError, EnvOptions, make_envs
from rlframe.experiment.settings import from_flat
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.samplers import CpuSampler, GpuSampler, Sampler, SerialSampler
from rlframe.samplers.base import SamplerConfig
from tests.envs.wrapping import Raises
from tests.runners.resumed import assert_resumed_exactly
from tests.samplers import faulty
from tests.samplers.faulty import Coded, Fault
from tests.samplers.made import agent_for, assert_equal, copied
from tests.tables import read_csv

HOW = ["serial", "cpu", "gpu"]
MAX = 6  # steps of an episode of Coded with length 4


def made(how: str, env: EnvConfig, T: int, B: int = 4, decorrelation_steps: int = 0) -> Sampler:
    seeds = env_seeds(1, Role.ENV, B)
    if how == "serial":
        envs: Any = make_envs(env, B, seeds)
    else:
        envs = WorkerPool(env, B, seeds, 2)
    agent = agent_for(envs.observation_space, envs.action_space)
    make: Callable[..., Sampler] = {"serial": SerialSampler, "cpu": CpuSampler, "gpu": GpuSampler}[how]
    return make(envs, agent, T, 1, decorrelation_steps)


WHOLE = EnvConfig(Coded, whole_episodes=True, options=EnvOptions(max_episode_steps=MAX))


@pytest.mark.parametrize("T", [MAX + 1, 2 * MAX + 1, 19])
def test_a_batch_holds_whole_episodes_and_each_column_starts_with_one(T: int) -> None:
    lengths: list[int] = []
    with closing(made("serial", WHOLE, T)) as sampler:
        for _ in range(6):
            samples = sampler.collect()
            assert samples.inputs.first[0].all()
            step = samples.inputs.observation[..., 2].round().long()
            for env in range(4):
                ends = (samples.terminated | samples.truncated)[:, env]
                steps = step[:-1, env][samples.valid[:, env]].tolist()
                played = [int(step[t + 1, env]) for t in ends.nonzero()[:, 0].tolist()]
                assert steps == [t for length in played for t in range(length)], "no episode is cut or begins earlier"
                idle = (~samples.valid & ~samples.inputs.first[1:])[:, env]
                before, after = samples.inputs.observation[:-1, env][idle], samples.inputs.observation[1:, env][idle]
                assert torch.equal(before, after)
                assert not samples.reward[idle, env].any()
                assert not ends[idle].any()
                lengths += played
        found = [trajectory.length for trajectory in sampler.trajectories()]
    assert sorted(found) == sorted(lengths), "and every one is reported"
    assert len(lengths) >= 6 * 4 * (T // (MAX + 1))


def test_every_sampler_has_the_same_whole_episodes() -> None:
    histories = []
    for how in HOW:
        with closing(made(how, WHOLE, 14)) as sampler:
            histories.append([(copied(sampler.collect()), sampler.trajectories()) for _ in range(4)])
    for other in histories[1:]:
        for (samples, found), (others, also_found) in zip(histories[0], other, strict=True):
            assert_equal(samples, others)
            assert found == also_found


@pytest.mark.parametrize("algo", ["ppo", pytest.param("a2c", marks=pytest.mark.slow), "pg"])
def test_policy_gradients_learn_from_whole_episodes_and_are_resumed(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = f"algo={algo} env=CartPole-v1 env.max_episode_steps=20 sampler=serial sampler.complete_episodes=true"
    case += " sampler.batch_T=30 sampler.batch_B=2 model.hidden=[8] runner.n_steps=160 runner.log_interval_steps=80"
    case += " eval.n_episodes=1" + " algo.minibatches=4 algo.epochs=2" * (algo == "ppo")
    run = assert_resumed_exactly(case, tmp_path, monkeypatch)
    assert float(read_csv(run / "progress.csv")[1][-1]["episode/length_mean"]) <= 20


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("algo=dqn", "algo=dqn learns from replay"),
        ("sampler.decorrelation_steps=5", "sampler.decorrelation_steps=5"),
        ("sampler.batch_T=20 env.max_episode_steps=20", "sampler.batch_T=20 must be at least 21"),
    ],
)
def test_whole_episodes_that_cannot_be_are_refused_before_anything_starts(given: str, said: str) -> None:
    keys = dict(word.split("=") for word in given.split())
    with pytest.raises(ConfigError, match=said):
        from_flat({"algo": "ppo", "sampler.complete_episodes": "true", **keys})


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (EnvConfig(Coded, whole_episodes=True), "has no time limit; set env.max_episode_steps"),
        (EnvConfig("Pendulum-v1", whole_episodes=True), "sampler.batch_T=9 must be at least 201"),
        (
            EnvConfig("CartPole-v1", backend="native", whole_episodes=True),
            "complete_episodes needs Python",
        ),
        (EnvConfig("CartPole-v1", backend="native", restarts=1), "env_restarts needs Python"),
    ],
)
def test_environments_that_cannot_make_whole_episodes_are_refused(env: EnvConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made("serial", env, 9)


def raising(at: int, **other: Any) -> EnvConfig:
    return EnvConfig(Coded, {"faults": (Fault(faulty.diverge, at=at, **other),)}, "python", restarts=2)


@pytest.mark.parametrize("how", HOW)
def test_an_environment_that_raises_is_made_again_and_its_episode_dropped(
    how: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fault = {"seed": env_seeds(1, Role.ENV, 4)[1], "path": str(tmp_path / "once")}
    with closing(made(how, raising(3, **fault), 8)) as sampler:
        samples, found = copied(sampler.collect()), sampler.trajectories()
    with closing(made("serial", EnvConfig(Coded, backend="python"), 8)) as sampler:
        plain, plainly = copied(sampler.collect()), sampler.trajectories()
    others = [0, 2, 3]
    assert torch.equal(samples.inputs.observation[:, others], plain.inputs.observation[:, others])
    assert [t for t in found if t.env != 1] == [t for t in plainly if t.env != 1]
    assert samples.valid[:, 1].tolist() == [True, True, False, True, True, True, True, False]  # it raised in row 2
    assert samples.inputs.first[:, 1].tolist() == [True, False, False, True, False, False, False, False, True]
    assert samples.truncated[:2, 1].tolist() == [False, True], "its last transition is the one before"
    seeds = samples.inputs.observation[:, 1, 0]
    assert len(set(seeds[:3].tolist())) == len(set(seeds[3:].tolist())) == 1
    assert seeds[0] != seeds[3], "a new environment has a new seed"
    assert [t.length for t in found if t.env == 1] == [4], "what was lost is not reported"


def test_the_run_fails_when_no_restart_is_left(caplog: pytest.LogCaptureFixture) -> None:
    with closing(made("serial", raising(3), 30, B=1)) as sampler, pytest.raises(EnvError, match="raised"):
        sampler.collect()
    assert [record.message.partition("(")[2] for record in caplog.records] == [
        f"restart {number} of sampler.env_restarts=2)" for number in (1, 2)
    ]
    with closing(made("serial", raising(2, when="reset"), 12, B=1)) as sampler:
        sampler.collect()  # each makes its first reset well
    with pytest.raises(EnvError, match="raised"):
        made("serial", raising(1, when="reset"), 30, B=1)


def test_restarts_count_over_resumed_runs() -> None:
    def once() -> Sampler:
        return made("serial", EnvConfig(Raises, restarts=2), 4, B=1)

    with closing(once()) as sampler:
        sampler.collect()
        state = sampler.state_dict()
        assert state["envs"][0]["restarts"] == 1
        expected = copied(sampler.collect())
    with closing(once()) as sampler:
        assert sampler.load_state_dict(state) == [""]
        assert_equal(copied(sampler.collect()), expected)
        with pytest.raises(EnvError):
            [sampler.collect() for _ in range(3)]


@pytest.mark.parametrize("how", HOW)
def test_each_environment_takes_its_own_number_of_random_steps(how: str) -> None:
    env = EnvConfig("Pendulum-v1", backend="python")
    with closing(made(how, env, 100, B=8, decorrelation_steps=200)) as sampler:
        batches = [copied(sampler.collect()) for _ in range(2)]
    ends = torch.cat([samples.truncated for samples in batches]).nonzero()
    assert len(ends) == 8
    assert len(set(ends[:, 0].tolist())) > 5, "the ends lie in rows of their own"
    first = batches[0].inputs.first
    assert first[0].all()


def test_the_numbers_of_random_steps_are_from_0_to_the_most() -> None:
    env = EnvConfig(Coded, {"length": 99}, "python")
    with closing(made("serial", env, 1, B=200, decorrelation_steps=3)) as sampler:
        counts = np.bincount(sampler.collect().inputs.observation[0, :, 2].long())
    assert len(counts) == 4
    assert counts.min() > 25


def test_the_keys_of_whole_episodes_and_restarts_reach_the_environments() -> None:
    config = SamplerConfig(complete_episodes=True, env_restarts=3).adapted(EnvConfig("CartPole-v1"))
    assert (config.whole_episodes, config.restarts) == (True, 3)
    env = from_flat({"sampler.env_restarts": 3, "sampler.complete_episodes": "true"}).env_config()
    assert (env.whole_episodes, env.restarts) == (True, 3)
