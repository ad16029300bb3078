"""Errors name the environment's index, seed, step and action; infos never crash a run."""

import copy
import logging
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from rlframe.core.errors import ConfigError, warn_once
from rlframe.envs import EnvConfig, EnvError, Envs, base, make_envs
from rlframe.envs.base import InfoMeans
from rlframe.envs.gymnasium_vector import NativeEnvs
from rlframe.envs.python import PythonEnvs
from rlframe.rollout.buffer import empty_rows
from rlframe.rollout.stepper import worker_steppers
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.system.shared import share_zeros
from tests.envs.custom import Converted
from tests.envs.rows import made, rows_for, walk
from tests.samplers.faulty import hang_in_c


def fault_of(fault: str, **kwargs: object) -> EnvError:
    envs = made("rlframe.envs.debug_envs:faulty", 2, seeds=[101, 102], fault=fault, at=3, **kwargs)
    envs.reset(rows_for(envs))
    with pytest.raises(EnvError) as caught:
        step_through(envs, ([0, 0], [0, 0], [1, 0], [0, 0]))
    return caught.value


def step_through(envs: Envs, actions: Iterable[list[int]]) -> None:
    rows = rows_for(envs)
    for action in actions:
        envs.step(np.array(action), rows)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("raise", "raised: RuntimeError: the simulator diverged"),
        ("nan", "not finite"),
        ("inf", "not finite"),
        ("shape", r"shape \(3,\)"),
        ("dtype", "dtype complex64"),
        ("info", "`info` is not a dict but a NoneType"),
        ("reward_nan", "reward is not finite"),
        ("reward_inf", "reward is not finite"),
        ("reward_type", "reward is not a real number but 'a lot'"),
    ],
)
def test_a_fault_names_index_seed_step_and_action(fault: str, what: str) -> None:
    error = fault_of(fault)
    assert re.search(what, str(error))
    assert re.search(r"environment 0 .*\(seed 101, episode 0, step 3, action 1\); ", str(error))


def test_an_error_in_a_reset_says_so() -> None:
    error = fault_of("reset")
    assert re.search(r"did not come back \(seed 101, episode 1, step 0, action the reset\)", str(error))


def test_an_exception_keeps_its_cause() -> None:
    assert isinstance(fault_of("raise").__cause__, RuntimeError)


def test_a_fault_survives_pickling() -> None:
    error = fault_of("nan")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_constructor_that_raises_is_named() -> None:
    with pytest.raises(EnvError, match=r"environment 0 could not be made: OSError: no display \(seed 10\)"):
        made("tests.envs.custom:broken", 2)


@pytest.mark.parametrize("script", ["numpy", "array_reward"])
def test_numpy_numbers_are_real_numbers(script: str) -> None:
    seen = walk(made("tests.envs.custom:scripted", 2, script=script), 4)
    np.testing.assert_array_equal(seen.reward[:, 0], [1, 2, 3, 4])
    assert seen.terminated[3].all()


@pytest.mark.parametrize(
    ("script", "what"),
    [("two_elements", "reward is not a real number"), ("flag_none", "`terminated` is not True or False but None")],
)
def test_rewards_and_flags_of_other_types_are_an_error(script: str, what: str) -> None:
    with pytest.raises(EnvError, match=what):
        walk(made("tests.envs.custom:scripted", 2, script=script), 1)


class OldStep(gymnasium.Env[Any, Any]):
    """Steps as OpenAI Gym's environments did."""

    observation_space, action_space = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), 1.0, False, {}


class OldReset(OldStep):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(3, np.float32)


class OwnError(OldStep):
    def step(self, action: Any) -> Any:
        _a, _b = [1, 2, 3]


@pytest.mark.parametrize("env", [OldStep, OldReset, OwnError])
def test_another_number_of_values_is_told_with_gymnasiums(env: Any) -> None:
    with pytest.raises(EnvError, match="to unpack") as error:
        walk(made(env, 1), 1)
    assert ("step must return observation, reward, terminated" in str(error.value)) == (env is not OwnError)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings so far; those of earlier tests are forgotten, and appear again."""
    warn_once.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


SMALL = spaces.Box(-9, 9, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "given", "seen", "what"),
    [
        (SMALL, np.array([1 / 3, 2.0]), np.float32([1 / 3, 2]), "has dtype float64 and is converted to float32"),
        (SMALL, np.array([3, 4]), np.float32([3, 4]), "has dtype int64 and is converted to float32"),
        (SMALL, [5.0, 6], np.float32([5, 6]), "is a list and is converted to float32"),
        (spaces.Box(0, 9, (), np.float32), 0.5, np.float32(0.5), "is a float and is converted to float32"),
        (spaces.Box(0, 255, (1, 2), np.uint8), np.array([[0.0, 255.0]]), np.uint8([[0, 255]]), "float64 .* to uint8"),
    ],
)
def test_observations_of_another_dtype_are_converted_with_one_warning(
    space: spaces.Box, given: Any, seen: Any, what: str, warned: Callable[[], list[str]]
) -> None:
    nested = spaces.Dict({"a": space, "b": spaces.Discrete(2)})
    for makes, name in ((lambda: given, "the observation"), (lambda: {"a": given, "b": 1}, r"the observation\['a'\]")):
        warn_once.cache_clear()
        envs = make_envs(EnvConfig(partial(Converted, nested if "'a'" in name else space, makes)), 2, [1, 2])
        rows = walk(envs, 6).steps[-1].observation
        found = rows["a"] if isinstance(rows, dict) else rows
        assert found.dtype == space.dtype
        np.testing.assert_array_equal(found, np.stack([seen, seen]))
        assert re.fullmatch(rf"env=tests.envs.custom:Converted: {name} .*{what}.*", warned()[-1])
    assert len(warned()) == 2


@pytest.mark.parametrize("given", [np.array([[0.5, 1.0]]), np.array([[300, 1]]), np.array([[np.nan, 1]]), [[-1, 0]]])
def test_what_integers_cannot_hold_is_an_error(given: Any) -> None:
    space = spaces.Box(0, 255, (1, 2), np.uint8)
    envs = make_envs(EnvConfig(partial(Converted, space, lambda: given)), 1, [1])
    with pytest.raises(EnvError, match="not of dtype uint8, which cannot hold it"):
        envs.reset(rows_for(envs))


@pytest.mark.parametrize("given", [[1.0, np.nan], np.array([np.inf, 1]), np.array([1e39, 1])])
def test_conversion_keeps_nan_and_inf_an_error(given: Any) -> None:
    envs = make_envs(EnvConfig(partial(Converted, SMALL, lambda: given)), 1, [1])
    with pytest.raises(EnvError, match="the observation is not finite"):
        envs.reset(rows_for(envs))


@pytest.mark.parametrize("given", [[1.0], [[1.0, 2.0]], [1.0, [2.0]], ["1", "2"], None, "two", {"a": 1}, (1.0, 2j)])
def test_other_shapes_and_types_are_an_error(given: Any) -> None:
    envs = make_envs(EnvConfig(partial(Converted, SMALL, lambda: given)), 1, [1])
    with pytest.raises(EnvError, match=r"not an array of shape \(2,\) and dtype float32"):
        envs.reset(rows_for(envs))


def test_rewards_and_flags_of_one_element_are_taken_with_one_warning_each(warned: Callable[[], list[str]]) -> None:
    seen = walk(made("tests.envs.custom:scripted", 2, script="one_element"), 9)
    np.testing.assert_array_equal(seen.reward[:4, 0], [1, 2, 3, 4])
    np.testing.assert_array_equal(seen.terminated[:, 0], [False] * 3 + [True] + [False] * 4 + [True])
    assert [text.partition(";")[0] for text in warned()] == [
        f"env=tests.envs.custom:Scripted: `{name}` is an array of shape {shape}, not a number"
        for name, shape in (("reward", "(1,)"), ("terminated", "(1, 1)"), ("truncated", "(1,)"))
    ]


def test_conversions_in_workers_and_evaluation_are_one_warning(warned: Callable[[], list[str]]) -> None:
    config = EnvConfig(partial(Converted, SMALL, lambda: np.zeros(2)), backend="python")
    pool = WorkerPool(config, 4, [1, 2, 3, 4], 2)
    with closing(pool):
        (stepper,) = worker_steppers(pool, share_zeros(empty_rows(SMALL, spaces.Discrete(2), 3, 4), "rows"), 1)
        stepper.reset()
        assert len(warned()) == 1, "of both workers"
        evaluated = make_envs(config, 1, [5])
        evaluated.reset(rows_for(evaluated))
    assert len(warned()) == 1


@pytest.mark.parametrize("info", [None, [], 0.5, "x"])
def test_an_info_that_is_not_a_dict_is_an_error_in_resets_too(info: Any) -> None:
    env = Converted(SMALL, lambda: np.zeros(2, np.float32))
    env.reset = lambda **_: (np.zeros(2, np.float32), info)  # type: ignore[method-assign]
    envs = PythonEnvs([lambda: env], [0], 0)
    with pytest.raises(
        EnvError, match=r"`info` is not a dict but .*; step must return .*, and reset observation, info"
    ):
        envs.reset(rows_for(envs))


def test_a_choice_out_of_range_is_an_error() -> None:
    with pytest.raises(EnvError, match=r"the observation is 4, outside Discrete\(4\)"):
        walk(made("tests.envs.custom:scripted", 1, observe="discrete", script="outside"), 1)


def test_infos_are_averaged_by_name_where_they_appear() -> None:
    envs = made("tests.envs.custom:scripted", 2, script="infos")
    walk(envs, 4)
    assert envs.pop_diagnostics(0) == {"always": 2.5, "even": 3.0, "true": 1.0}
    assert envs.pop_diagnostics(0) == {}
    assert envs.pop_diagnostics(1)["always"] == 2.5


def test_a_number_too_large_for_a_float_is_skipped_at_any_step() -> None:
    means = InfoMeans()
    for value in (1, 10**400, 3):
        means.add({"n": value})
    assert means.pop() == {"n": 2.0}


def test_an_array_without_dimensions_is_a_number_and_one_with_them_is_not() -> None:
    means = InfoMeans()
    for value in (np.array(1.0), np.array(4)):
        means.add({"n": value, "many": np.ones(1), "text": np.array("a")})
    assert means.pop() == {"n": 2.5}
    reused = np.zeros(())
    for t in range(1, 8):
        reused[...] = t
        means.add({"n": reused})
    assert means.pop() == {"n": 4.0}


def test_single_precision_numbers_are_summed_in_double() -> None:
    means = InfoMeans()
    for value in (2.0**24, 1.0, 1.0, 2.0):
        means.add({"x": np.float32(value)})
    assert means.pop() == {"x": 2.0**22 + 1.0}


def test_means_of_infos_start_over_at_a_reset() -> None:
    envs = made("tests.envs.custom:scripted", 1, script="infos")
    walk(envs, 7)  # four steps, the reset, two steps
    assert envs.pop_diagnostics(0)["always"] == 1.5


def test_rendering_without_a_render_mode_says_how_to_set_it() -> None:
    envs = made("CartPole-v1", 1, backend="python")
    with pytest.raises(EnvError, match="render_mode=rgb_array"):
        envs.frame(0)


def test_a_frame_is_a_picture() -> None:
    pytest.importorskip("pygame")
    envs = made("CartPole-v1", 1, render_mode="rgb_array")
    walk(envs, 1)
    frame = envs.frame(0)
    assert frame.dtype == np.uint8
    assert frame.shape[2] == 3
    envs.close()
    envs.close()


class Vector(VectorEnv):
    """Two environments with episodes of three steps; `fault` shows from step 2 on."""

    def __init__(self, fault: str = "", mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> None:
        self.metadata = {"autoreset_mode": mode}
        self.num_envs, self.fault = 2, fault
        self.single_observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.time = 0

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        self.time = 0
        return np.zeros((2, 2), np.float32), {}

    def step(self, actions):  # type: ignore[no-untyped-def]
        self.time = (self.time + 1) % 4
        observation, reward = np.zeros((2, 2), np.float32), np.full(2, self.time and 1.0)
        end = np.full(2, self.time == 3)
        infos = {"time": np.full(2, self.time), "odd": np.arange(2.0), "_odd": np.arange(2) == self.time % 2, "x": "y"}
        if self.time >= 2:
            if self.fault == "raise":
                raise RuntimeError("diverged")
            if self.fault == "nan":
                observation[1, 0] = np.nan
            if self.fault == "reward":
                reward[1] = np.inf
            if self.fault == "dtype":
                observation = observation.astype(np.complex64)
            if self.fault == "info":
                infos = None  # type: ignore[assignment]
        return observation, reward, end, np.zeros(2, np.bool_), infos


def native(fault: str = "") -> NativeEnvs:
    return NativeEnvs(Vector(fault), None, [7, 8], "native Vector")


def test_native_infos_are_averaged_over_the_episode() -> None:
    envs = native()
    walk(envs, 3)
    assert envs.pop_diagnostics(0) == {"time": 2.0, "odd": 0.0}
    assert envs.pop_diagnostics(1) == {"time": 2.0, "odd": 1.0}
    walk(envs, 6)
    assert envs.pop_diagnostics(0)["time"] == 1.5


@pytest.mark.parametrize(("fault", "what"), [("nan", "not finite"), ("reward", "reward is not finite")])
def test_a_fault_of_a_vector_environment_names_its_row(fault: str, what: str) -> None:
    with pytest.raises(EnvError, match=rf"environment 1 .*{what}.*\(seed 8, step 2, action [01]\)"):
        walk(native(fault), 3)


@pytest.mark.parametrize(
    ("fault", "what"), [("raise", "RuntimeError: diverged"), ("dtype", "complex64"), ("info", "not a dict")]
)
def test_a_fault_of_a_whole_vector_environment_names_all_seeds(fault: str, what: str) -> None:
    with pytest.raises(EnvError, match=rf"native Vector .*{what}.*seeds \[7, 8\]"):
        walk(native(fault), 3)


def test_another_autoreset_mode_is_an_error() -> None:
    with pytest.raises(ConfigError, match="NEXT_STEP"):
        NativeEnvs(Vector(mode=AutoresetMode.SAME_STEP), None, [7, 8], "native Vector")


def test_a_reward_on_the_step_that_resets_is_an_error() -> None:
    envs = native()
    walk(envs, 3)
    vector = envs._env
    assert isinstance(vector, Vector)
    vector.time = 0  # goes on without resetting
    with pytest.raises(EnvError, match="NEXT_STEP"):
        envs.step(np.zeros(2, np.int64), rows_for(envs))


def test_gymnasium_is_left_as_it_was() -> None:
    before = copy.deepcopy(gymnasium.registry["CartPole-v1"])
    made("CartPole-v1", 1, backend="python", max_episode_steps=7)
    assert gymnasium.registry["CartPole-v1"] == before


class NeverCloses(gymnasium.Env):
    """Its close blocks, in Python or in C, or calls sys.exit."""

    def __init__(self, how: Callable[[], Any]) -> None:
        self.observation_space, self.action_space, self.how = SMALL, spaces.Discrete(2), how

    def close(self) -> None:
        self.how()


@pytest.mark.parametrize("how", [lambda: time.sleep(1000), threading.Event().wait, hang_in_c])
def test_a_close_that_hangs_is_left_after_some_seconds_and_the_others_are_closed(
    how: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(base, "CLOSE_S", 0.2)
    closed: list[str] = []
    begin = time.monotonic()
    for last in (lambda: closed.append("last"), lambda: sys.exit(0)):
        PythonEnvs([lambda: NeverCloses(how), lambda last=last: NeverCloses(last)], [0, 1], 0, first=6).close()  # type: ignore[misc]
    assert closed == ["last"]
    assert time.monotonic() - begin < 60
    assert warned() == ["environment 6 did not close within 0.2 s and is left open; fix its close()"] * 2
