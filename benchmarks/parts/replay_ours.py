"""rlframe's replay, filled: with noise, or with a game played at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from rlframe.core import spaces
from rlframe.core.spaces import FrameStack
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.envs import EnvConfig, Envs, make_envs
from rlframe.record.codec import ChunkedArray
from rlframe.replay import InMemory, NStep, ReplayBuffer, ReplayConfig, Transitions, make_replay
from rlframe.rollout.buffer import empty_rows
from rlframe.rollout.stepper import LocalStepper

B = 8  # environments
T = 100  # time steps a batch
DISCOUNT = 0.99


class Filled(NamedTuple):
    """A full replay, and the kind of its content."""

    replay: ReplayBuffer[Transitions]
    state: dict[str, Any]


def of_noise(observation: Space, action: Space, config: ReplayConfig, alpha: float = 0.0) -> ReplayBuffer[Transitions]:
    """Replay full of noise without episode ends."""
    replay = make_replay(config, observation, action, BatchSpec(T, B), NStep(DISCOUNT), alpha=alpha)
    for batch in islice(noise_batches(observation, action), config.size // (T * B) + 1):
        replay.append(batch)
    return replay


def noise_batches(observation: Space, action: Space) -> Iterator[Samples]:
    """Endless batches, each continuing the last, in one memory."""
    rng = np.random.default_rng(0)
    rows = empty_rows(observation, action, T, B)
    n_frames = observation.n_frames if isinstance(observation, FrameStack) else 1
    older = noise(observation, n_frames, rng)
    for start in count(0, T):
        new = np.concatenate([older, noise(observation, T, rng)])
        older = new[T:]
        for age in range(n_frames):
            rows.observation.reshape(T + 1, B, n_frames, *new.shape[2:])[:, :, age] = new[age : age + T + 1]
        rows.valid[...] = True
        yield as_samples(rows, start)


def noise(observation: Space, n: int, rng: np.random.Generator) -> np.ndarray:
    """Noise for n time steps: newest frames, or vectors."""
    if isinstance(observation, FrameStack):
        return rng.integers(0, 256, (n, B, *(observation.shape or ())[1:]), dtype=np.uint8)
    return rng.random((n, B, *(observation.shape or ())), dtype=np.float32)


def of_play(game: str, size: int, compress: bool) -> Filled:
    """Replay full of a game played at random."""
    config = InMemory(size=size, compress=compress)
    with closing(make_envs(EnvConfig(game, n_threads=1), B, list(range(B)))) as envs:
        replay = make_replay(config, envs.observation_space, envs.action_space, BatchSpec(T, B), NStep(DISCOUNT))
        for batch in islice(play_batches(envs), size // (T * B) + 1):
            replay.append(batch)
    return Filled(replay, replay.state_dict())


def play_batches(envs: Envs) -> Iterator[Samples]:
    """Endless batches of random play, in one memory."""
    rows, rng = empty_rows(envs.observation_space, envs.action_space, T, B), np.random.default_rng(0)
    stepper = LocalStepper(envs, rows, 0, np.zeros(1, np.int64))
    stepper.reset()
    for start in count(0, T):
        first, *steps = rows.observation, *rows.actions()
        first[0] = first[-1]
        rows.first[0], rows.action[0], rows.reward[0] = rows.first[-1], rows.action[-1], rows.reward[-1]
        for t, action in enumerate(steps):
            action[...] = spaces.random_action(envs.action_space, rng, B)
            stepper.start_step(t)
            stepper.finish_step(t)
        yield as_samples(rows, start)


def as_samples(rows: Any, start: int) -> Samples:
    """The same as Samples of a sampler."""
    return Samples(
        inputs=AgentInputs(rows.observation, rows.action, rows.reward, rows.first),
        action=rows.action[1:],
        reward=rows.reward[1:],
        terminated=rows.terminated,
        truncated=rows.truncated,
        valid=rows.valid,
        info=(),  # type: ignore[arg-type]  # replay does not read it
        state=(),
        final_state=(),
        n_env_steps=int(np.count_nonzero(rows.valid)),
        start=start,
    )


def transition_bytes(filled: Filled) -> float:
    """Bytes of a full replay's arrays, divided by its rows; a block of lz4 takes 41 bytes more than its content."""
    storage = filled.state["parts"][0]["storage"]
    return count_bytes(filled.state) / (len(storage["valid"]) * B) if storage["t"] else 0.0


def count_bytes(state: Any) -> int:
    """The bytes of all arrays in a state."""
    match state:
        case dict():
            own = 33 * len(state["length"]) if "length" in state else 0  # and 8 for its pointer, as in `length`
            return own + sum(map(count_bytes, state.values()))
        case list() | tuple():
            return sum(map(count_bytes, state))
        case np.ndarray() | ChunkedArray():
            return state.nbytes
        case _:
            return 0
