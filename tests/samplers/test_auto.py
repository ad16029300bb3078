"""sampler=auto: predictions from known costs, and the timing of a real environment and policy."""

from __future__ import annotations

import time
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlframe.envs import EnvConfig, EnvError, debug_envs, make_envs
from rlframe.envs.make import can_split, steps_on_threads
from rlframe.rollout.stepper import make_timing_handler
from rlframe.samplers import auto, cpu, gpu, serial
from tests.samplers.made import agent_for

US = 1e-6


def machine(n_workers: int = 8, n_cores: int = 8, env_threads: bool = False) -> auto.Machine:
    return auto.Machine(n_workers, n_cores, env_threads)


def costs(env: float, policy: float, worker_policy: float = 0.0) -> auto.Costs:
    """Costs in which the policy takes the same time for any number of rows."""
    rows = (1, 2, 4, 8, 16, 32)
    return auto.Costs(env, dict.fromkeys(rows, policy), dict.fromkeys(rows, worker_policy or policy))


CONFIG = auto.Config(batch_B=32)


def test_predictions_are_worked_out_by_hand() -> None:
    known = auto.Costs(100 * US, {4: 50 * US, 16: 60 * US, 32: 70 * US}, {4: 80 * US})
    found = auto.candidates(CONFIG, 8)
    seconds = {name: round(auto.predict(each, known, machine()) / US) for name, each in found.items()}
    assert seconds == {
        "serial": 32 * 100 + 70,
        "cpu, 8 workers": 4 * 100 + 80,
        "gpu, 8 workers": 4 * 100 + 70 + 8 * 15,
        "gpu, 8 workers in 2 groups": max(2 * 60, 60 + 400, (3200 + 120) // 8) + 8 * 15,
    }


def test_threads_of_environments_divide_the_serial_time() -> None:
    config = serial.Config(batch_B=32)
    assert auto.predict(config, costs(100 * US, 70 * US), machine(env_threads=True)) == pytest.approx(470 * US)


def test_torchs_threads_gain_nothing_in_acting_beside_workers_and_threads_of_environments() -> None:
    known = auto.Costs(100 * US, {4: 20 * US, 16: 40 * US, 32: 50 * US}, {4: 30 * US, 16: 60 * US, 32: 80 * US})
    contended = auto.Machine(8, 8, env_threads=True, torch_threads=2)
    found = auto.candidates(CONFIG, 8)
    seconds = {name: round(auto.predict(each, known, contended) / US) for name, each in found.items()}
    assert seconds == {
        "serial": 4 * 100 + 80,
        "cpu, 8 workers": 4 * 100 + 30,
        "gpu, 8 workers": 4 * 100 + 80 + 8 * 15,
        "gpu, 8 workers in 2 groups": max(2 * 120, 120 + 400, (3200 + 240) // 8) + 8 * 15,
    }
    assert auto.predict(found["serial"], known, auto.Machine(8, 8, False, torch_threads=2)) == 3250 * US


@pytest.mark.parametrize("env_threads", [False, True])
def test_serial_is_preferred_only_where_it_has_one_thread(env_threads: bool) -> None:
    known = costs(2 * US, 300 * US) if not env_threads else costs(50 * US, 100 * US, 90 * US)
    choice = auto.choose(CONFIG, known, machine(env_threads=env_threads))
    assert isinstance(choice.config, cpu.Config if env_threads else serial.Config)


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        (costs(1000 * US, 100 * US), cpu.Config),  # a simulator
        (costs(300 * US, 400 * US, 40_000 * US), gpu.Config),  # a large network, fast on the device alone
    ],
)
def test_the_fastest_candidate_is_chosen(known: auto.Costs, chosen: type) -> None:
    choice = auto.choose(CONFIG, known, machine())
    assert type(choice.config) is chosen
    assert choice.config.batch_B == 32
    assert "an environment's step takes" in choice.reason
    assert choice.reason.count("with") == 3, "the others are named with their times"


def test_two_groups_are_chosen_where_acting_and_stepping_take_equal_time() -> None:
    known = auto.Costs(1000 * US, {32: 4000 * US, 16: 2000 * US, 4: 500 * US}, {4: 50_000 * US})
    choice = auto.choose(CONFIG, known, machine())
    assert isinstance(choice.config, gpu.Config)
    assert choice.config.n_groups == 2


def test_serial_is_chosen_if_others_gain_little() -> None:
    known = costs(2 * US, 100 * US)  # 164 us a time step against 132
    assert isinstance(auto.choose(CONFIG, known, machine(2, 2)).config, serial.Config)


def test_more_workers_than_cores_are_no_faster_than_the_cores() -> None:
    config = cpu.Config(batch_B=32, n_workers=8)
    assert auto.predict(config, costs(100 * US, 50 * US), machine(8, 2)) == pytest.approx(4 * (400 + 50) * US)


def test_choices_keep_sizes_and_supervision() -> None:
    config = auto.Config(
        batch_T=7, batch_B=6, decorrelation_steps=3, timeout_s=5.0, max_restarts=2, start_method="spawn"
    )
    for each in auto.candidates(config, 3).values():
        assert (each.batch_T, each.batch_B, each.decorrelation_steps) == (7, 6, 3)
        if isinstance(each, cpu.Config | gpu.Config):
            assert (each.n_workers, each.timeout_s, each.max_restarts, each.start_method) == (3, 5.0, 2, "spawn")


def test_with_one_environment_or_worker_impossible_candidates_are_left_out() -> None:
    assert list(auto.candidates(auto.Config(batch_B=1), 1)) == ["serial"]
    assert list(auto.candidates(auto.Config(batch_B=4), 1)) == ["serial", "cpu, 1 workers", "gpu, 1 workers"]


@pytest.mark.parametrize(
    ("env", "n", "splits", "threads"),
    [("CartPole-v1", 16, False, False), ("CartPole-v1", 4, True, False), ("ALE/Pong-v5", 8, True, True)],
)
def test_which_batches_can_be_split(env: str, n: int, splits: bool, threads: bool) -> None:
    if env.startswith("ALE"):
        pytest.importorskip("ale_py")
    assert can_split(EnvConfig(env), n) == splits
    assert steps_on_threads(EnvConfig(env), n) == threads


class Slow(gymnasium.Env):
    """4 ms a step."""

    observation_space, action_space = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: int) -> Any:
        time.sleep(0.004)
        return np.zeros(3, np.float32), 0.0, False, False, {}


def measured(env: Any, **kwargs: Any) -> auto.Costs:
    with closing(auto.TimingProcess(EnvConfig(env, kwargs), 4, 2, 20.0)) as one:
        agent = agent_for(one.observation_space, one.action_space)
        return auto.measure(one, agent, (4, 8), 1)


@pytest.mark.slow
def test_the_time_of_an_environments_step_is_measured() -> None:
    found = measured(Slow)
    assert 0.004 <= found.env_s < 1.0  # seconds, on a machine with other work too
    assert set(found.policy_s) == {4, 8}
    assert found.policy_s[8] > 0


def test_the_timed_actions_are_allowed_ones_also_after_the_first_measurement() -> None:
    envs = make_envs(EnvConfig(debug_envs.masked, backend="python"), 8, range(8))
    context: Any = SimpleNamespace(envs=envs, parent=SimpleNamespace(control=np.zeros(9, np.int64)))
    handle = make_timing_handler(context)
    assert all(handle(1, 0) > 0 for _ in range(40)), "a forbidden action raises"


def test_an_environment_that_fails_is_an_error_before_the_run_starts() -> None:
    with pytest.raises(EnvError, match="environment 0"):
        measured(debug_envs.faulty, fault="raise", at=5)
