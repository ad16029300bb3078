"""Gymnasium's native vector environments (`vector_entry_point`) under NEXT_STEP autoreset; also used for EnvPool's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from rlframe.core import spaces
from rlframe.core.errors import ConfigError, warn_once
from rlframe.core.seeding import round_seed
from rlframe.core.struct import Tree
from rlframe.envs.base import EnvError, Envs, EnvStep, VectorInfoMeans, close_envs, env_error
from rlframe.envs.episode_state import load_env, save_env
from rlframe.envs.observations import (
    ENV_ERRORS,
    InvalidValue,
    batch_checker,
    batch_writer,
    check_info,
    check_mask,
    describe,
    external_cause,
)
from rlframe.envs.serializer import EnvStateError

_REMEDY = "compare with env_backend=python, and fix the environment"


def make_native(spec: EnvSpec, kwargs: Mapping[str, Any], seeds: Sequence[int], first: int = 0) -> NativeEnvs:
    """Make the vector environment that `spec` registers. Raises ConfigError if it does not accept `kwargs`."""
    try:
        env = gymnasium.make_vec(spec, num_envs=len(seeds), vectorization_mode="vector_entry_point", **dict(kwargs))
    except (TypeError, ValueError, gymnasium.error.Error) as error:
        raise ConfigError(f"{spec.id} (backend=native) cannot be made: {error}") from error
    # All its environments share one random generator, so their seeds are combined into one.
    seed = seeds[0] if len(seeds) == 1 else int(np.random.SeedSequence(list(seeds)).generate_state(1)[0] >> 1)
    return NativeEnvs(env, seed, list(seeds), f"native {type(env.unwrapped).__name__}", first)


def check_next_step(env: VectorEnv, name: str) -> None:
    """Raise a ConfigError if `env` uses another autoreset mode than NEXT_STEP."""
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.NEXT_STEP:
        raise ConfigError(
            f"{name} has autoreset mode {mode}, but rlframe needs {AutoresetMode.NEXT_STEP}; "
            f"set env_kwargs.autoreset_mode=NextStep if it has that argument, or use env_backend=python"
        )


class NativeEnvs(Envs):
    """Owns one vector environment. Each step's observations are copied once, into the batch."""

    def __init__(self, env: VectorEnv, seed: Any, seeds: list[int], backend: str, first: int = 0) -> None:
        """`seed` is for `env.reset`, an int or a list; `seeds` and the index `first` are for messages.

        Raises ConfigError if `env` does not use NEXT_STEP autoreset, ValueError if a space is not supported.
        """
        check_next_step(env, backend)
        self.n, self.backend = env.num_envs, backend
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        spaces.check_observation_space(self.observation_space)
        spaces.check_action_space(self.action_space)
        self._env, self._seed, self._seeds, self._first = env, seed, seeds, first
        self._decode = spaces.action_decoder(self.action_space)
        self._write = batch_writer(self.observation_space, self.n, lambda text: warn_once(f"{backend}: {text}"))
        self._check = batch_checker(self.observation_space)
        self._mask_parts = spaces.mask_parts(self.observation_space, self.action_space)
        self._means = VectorInfoMeans(self.n)
        self._round = 0
        self._ended = np.zeros(self.n, np.bool_)  # the next step is a reset
        self._elapsed = np.zeros(self.n, np.int64)  # steps of the episode

    def reset(self, out: EnvStep, round_: int = 0) -> None:
        self._round, own = round_, self._seed
        seed: Any = [round_seed(each, round_) for each in own] if isinstance(own, list) else round_seed(own, round_)
        try:
            observation, infos = self._env.reset(seed=seed)
            check_info(infos)
            self._write(out.observation, observation)
            self._check(out.observation)
            if self._mask_parts:
                check_mask(out.observation[spaces.ACTION_MASK], self._mask_parts, np.zeros(self.n, np.bool_))
        except ENV_ERRORS as error:
            raise self._error(error, "the reset") from external_cause(error)
        self._means.clear(np.ones(self.n, np.bool_))
        self._ended[:], self._elapsed[:] = False, 0
        out.first[...] = True

    def step(self, action: Tree, out: EnvStep) -> None:
        actions = self._decode(action)
        try:
            observation, reward, terminated, truncated, infos = self._env.step(actions)
            check_info(infos)
            self._write(out.observation, observation)
            self._check(out.observation)
            self.write_outcome(out, reward, terminated, truncated, self._ended)
            if self._mask_parts:
                check_mask(out.observation[spaces.ACTION_MASK], self._mask_parts, out.ended)
            if not np.isfinite(out.raw_reward).all():
                raise InvalidValue(f"the reward is not finite: {reward}", int(np.argmin(np.isfinite(out.raw_reward))))
        except ENV_ERRORS as error:
            raise self._error(error, actions) from external_cause(error)
        self._follow_ends(out, actions)
        if infos:
            self._means.add(infos, out.valid)

    def _follow_ends(self, out: EnvStep, actions: Tree) -> None:
        self._elapsed += 1
        if self._ended.any():
            self._elapsed[self._ended] = 0
            self._means.clear(self._ended)
            wrong = self._ended & (out.ended | (out.raw_reward != 0))
            if wrong.any():
                text = "a reward or an end on the step that resets (NEXT_STEP)"
                raise self._error(InvalidValue(text, int(np.argmax(wrong))), actions)
        self._ended[:] = out.ended

    def _error(self, error: BaseException, actions: Tree) -> EnvError:
        problem, index = f"{self.backend} {describe(error)}", error.index if isinstance(error, InvalidValue) else None
        if index is None:
            return env_error(problem, _REMEDY, seeds=self._seeds, steps=self._elapsed + 1, actions=actions)
        reset = self._ended[index] or isinstance(actions, str)
        action = "the reset" if reset else spaces.unbatch(self.action_space)(actions)[index]
        problem, step = f"environment {self._first + index} of {problem}", int(self._elapsed[index]) + 1
        return env_error(problem, _REMEDY, seed=self._seeds[index], step=step, action=action)

    def pop_diagnostics(self, index: int) -> dict[str, float]:
        return self._means.pop(index)

    def state(self) -> list[Any]:
        """The first entry is the state of the whole vector environment; the others are empty."""
        try:
            saved = {"state": save_env(self._env), "means": self._means.state()}
            saved |= {"ended": self._ended.copy(), "elapsed": self._elapsed.copy()}
        except EnvStateError as problem:
            saved = {"restart_reason": f"{self.backend} cannot save its state: {problem}"}
        return [{**saved, "n": self.n, "round": self._round}] + [{"n": 0}] * (self.n - 1)

    def restore(self, states: Sequence[Any], out: EnvStep, tick: Callable[[], None]) -> list[str]:
        reason = self._load(states[0])
        if reason:
            self.reset(out, states[0].get("round", 0) + 1 if isinstance(states[0], dict) else 1)
        return [reason] * self.n

    def _load(self, saved: Any) -> str:
        if not isinstance(saved, dict) or saved.get("n") != self.n:
            return "it was saved by another backend, or in a vector environment of another size"
        if "restart_reason" in saved:
            return str(saved["restart_reason"])
        try:
            load_env(self._env, saved["state"])
        except Exception as problem:
            return str(problem)
        self._means.load(saved["means"])
        self._ended[:], self._elapsed[:] = saved["ended"], saved["elapsed"]
        return ""

    def frame(self, index: int) -> np.ndarray:
        raise EnvError(f"{self.backend} cannot render; use env_backend=python with env_kwargs.render_mode=rgb_array")

    def close(self) -> None:
        close_envs([self._env], self._first)
