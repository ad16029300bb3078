"""Environments are restored exactly in the middle of an episode, or give the reason why they cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlframe.core import spaces
from rlframe.core.seeding import EpisodeSeeds
from rlframe.envs import EnvError, Envs, episode_state, serializer
from rlframe.envs.base import EnvStep
from rlframe.envs.python import PythonEnvs
from rlframe.record.codec import decode, encode
from tests.envs import resumable
from tests.envs.rows import made, rows_for

N = 2


def stored(value: Any) -> Any:
    """A value after it has been stored in a snapshot: JSON and arrays."""
    arrays: dict[str, np.ndarray] = {}
    tree = json.loads(json.dumps(encode(value, arrays), allow_nan=False))
    return decode(tree, {name: array.copy() for name, array in arrays.items()})


def steps(envs: Envs, n: int, rng: np.random.Generator, out: EnvStep) -> list[EnvStep]:
    """n steps with random actions, each a copy."""
    found = []
    for _ in range(n):
        envs.step(spaces.random_action(envs.action_space, rng, envs.n), out)
        found.append(out.map(np.copy))
    return found


def assert_steps_equal(one: list[EnvStep], other: list[EnvStep]) -> None:
    for t, (a, b) in enumerate(zip(one, other, strict=True)):
        a.map(lambda x, y, t=t: np.testing.assert_array_equal(x, y, err_msg=f"step {t}"), b)


def restored(make: Callable[[], Envs], before: int, after: int = 60) -> tuple[list[str], Envs]:
    """Save, restore into new environments and continue both; without a reason for a restart, they must be equal."""
    rng, envs, fresh = np.random.default_rng(3), make(), make()
    out = rows_for(envs)
    envs.reset(out)
    fresh.reset(rows_for(fresh))
    steps(envs, before, rng, out)
    state, row = stored(envs.state()), out.map(np.copy)
    drawn = rng.bit_generator.state
    one = steps(envs, after, rng, out)
    rng.bit_generator.state = drawn
    reasons = fresh.restore(state, row, lambda: None)
    if not any(reasons):
        assert_steps_equal(one, steps(fresh, after, rng, row))
        assert [envs.pop_diagnostics(i) for i in range(N)] == [fresh.pop_diagnostics(i) for i in range(N)]
    return reasons, fresh


def kinds(id_: Any, **kwargs: Any) -> Callable[[], Envs]:
    return lambda: made(id_, N, backend="python", **kwargs)


CLASSIC = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "FrozenLake-v1", "Blackjack-v1"]


@pytest.mark.parametrize("before", [1, 13])
@pytest.mark.parametrize("id_", CLASSIC)
def test_classic_environments_continue_bit_for_bit(id_: str, before: int) -> None:
    assert restored(kinds(id_), before)[0] == ["", ""]


@pytest.mark.parametrize("id_", ["HalfCheetah-v5", "Ant-v5", "Humanoid-v5"])
def test_mujoco_continues_bit_for_bit_including_derived_values(id_: str) -> None:
    pytest.importorskip("mujoco")
    assert restored(kinds(id_), 17, 20)[0] == ["", ""]


RANDOM = [resumable.Walk, resumable.Opaque, resumable.Telling, resumable.rescaled]
HIDING = [resumable.Pushing, resumable.Counting, resumable.Slotted]
HOLDING = [resumable.Levels, resumable.Late, resumable.Shared, resumable.normalizing]


@pytest.mark.parametrize("env", [*RANDOM, *HIDING, *HOLDING])
@pytest.mark.parametrize("before", range(6, 10))
def test_an_environment_with_random_steps_continues_bit_for_bit(env: Any, before: int) -> None:
    assert restored(kinds(env), before, 40)[0] == ["", ""]


@pytest.mark.parametrize("before", [5, 9])
def test_a_set_whose_order_cannot_be_kept_is_the_reason_for_a_new_episode(before: int) -> None:
    reasons, _ = restored(kinds(resumable.Drawing, length=20), before)
    assert all(not reason or "Drawing.free is a set in an order" in reason for reason in reasons)


def test_many_numbers_in_lists_fit_into_a_snapshot() -> None:
    holder = Holder()
    holder.numbers = [[0] * 200 for _ in range(200)]
    saved = serializer.save_attributes([holder], [holder], {})
    assert len(json.dumps(encode(saved, {}))) < 100_000
    fresh = through(holder)
    assert fresh.numbers == holder.numbers
    assert type(fresh.numbers[3][5]) is int
    holder.numbers = [(i,) for i in range(30_000)]
    with pytest.raises(serializer.EnvStateError, match=r"Holder\.numbers is one of more than 20,000 values"):
        serializer.save_attributes([holder], [holder], {})


def test_box2d_is_replayed_from_its_seed_and_actions() -> None:
    pytest.importorskip("Box2D")
    reasons, fresh = restored(kinds("LunarLander-v3"), 30)
    assert reasons == ["", ""]
    assert leaves_nothing_out(fresh), "restored once more, in the same episodes"


def leaves_nothing_out(envs: Envs) -> bool:
    return all("actions" in state and "state" not in state for state in envs.state())


def test_a_replayed_episode_can_be_saved_and_replayed_again() -> None:
    make, rng = kinds(resumable.Opaque, length=30), np.random.default_rng(0)
    first, second, third = make(), make(), make()
    out = rows_for(first)
    for envs in (first, second, third):
        envs.reset(out if envs is first else rows_for(envs))
    steps(first, 8, rng, out)
    row = out.map(np.copy)
    assert second.restore(stored(first.state()), row, lambda: None) == ["", ""]
    drawn = rng.bit_generator.state
    steps(first, 9, rng, out)
    rng.bit_generator.state = drawn
    steps(second, 9, rng, row)
    ticks: list[None] = []
    assert third.restore(stored(second.state()), row, lambda: ticks.append(None)) == ["", ""]
    assert len(ticks) == 2 * 17
    drawn = rng.bit_generator.state
    one = steps(first, 40, rng, out)
    rng.bit_generator.state = drawn
    assert_steps_equal(one, steps(third, 40, rng, row))


def test_get_state_is_preferred_to_reading_attributes() -> None:
    resumable.Telling.n_told = 0
    restored(kinds(resumable.Telling), 5)
    assert resumable.Telling.n_told >= N


def test_an_episode_that_cannot_be_replayed_restarts_and_says_so() -> None:
    reasons, fresh = restored(kinds(resumable.Unrepeatable), 5)
    assert all("gave a different episode" in reason for reason in reasons)
    out = rows_for(fresh)
    fresh.step(np.zeros(N, np.int64), out)
    assert out.valid.all(), "a new episode has begun"


def test_a_restarted_episode_sets_first_and_has_the_next_seed() -> None:
    make = kinds(resumable.Unrepeatable)
    envs, fresh = make(), make()
    out = rows_for(envs)
    envs.reset(out)
    fresh.reset(rows_for(fresh))
    steps(envs, 3, np.random.default_rng(0), out)
    out.first[...] = False
    before = out.observation.copy()
    fresh.restore(stored(envs.state()), out, lambda: None)
    assert out.first.all()
    assert (out.observation != before).any()
    assert [state["episode"] for state in fresh.state()] == [1, 1]


class Breaks(resumable.Unrepeatable):
    """Raises in its third step."""

    def step(self, action: Any) -> Any:
        if self.time == 2:
            raise RuntimeError("broken")
        return super().step(action)


def test_restarts_before_a_resume_count_also_where_an_episode_begins_anew() -> None:
    make = [lambda: PythonEnvs([Breaks], [3], 0, restarts=2) for _ in range(2)]
    envs, fresh = (each() for each in make)
    out = rows_for(envs)
    envs.reset(out)
    steps(envs, 4, np.random.default_rng(0), out)
    (reason,) = fresh.restore(stored(envs.state()), out, lambda: None)
    assert "gave a different episode" in reason
    steps(fresh, 3, np.random.default_rng(0), out)
    seeds = [each.state()[0]["seed"] for each in (envs, fresh)]
    assert len({3, *seeds}) == 3, "each restart has a seed of its own"
    with pytest.raises(EnvError, match="broken"):
        steps(fresh, 3, np.random.default_rng(0), out)


@pytest.mark.parametrize("sticky", [pytest.param(0.0, marks=pytest.mark.slow), 0.25])
def test_wrapped_atari_continues_bit_for_bit_also_with_sticky_actions(sticky: float) -> None:
    pytest.importorskip("ale_py")
    reasons, fresh = restored(kinds(resumable.atari, sticky=sticky), 10, 10)
    assert reasons == ["", ""]
    assert leaves_nothing_out(fresh) == (sticky > 0), "which action is repeated is no part of ALE's state"


@pytest.mark.slow  # 12 s
@pytest.mark.parametrize("game", ["Breakout", "Seaquest"])
def test_games_with_lives_continue_bit_for_bit(game: str) -> None:
    pytest.importorskip("ale_py")
    assert restored(kinds(f"ALE/{game}-v5"), 400, 300)[0] == ["", ""]


def test_a_numpy_vector_environment_continues_bit_for_bit() -> None:
    def make() -> Envs:
        return made("CartPole-v1", N, backend="native")

    assert restored(make, 30)[0] == ["", ""]


def test_a_native_atari_environment_starts_new_games_and_says_so() -> None:
    pytest.importorskip("ale_py")
    reasons, _ = restored(lambda: made("ALE/Pong-v5", 1, backend="native"), 2, 1)
    assert all("cannot save" in reason for reason in reasons)


@pytest.mark.parametrize("env", [resumable.Walk, resumable.Opaque])
def test_each_episode_has_its_own_randomness_independent_of_earlier_ones(env: Any) -> None:
    one, other = made(env, 1, [5], "python", length=2), made(env, 1, [5], "python", length=9)
    starts = []
    for envs in (one, other):
        rows, found = rows_for(envs), []
        envs.reset(rows)
        for _ in range(40):
            envs.step(np.ones(1, np.int64), rows)
            if rows.first[0]:
                found.append(rows.observation[0, 0].item())
        starts.append(found)
    assert len(starts[0]) > len(starts[1]) > 2
    assert starts[0][: len(starts[1])] == starts[1]


@pytest.mark.parametrize("env", [resumable.Walk, resumable.Opaque])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_state_saved_in_the_first_steps_is_restored_too(env: Any, before: int) -> None:
    assert restored(kinds(env, length=1), before)[0] == ["", ""]
    assert restored(kinds(env, length=5), before)[0] == ["", ""]


def test_episode_seeds_start_with_the_environments_seed_and_do_not_repeat() -> None:
    seeds = EpisodeSeeds(11)
    drawn = [seeds[episode] for episode in range(300)]
    assert drawn[0] == 11
    assert len(set(drawn)) == 300
    assert all(0 <= seed < 2**31 for seed in drawn)
    assert [seeds[episode] for episode in (200, 3)] == [drawn[200], drawn[3]]


class Holder:
    """Attributes of all supported types; some are shared."""

    def __init__(self) -> None:
        self.numbers: Any = [1, 2.5, None, True, "text", b"bytes", (1, 2), {1, 2}, 2**70, float("nan")]
        self.shared = self.numbers
        self.by_name = {("a", 1): np.arange(100, dtype=np.float32), 2: np.float32(0.1)}
        self.words, self.columns = np.array(["ab", "c"]), np.asfortranarray(np.arange(6.0).reshape(2, 3))
        self.rng, self.own = np.random.default_rng(4), self
        self.same_rng = self.rng
        self.space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Discrete(9)})
        self.space.seed(3)


def through(holder: Any) -> Any:
    fresh = Holder()
    serializer.load_attributes([fresh], [fresh], stored(serializer.save_attributes([holder], [holder], {})), {})
    return fresh


def test_plain_attributes_keep_their_types_and_what_they_share() -> None:
    holder = Holder()
    holder.numbers.append("more")
    holder.rng.random(3)
    fresh = through(holder)
    assert repr(fresh.numbers) == repr(holder.numbers)
    assert fresh.shared is fresh.numbers
    assert fresh.own is fresh
    assert fresh.same_rng is fresh.rng
    assert type(fresh.by_name[2]) is np.float32
    np.testing.assert_array_equal(fresh.by_name["a", 1], holder.by_name["a", 1])
    assert fresh.words.tolist() == ["ab", "c"]
    assert fresh.columns.flags.f_contiguous
    assert fresh.columns.tolist() == holder.columns.tolist()
    assert fresh.rng.random() == holder.rng.random()
    assert fresh.rng.spawn(1)[0].random() == holder.rng.spawn(1)[0].random()
    assert [fresh.space.sample() for _ in range(9)] == [holder.space.sample() for _ in range(9)]


@pytest.mark.parametrize(
    "value", [object(), iter([1]), np.array([{}]), [lambda: 0], resumable.Hidden(), np.eye(4)[:, 1]]
)
def test_an_attribute_that_is_not_plain_data_is_an_error_with_its_name(value: Any) -> None:
    holder = Holder()
    holder.numbers = value
    with pytest.raises(serializer.EnvStateError, match=r"Holder\.numbers (Hidden\.rest )?is a"):
        serializer.save_attributes([holder], [holder], {})


def test_arrays_that_share_memory_are_an_error() -> None:
    holder = Holder()
    holder.numbers = holder.by_name["a", 1][:10]
    with pytest.raises(serializer.EnvStateError, match="share memory"):
        serializer.save_attributes([holder], [holder], {})


def test_a_state_of_other_wrappers_is_an_error() -> None:
    one, other = (gymnasium.make("CartPole-v1", max_episode_steps=n) for n in (5, -1))
    one.reset(seed=0)
    with pytest.raises(serializer.EnvStateError, match="layers"):
        episode_state.load_env(other, stored(episode_state.save_env(one)))
