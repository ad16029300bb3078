"""A batch of Python Gymnasium environments, stepped one after another, with everything they return checked."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import FrameStackObservation

from rlframe.core import spaces
from rlframe.core.errors import ConfigError, PartError, warn_once
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.envs.base import EnvError, Envs, EnvStep, InfoMeans, close_envs, env_error
from rlframe.envs.episode_state import EpisodeStates
from rlframe.envs.observations import (
    ENV_ERRORS,
    INTERFACE,
    InvalidValue,
    batch_checker,
    check_info,
    check_mask,
    check_reward,
    describe,
    external_cause,
    row_writer,
)
from rlframe.envs.restarter import Restarter
from rlframe.envs.serializer import EnvStateError

_FLAGS = frozenset({bool, np.bool_})
_REMEDY = "reproduce it with one environment of this seed, and fix the environment"
_FLOAT32_SAFE = 1e38  # rewards are checked one by one if their sum exceeds this or is NaN


class PythonEnvs(Envs):
    """Owns its environments. Counts time limits itself, which saves a wrapper."""

    def __init__(
        self,
        makers: Sequence[Callable[[], gymnasium.Env]],
        seeds: Sequence[int],
        time_limit: int,
        first: int = 0,
        restarts: int = 0,
    ) -> None:
        """`time_limit` is in steps (0: none); `first` is the index of the first environment in messages.

        An environment that raises is made again, up to `restarts` times.

        Raises EnvError if a maker raises an exception other than ConfigError, or if the environments' spaces differ.
        """
        self.n, self.can_wait = len(makers), True
        self.backend = f"python, {self.n} environment{'s one by one' if self.n > 1 else ''}"
        self._first, self.time_limit, self.restarts = first, time_limit, restarts
        self._envs: list[gymnasium.Env] = []
        self._make_envs(makers, seeds)
        self.observation_space, self.action_space = self._envs[0].observation_space, self._envs[0].action_space
        self._check_spaces(seeds)
        self.render_fps = _render_fps(self._envs[0], self.render_fps)
        self._episodes = EpisodeStates(self._envs, seeds)
        self.observation_space = _frame_stack_space(self._envs[0])
        self._steps = [env.step for env in self._envs]
        self._reset = self._episodes.reset
        self._waiting: frozenset[int] = frozenset()  # see `hold`
        self._stopped: frozenset[int] = frozenset()  # of these, those in the middle of an episode
        self._acted: dict[int, Tree | None] = {}  # their actions until then
        self._restarter = Restarter(makers, seeds, self._envs, self._episodes, restarts, first)
        self.restarted: list[int] = self._restarter.restarted
        if restarts:
            self._steps = [partial(self._restarter.step, index) for index in range(self.n)]
            self._reset = self._restarter.reset
        self._time_limit = np.full(self.n, time_limit or np.iinfo(np.int64).max)
        self._means = [InfoMeans() for _ in self._envs]
        self._write = row_writer(self.observation_space, self._warn)
        self._check = batch_checker(self.observation_space)
        self._decode, self._split = spaces.action_decoder(self.action_space), spaces.unbatch(self.action_space)
        self._reward_types: set[type] = {float}  # accepted so far
        self._rewards: list[Any] = [0.0] * self.n
        self._terminated: list[Any] = [False] * self.n
        self._truncated: list[Any] = [False] * self.n
        self._flags = (("terminated", self._terminated), ("truncated", self._truncated))
        self._ended = bytearray(self.n)  # 1: the next step is a reset
        self._ended_rows = np.frombuffer(self._ended, np.bool_)  # the same memory: numbers are read faster from bytes
        self._elapsed = np.zeros(self.n, np.int64)  # steps of the running episode
        self._timed_out = np.zeros(self.n, np.bool_)

    def _make_envs(self, makers: Sequence[Callable[[], gymnasium.Env]], seeds: Sequence[int]) -> None:
        for index, make in enumerate(makers):
            try:
                self._envs.append(make())
            except Exception as error:
                self.close()
                if isinstance(error, ConfigError | PartError):
                    raise
                problem = f"environment {self._first + index} could not be made: {type(error).__name__}: {error}"
                raise env_error(problem, "fix its constructor or env_kwargs", seed=seeds[index]) from error

    def _check_spaces(self, seeds: Sequence[int]) -> None:
        """Close the environments and raise EnvError or ValueError if their spaces differ or are not supported."""
        with ExitStack() as opened:
            opened.callback(self.close)
            spaces.check_observation_space(self.observation_space)
            spaces.check_action_space(self.action_space)
            self._mask_parts = spaces.mask_parts(self.observation_space, self.action_space)
            for index, env in enumerate(self._envs):
                if env.observation_space != self.observation_space or env.action_space != self.action_space:
                    found = f"{env.observation_space} and {env.action_space}"
                    which = f"environment {self._first + index} has different spaces from environment {self._first}"
                    remedy = "give every environment of a batch the same spaces"
                    raise env_error(f"{which}: {found}", remedy, seed=seeds[index])
            opened.pop_all()

    def reset(self, out: EnvStep, round_: int = 0) -> None:
        self._episodes.start_round(round_)
        for index in range(self.n):
            try:
                self._reset_env(index, out.observation)
            except ENV_ERRORS as error:
                raise self._error(error, index, "the reset") from external_cause(error)
        self._ended_rows[:], self._elapsed[:] = False, 0
        out.first[...] = True
        self._check_values(out, None)

    def _reset_env(self, index: int, rows: Tree) -> None:
        self._elapsed[index] = -1  # the current step increments it to 0
        self._means[index].clear()
        self._write(rows, index, self._reset(index))

    def step(self, action: Tree, out: EnvStep) -> None:
        actions = self._split(self._decode(action))
        rows, write, ended = out.observation, self._write, self._ended
        rewards, terminated, truncated = self._rewards, self._terminated, self._truncated
        if self._episodes.action_log is not None:
            self._episodes.log_action(action)
        if self.restarted:
            self.restarted.clear()
        index = 0
        try:
            for index, step in enumerate(self._steps):
                if ended[index]:
                    if index not in self._waiting:
                        self._reset_env(index, rows)
                    rewards[index], terminated[index], truncated[index] = 0.0, False, False
                    continue
                observation, rewards[index], terminated[index], truncated[index], info = step(actions[index])
                write(rows, index, observation)
                if type(info) is not dict:
                    check_info(info)
                if info:
                    self._means[index].add(info)
        except ENV_ERRORS as error:
            raise self._error(error, index, "the reset" if ended[index] else actions[index]) from external_cause(error)
        self._check_scalars(actions)
        self._write_flags(out)
        if self._waiting or self.restarted:
            self._write_special(out)
        self._check_values(out, actions)

    def _write_flags(self, out: EnvStep) -> None:
        if self.n == 1:
            self._write_flags_of_one(out)
            return
        self._elapsed += 1
        np.greater_equal(self._elapsed, self._time_limit, out=self._timed_out)
        np.logical_or(self._truncated, self._timed_out, out=self._timed_out)
        self.write_outcome(out, self._rewards, self._terminated, self._timed_out, self._ended_rows)
        self._ended_rows[:] = out.ended

    def _write_flags_of_one(self, out: EnvStep) -> None:
        """`_write_flags` for n = 1 with scalars: 1.1 us instead of 5.0."""
        first, terminated = bool(self._ended[0]), bool(self._terminated[0])
        out.first[0], out.valid[0], out.terminated[0] = first, not first, terminated
        out.raw_reward[0] = out.reward[0] = self._rewards[0]
        if self.transform is not None:
            self.transform(out.raw_reward, out.reward)
        elapsed = self._elapsed[0] = int(self._elapsed[0]) + 1
        truncated = out.truncated[0] = bool(self._truncated[0]) or elapsed >= int(self._time_limit[0])
        self._ended[0] = out.ended[0] = terminated or truncated

    def _write_special(self, out: EnvStep) -> None:
        """Correct the flags of the environments that waited, or were made again."""
        waited = [index for index in self._waiting if out.first[index]]  # it had ended before the step
        for index in waited:
            out.first[index] = out.truncated[index] = out.ended[index] = False
            self._ended[index] = True
            self._elapsed[index] -= 1
        for index in self.restarted:
            out.first[index], out.valid[index] = True, False
            out.truncated[index] = out.ended[index] = self._ended[index] = False
            self._elapsed[index] = 0
            self._means[index].clear()

    def hold(self, which: frozenset[int], at_once: bool = False) -> None:
        log = self._episodes.action_log
        for index in self._stopped - which:
            self._ended[index] = False
            if log is not None and (acted := self._acted.pop(index)) is not None:
                log.start_episode(index, acted)  # without what was logged since
        self._stopped &= which
        if at_once:
            running = frozenset(index for index in which if not self._ended[index])
            self._stopped |= running
            for index in running:
                self._ended[index] = True
                if log is not None:
                    self._acted.setdefault(index, log.actions(index))
        self._waiting = which

    def _check_scalars(self, actions: list[Any]) -> None:
        """Check rewards and flags one by one, but only if a type is new or the rewards' sum is not finite."""
        flags = _FLAGS.issuperset(map(type, self._terminated)) and _FLAGS.issuperset(map(type, self._truncated))
        known = flags and self._reward_types.issuperset(map(type, self._rewards))
        if known and -_FLOAT32_SAFE < sum(self._rewards, 0.0) < _FLOAT32_SAFE:  # 0.0: small integers do not overflow
            return
        for index in range(self.n):
            try:
                for name, values in (("reward", self._rewards), *self._flags):
                    values[index] = self._element(name, values[index])
                check_reward(self._rewards[index])
                self._reward_types.add(type(self._rewards[index]))
                for name, values in self._flags:
                    _check_flag(name, values[index])
            except InvalidValue as invalid:
                raise self._error(invalid, index, actions[index]) from None

    def _element(self, name: str, value: Any) -> Any:
        """The element of an array that has only one; another value as it is."""
        if not isinstance(value, np.ndarray) or value.size != 1:
            return value
        if value.shape:
            self._warn(f"`{name}` is an array of shape {value.shape}, not a number; its only element is taken")
        return value.item()

    def _warn(self, text: str) -> None:
        spec, inner = self._envs[0].spec, type(self._envs[0].unwrapped)
        warn_once(f"env={spec.id if spec else f'{inner.__module__}:{inner.__qualname__}'}: {text}")

    def _check_values(self, out: EnvStep, actions: list[Any] | None) -> None:
        try:
            self._check(out.observation)
            if self._mask_parts:
                check_mask(out.observation[spaces.ACTION_MASK], self._mask_parts, self._ended_rows)
        except InvalidValue as invalid:
            index = invalid.index or 0
            action = "the reset" if actions is None or out.first[index] else actions[index]
            raise self._error(invalid, index, action, 0) from None

    def _error(self, error: BaseException, index: int, action: Any, ahead: int = 1) -> EnvError:
        """An EnvError with the facts; `ahead` is 1 if the current step is not counted in `_elapsed` yet."""
        return env_error(
            f"environment {self._first + index} {describe(error)}",
            INTERFACE if _is_unpacking(error) else _REMEDY,
            seed=self._episodes.seed(index),
            episode=self._episodes.episodes[index],
            step=int(self._elapsed[index]) + ahead,
            action=action,
        )

    def pop_diagnostics(self, index: int) -> dict[str, float]:
        return self._means[index].pop()

    def state(self) -> list[Any]:
        return [
            {**self._episodes.state(i), "elapsed": int(self._elapsed[i]), "ended": bool(ended), "means": means.state()}
            | ({"restarts": self._restarter.used[i]} if self.restarts else {})
            for i, (ended, means) in enumerate(zip(self._ended, self._means, strict=True))
        ]

    def restore(self, states: Sequence[Any], out: EnvStep, tick: Callable[[], None]) -> list[str]:
        self._episodes.prepare_restore(states)
        reasons = [self._restore_env(index, saved, out, tick) for index, saved in enumerate(states)]
        self._check_values(out, None)
        return reasons

    def _restore_env(self, index: int, saved: Any, out: EnvStep, tick: Callable[[], None]) -> str:
        """Restore one environment, or start its next episode; returns the reason if it could not be restored."""

        def play(env: gymnasium.Env, actions: Tree) -> None:
            self._replay(env, actions, map_tree(lambda x: x[index : index + 1], out.observation), tick)

        reason = "the snapshot does not contain it"
        if isinstance(saved, dict) and "episode" in saved:
            reason = self._episodes.restore(index, saved, play)
            self._restarter.used[index] = saved.get("restarts", 0)
        if not reason:
            self._elapsed[index], self._ended[index] = saved["elapsed"], saved["ended"]
            self._means[index].load(saved["means"])
            return ""
        try:
            self._reset_env(index, out.observation)
        except ENV_ERRORS as error:
            raise self._error(error, index, "the reset") from external_cause(error)
        self._elapsed[index], self._ended[index], out.first[index] = 0, False, True
        return reason

    def _replay(self, env: gymnasium.Env, actions: Tree, goal: Tree, tick: Callable[[], None]) -> None:
        """Take actions [k, ...] again. Raises EnvStateError if they do not lead to the observation `goal` [1, ...]."""
        observation: Any = None
        for t in range(len(leaves(actions)[0]) if leaves(actions) else 0):
            (action,) = self._split(self._decode(map_tree(lambda x, t=t: x[t : t + 1], actions)))
            observation, *_ = env.step(action)
            tick()
        if observation is not None:
            rows = map_tree(np.copy, goal)
            self._write(rows, 0, observation)
            if not all(map(np.array_equal, leaves(rows), leaves(goal))):
                raise EnvStateError("replaying its actions from its seed gave a different episode")

    def frame(self, index: int) -> np.ndarray:
        env = self._envs[index]
        if env.render_mode != "rgb_array":
            raise EnvError(f"environment {index} cannot be rendered; make it with env_kwargs.render_mode=rgb_array")
        try:
            picture = env.render()
        except Exception as error:
            problem = f"environment {index} cannot be rendered: {type(error).__name__}: {error}"
            raise EnvError(f'{problem}; rendering may need pip install "rlframe[video]"') from error
        if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.shape[2] != 3:
            raise EnvError(f"environment {index} rendered a {type(picture).__name__}, not an array [H, W, 3]")
        return np.asarray(picture, np.uint8)

    def close(self) -> None:
        envs, self._envs = self._envs, []
        close_envs(envs, self._first)


def _check_flag(name: str, flag: Any) -> None:
    if np.shape(flag) != () or flag not in (0, 1):
        raise InvalidValue(f"`{name}` is not True or False but {flag!r}")


def _render_fps(env: gymnasium.Env, default: float) -> float:
    given = env.metadata.get("render_fps")
    return float(given) if isinstance(given, int | float) and 0 < given < 1000 else default


def _frame_stack_space(env: gymnasium.Env) -> gymnasium.Space:
    """The observation space; a FrameStack if the outermost wrapper stacks grayscale frames."""
    space = env.observation_space
    if not isinstance(env, FrameStackObservation) or not isinstance(space, gymnasium.spaces.Box):
        return space
    is_image = space.dtype == np.uint8 and len(space.shape) == 3
    return spaces.FrameStack(space, env.stack_size) if is_image else space


def _is_unpacking(error: BaseException) -> bool:
    """Whether a step or reset returned another number of values, for us or a wrapper of Gymnasium's."""
    if not (isinstance(error, ValueError) and "to unpack" in str(error)):
        return False
    raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(raised_in) and raised_in[-1].startswith(("rlframe.envs.", "gymnasium.wrappers."))
