"""Stacks are rebuilt exactly from single frames: of several channels, from any row on, at gaps, and in a real game."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.wrappers import FrameStackObservation

from rlframe.core import spaces
from rlframe.core.spaces import FrameStack
from rlframe.core.struct import leaves
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.envs import EnvConfig, make_envs
from rlframe.replay import InMemory, NStep, make_replay
from rlframe.replay.frames import check_stacks
from rlframe.rollout.buffer import empty_rows
from rlframe.rollout.stepper import LocalStepper
from tests.replay.buffers import ACTIONS, replay_for
from tests.replay.history import SIZE, History

STACK = FrameStack(Box(0, 255, (3, *SIZE), np.uint8), 3)
COMPRESS = pytest.mark.parametrize("compress", [False, True], ids=["plain", "lz4"])


def stacks_of(counters: list[int], n: int = 3, channels: int = 1) -> torch.Tensor:
    """[T+1, 1, n * channels, 4, 4]: frame t full of counters[t], 0 before the first."""
    padded = [0] * (n - 1) + counters
    rows = [np.repeat(padded[t : t + n], channels) for t in range(len(counters))]
    return torch.from_numpy(np.stack(rows).astype(np.uint8))[:, None, :, None, None].expand(-1, -1, -1, *SIZE).clone()


def samples_of(observation: torch.Tensor, valid: list[bool] | None = None, first: int = 0) -> Samples:
    """Steps of one environment; `first`: the row at which an episode starts, as it does after one that is not valid."""
    T = len(observation) - 1
    zeros = torch.zeros(T + 1, 1)
    acted = torch.tensor(valid or [True] * T)[:, None]
    starts = torch.cat([zeros[:1] > 0, ~acted]) | (torch.arange(T + 1)[:, None] == first)
    return Samples(
        inputs=AgentInputs(observation, zeros.long(), zeros, starts),
        action=zeros[1:].long(),
        reward=zeros[1:],
        terminated=zeros[1:].bool(),
        truncated=torch.cat([~acted, zeros[:1] > 0])[1:] & acted,
        valid=acted,
        info=None,  # type: ignore[arg-type]  # not read by replay
        state=(),
        final_state=(),
        n_env_steps=int(acted.sum()),
        start=0,
    )


def replay_of(space: FrameStack = STACK, **config: Any) -> Any:
    return make_replay(InMemory(size=40, **config), space, ACTIONS, BatchSpec(4, 1), NStep(0.5))


def drawn(replay: Any) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The stacks of all transitions, as one pixel per frame."""
    found = replay.sample(200)
    pairs = zip(found.inputs.observation[..., 0, 0].tolist(), found.next_inputs.observation[..., 0, 0], strict=True)
    return {(tuple(one), tuple(other.tolist())) for one, other in pairs}


@COMPRESS
def test_frames_may_have_several_channels(compress: bool) -> None:
    colours = FrameStack(Box(0, 255, (6, *SIZE), np.uint8), 3)
    replay = replay_of(colours, compress=compress)
    replay.append(samples_of(stacks_of([1, 2, 3, 4, 5], channels=2)))
    assert ((1, 1, 2, 2, 3, 3), (2, 2, 3, 3, 4, 4)) in drawn(replay)


@COMPRESS
def test_the_first_row_may_be_in_the_middle_of_an_episode(compress: bool) -> None:
    replay = replay_of(compress=compress)
    replay.append(samples_of(stacks_of([1, 2, 3, 4, 5, 6, 7])[2:], first=-1))
    assert ((1, 2, 3), (2, 3, 4)) in drawn(replay)


@COMPRESS
def test_a_batch_that_does_not_continue_the_last_one_starts_with_its_own_frames(compress: bool) -> None:
    replay = replay_of(compress=compress)
    replay.append(samples_of(stacks_of([1, 2, 3, 4, 5])))
    replay.append(samples_of(stacks_of([11, 12, 13, 14, 15])))
    assert drawn(replay) >= {((2, 3, 4), (3, 4, 5)), ((0, 0, 11), (0, 11, 12)), ((0, 11, 12), (11, 12, 13))}
    assert len(drawn(replay)) == 8


def test_rows_of_a_lap_before_are_not_in_the_first_stacks_of_a_new_start() -> None:
    replay = make_replay(InMemory(size=24), STACK, ACTIONS, BatchSpec(4, 1), NStep(0.5))
    frame = 1
    for start in range(0, 32, 4):  # every third row is absent, in one long episode
        valid = [(start + t) % 3 != 1 for t in range(4)]
        frames = frame + np.cumsum([0, *valid])
        stacks = np.stack([np.clip(frames - back, 1, None) for back in (2, 1, 0)], 1).astype(np.uint8)
        found = samples_of(torch.from_numpy(stacks)[:, None, :, None, None].expand(-1, -1, -1, *SIZE).clone(), valid)
        found.inputs.first[1:] = found.inputs.first[:1] = False
        found.truncated[:], found.inputs.first[0], frame = False, start == 0, int(frames[-1])
        replay.append(replace(found, start=start))
    replay.append(replace(samples_of(stacks_of([201, 202, 203, 204, 205])), start=33))
    newest = replay.read(replay.newest()).inputs.observation[..., 0, 0].tolist()
    assert newest == [[0, 0, 201], [0, 201, 202], [201, 202, 203], [202, 203, 204]]


@COMPRESS
def test_an_environment_that_waits_after_a_lost_life_goes_on_with_its_stacks(compress: bool) -> None:
    stacks = stacks_of([1, 2, 3, 4, 5])[[0, 1, 2, 3, 3, 3, 4]]  # rows 4 and 5 repeat row 3
    found = samples_of(stacks, [True, True, True, False, False, True])
    found.terminated[2], found.truncated[:] = True, False
    found.inputs.first[:, 0] = torch.tensor([True, False, False, True, True, True, False])
    replay = replay_of(compress=compress)
    for lo, hi in ((0, 4), (4, 6)):
        steps = {name: getattr(found, name)[lo:hi] for name in ("action", "reward", "terminated", "truncated", "valid")}
        n = int(steps["valid"].sum())
        replay.append(replace(found, inputs=found.inputs[lo : hi + 1], n_env_steps=n, start=lo, **steps))
    replay.append(replace(samples_of(stacks_of([1, 2, 3, 4, 5, 6])[4:], first=-1), start=6))
    waited = {pair for pair in drawn(replay) if pair[0] == (2, 3, 4)}
    assert waited == {((2, 3, 4), (3, 4, 5))}


@COMPRESS
def test_the_layout_of_a_batch_is_known_before_there_are_rows(compress: bool) -> None:
    replay = replay_of(compress=compress)
    layout = replay.layout(2)
    replay.append(samples_of(stacks_of([1, 2, 3, 4, 5])))
    shapes = [[(x.shape, x.dtype) for x in leaves(each)] for each in (layout, replay.sample(2))]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("padding", ["reset", "zero"])
def test_both_paddings_of_gymnasium_are_detected(padding: str) -> None:
    env = FrameStackObservation(gymnasium.make("CartPole-v1"), 3, padding_type=padding)
    floats = env.reset(seed=0)[0]
    stacks = np.zeros((2, 1, *floats.shape), np.uint8)
    stacks[1, 0] = np.abs(floats * 1e4).astype(np.uint8)
    assert check_stacks(stacks, np.ones((1, 1), np.bool_), np.zeros((1, 1), np.bool_)).item() == (padding == "zero")


@COMPRESS
def test_stacks_that_do_not_shift_raise_an_error(compress: bool) -> None:
    observation = stacks_of([1, 2, 3, 4, 5])
    observation[3, 0, 1] = 77
    with pytest.raises(ValueError, match=r"environment 0: the observation of step 2 .*Box instead of FrameStack"):
        replay_of(compress=compress).append(samples_of(observation))


def test_stacks_with_another_padding_raise_an_error() -> None:
    observation = stacks_of([1, 2, 3, 4, 5])
    observation[3, 0, 0] = 77
    with pytest.raises(
        ValueError, match=r"environment 0: the stack after a reset is padded .*Box instead of FrameStack"
    ):
        replay_of().append(samples_of(observation, [True, True, False, True]))


def test_both_stacks_of_a_transition_share_their_frames() -> None:
    history = History(2, "frames")
    replay = replay_for(history)
    replay.append(history.batch(4))
    found = replay.sample(4)
    one, other = found.inputs.observation, found.next_inputs.observation
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert one.untyped_storage().nbytes() == 4 * 4 * 16  # of each transition four frames of 4x4


@pytest.mark.parametrize(
    ("game", "compress"),
    [
        pytest.param("ale", False, marks=pytest.mark.slow),  # as compressed, and as the wrapped one
        ("ale", True),
        *((f"wrapped, {padding}", compress) for padding in ("reset", "zero") for compress in (False, True)),
    ],
)
def test_stacks_of_a_game_are_rebuilt(game: str, compress: bool) -> None:
    T, B = 20, 2
    if game == "ale":
        pytest.importorskip("ale_py")
        env = EnvConfig("ALE/Breakout-v5", {"max_num_frames_per_episode": 240, "img_height": 42})
    else:
        env = EnvConfig("tests.envs.custom:stacked", {"padding": game.split()[-1]})
    envs = make_envs(env, B, [1, 2])
    assert isinstance(envs.observation_space, FrameStack)
    rows, rng = empty_rows(envs.observation_space, envs.action_space, T, B), np.random.default_rng(0)
    stepper = LocalStepper(envs, rows, 0, np.zeros(1, np.int64))
    stepper.reset()
    config = InMemory(size=10 * T * B, compress=compress)
    replay = make_replay(config, envs.observation_space, envs.action_space, BatchSpec(T, B), NStep(0.9, 2))
    offset = replay._storages[0].rows_before
    history = []
    for start in range(0, 15 * T, T):
        rows.observation[0], rows.first[0] = rows.observation[-1], rows.first[-1]
        rows.action[0], rows.reward[0] = rows.action[-1], rows.reward[-1]
        for t, action in enumerate(rows.actions()):
            action[...] = spaces.random_action(envs.action_space, rng, B)
            stepper.start_step(t)
            stepper.finish_step(t)
        history += list(rows.observation[:-1].copy())
        inputs = AgentInputs(rows.observation, rows.action, rows.reward, rows.first)
        answers: tuple[Any, Any, Any] = (None, (), ())
        ends = (rows.terminated, rows.truncated, rows.valid)
        numbers = {"n_env_steps": int(rows.valid.sum()), "start": start}
        replay.append(Samples(inputs, rows.action[1:], rows.reward[1:], *ends, *answers, **numbers))
        found = replay.sample(32)
        time, env = np.divmod(found.index, B)
        for i in range(32):
            np.testing.assert_array_equal(found.inputs.observation[i], history[time[i] - offset][env[i]])
    envs.close()
    assert replay.n_choices < replay.n_rows < 10 * T * B  # episodes ended
