"""Callbacks: user code that every runner calls during training, to log metrics, write files or stop the run.

On the command line: `callbacks=[module:Class,./file.py:Class]`. In a script: `MinibatchRl(..., callbacks=[Class()])`.
"""

from __future__ import annotations

import logging
from abc import ABC
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.algos.saved import content
from rlframe.core.config import nearest
from rlframe.core.errors import PartError, describe, qualified_name, warn_once
from rlframe.core.names import find_attribute, find_maker, made_by
from rlframe.core.types import Samples, Trajectory
from rlframe.record import metrics
from rlframe.record.metrics import check_own_name
from rlframe.runners.learner import Learner, Learners
from rlframe.samplers import Source

_NAME = "rlframe.runners.Callback"
HOOKS = ("on_start", "on_batch", "on_episode", "on_update", "on_evaluation", "on_log", "on_snapshot", "on_end")

_COMPARED = (Real, list, dict, set, deque, np.ndarray)

_logger = logging.getLogger("rlframe")


class Clock(Enum):
    """What a runner counts n_steps and log_interval_steps in."""

    ENV_STEPS = "env_steps"  # runners that step environments
    UPDATES = "updates"  # runners that learn from data alone


class Training(ABC):
    """What a runner trains, as callbacks see it."""

    clock = Clock.ENV_STEPS
    sampler: Source
    learners: Learners
    callbacks: Callbacks
    n_steps: int

    @property
    def learner(self) -> Learner:
        """The only learner. Raises ConfigError if there are several."""
        return self.learners.only

    @property
    def agent(self) -> Agent:
        """That of the only learner."""
        return self.learner.agent

    @property
    def algo(self) -> Algorithm:
        """That of the only learner."""
        return self.learner.algo

    @property
    def env_steps(self) -> int:
        """Valid rows trained on, over all ranks; of several learners, those of the one that has most."""
        return self.learners.env_steps

    @property
    def updates(self) -> int:
        """Gradient steps; of several learners, those of the one that has most."""
        return self.learners.updates

    @property
    def now(self) -> int:
        """The runner's clock, over all ranks."""
        return self.env_steps if self.clock is Clock.ENV_STEPS else self.updates


class Callback:
    """Base class of callbacks: override the hooks you need.

    With several ranks each rank has its own callbacks. An exception in a hook ends the run after a snapshot.
    """

    _runner: Training | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError for a method that is named like a hook and is none: it would never be called."""
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name.startswith("on_") and name not in HOOKS:
                hooks = f"{', '.join(HOOKS)}; begin no other name with on_{nearest(name, HOOKS)}"
                raise TypeError(f"{cls.__name__}.{name} is no hook: {hooks}")

    @property
    def runner(self) -> Training:
        """The runner that calls this callback, with its `agent`, `algo`, `sampler` and `env_steps`.

        Raises:
            RuntimeError: training has not started.
        """
        if self._runner is None:
            raise RuntimeError(f"{name_of(self)} is not training yet; its runner is available from on_start on")
        return self._runner

    @property
    def learner(self) -> str:
        """In `on_batch` and `on_update`, which of several learners, such as policies, they are about; else empty."""
        return self.runner.callbacks.learner

    def log(self, name: str, value: Tensor | float) -> None:
        """Log a metric: the row of the log has the mean of the interval's values.

        Or what its name ends in: _sum, _last, _min or _max. `rlframe.log` does the same from anywhere else. A value
        logged in `on_log` is in that row as it is, of rank 0, in place of what the interval had of this name. With
        several ranks the row has the values of rank 0, but for metrics named algo/..., which become one in the same
        way: the mean over ranks, or what the name ends in.

        Raises:
            ValueError: the name is not of the form group/name, or is a metric of rlframe, or value is not one number.
        """
        check_own_name(name)
        _ = self.runner  # training has started
        metrics.add({name: value})

    def stop(self, reason: str) -> None:
        """Ask the run to stop: it writes a snapshot, logs the reason and ends with status 0. It can be resumed.

        The run stops before the next batch, or between updates if a batch needs many.
        """
        callbacks = self.runner.callbacks
        callbacks.stop_reason = callbacks.stop_reason or f"{name_of(self)}: {reason}"

    def on_start(self, runner: Training) -> None:
        """Training starts, or continues after a resume; `state_dict` has been loaded."""

    def on_batch(self, samples: Samples) -> None:
        """An algorithm has received a batch, of several the one of `learner`.

        `samples` is valid until the next batch: copy what you keep. Its rewards are the sampler's, neither normalised
        nor with a bonus.

        Not called on learners without environments (learners=N with replay).
        """

    def on_episode(self, trajectory: Trajectory) -> None:
        """A training episode has ended; called after `on_batch` for each episode that ended in the batch."""

    def on_update(self, metrics: Mapping[str, Tensor | float]) -> None:
        """The algorithm made a gradient step on replay, or all steps on a batch, as in PPO; `metrics` has algo/..."""

    def on_evaluation(self, row: Mapping[str, float]) -> None:
        """An evaluation is complete; `row` has its eval/... metrics, over all ranks."""

    def on_log(self, row: Mapping[str, float]) -> None:
        """A row is about to be logged; `log` adds metrics to it."""

    def on_snapshot(self, env_steps: int) -> None:
        """A snapshot was written; the callback's state in it is the one before this call."""

    def on_end(self) -> None:
        """Training ends: it is complete, was stopped, or failed. No row follows: what it logs is in none."""

    def state_dict(self) -> dict[str, Any]:
        """State to save in snapshots, so that a resumed run goes on exactly: arrays and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; called before `on_start`."""


class Callbacks:
    """The callbacks of one runner. A hook that no callback overrides costs one dictionary lookup."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.all = tuple(callbacks)
        self.learner = ""  # that hooks are being called for; empty: the only one
        self.stop_reason = ""  # the first request to stop; empty: none
        self.lost: list[str] = []  # what the callbacks of a loaded state had and did not save, or do not load
        self._at_start: list[dict[str, Any]] = []  # the numbers of each callback as training began
        self._by_hook = {
            hook: [each for each in self.all if getattr(type(each), hook) is not getattr(Callback, hook)]
            for hook in HOOKS
        }

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of every callback that overrides it.

        Raises:
            PartError: a callback raised an exception.
        """
        for callback in self._by_hook[hook]:
            _call(callback, hook, *arguments)

    def call_of(self, learner: str, hook: str, *arguments: Any) -> None:
        """Call a hook about one of several learners, by name."""
        self.learner = learner
        self.call(hook, *arguments)
        self.learner = ""

    @contextmanager
    def running(self, runner: Training) -> Iterator[None]:
        """Call `on_start` before the training inside, and after it `on_end` of all that have started, also if it fails.

        Raises:
            PartError: a callback raised an exception, unless the training has failed already.
        """
        self.stop_reason, started = "", []
        for callback in self.all:
            object.__setattr__(callback, "_runner", runner)  # also of a frozen dataclass
        try:
            for callback in self.all:
                _call(callback, "on_start", runner)
                started.append(callback)
            self._at_start = [_contents(callback) for callback in self.all]
            yield
        except BaseException:
            _warn(_ended(started))
            raise
        if errors := _ended(started):
            _warn(errors[1:])
            raise errors[0]

    def state_dict(self) -> list[dict[str, Any]]:
        """The states by name; warns of a callback without one in which something changes."""
        found = []
        for callback, before in zip(self.all, self._at_start or map(_contents, self.all), strict=True):
            entry = {"name": name_of(callback), "state": _call(callback, "state_dict")}
            if entry["state"] and not _loads(callback):
                warn_once(f"callback {entry['name']} has no load_state_dict, and begins anew when the run is resumed")
            if unsaved := _unsaved(callback, before):
                warn_once(
                    f"callback {entry['name']} has no state_dict, and begins anew when the run is resumed: "
                    f"{', '.join(unsaved)} changed"
                )
                entry["unsaved"] = unsaved
            found.append(entry)
        return found

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raises:
        ValueError: the states were saved by other callbacks.    PartError: a callback raised an exception.
        """
        before, now = [each["name"] for each in saved], [name_of(callback) for callback in self.all]
        if before != now:
            raise ValueError(
                f"it was saved with callbacks=[{','.join(before)}], this run has [{','.join(now)}]; "
                f"one of rlframe.train takes the same as callbacks=, and one that a script composed continues there"
            )
        self.lost = [f"{each['name']}.{name}" for each in saved for name in each.get("unsaved", ())]
        for callback, each in zip(self.all, saved, strict=True):
            if each["state"] and not _loads(callback):
                self.lost.append(each["name"])
            _call(callback, "load_state_dict", each["state"])


def _loads(callback: Callback) -> bool:
    """Whether it has a load_state_dict."""
    return type(callback).load_state_dict is not Callback.load_state_dict


def _unsaved(callback: Callback, before: Mapping[str, Any]) -> list[str]:
    """What has changed in a callback without a state_dict since it had these contents."""
    if type(callback).state_dict is not Callback.state_dict:
        return []
    return [name for name, x in _contents(callback).items() if before.get(name, x) != x]


def _contents(callback: Callback) -> dict[str, Any]:
    """Its attributes that are numbers, and what its collections hold of them: what shows that it changes."""
    return {name: content(x) for name, x in vars(callback).items() if isinstance(x, _COMPARED)}


def name_of(callback: Callback) -> str:
    """module:Class."""
    return qualified_name(type(callback))


def _call(callback: Callback, hook: str, *arguments: Any) -> Any:
    try:
        return getattr(callback, hook)(*arguments)
    except (Exception, SystemExit) as error:
        raise PartError(f"callback {name_of(callback)} failed in {hook}: {describe(error)}") from error


def _ended(callbacks: Iterable[Callback]) -> list[BaseException]:
    """End all of them, also after a Ctrl-C in one; returns the errors of those that failed."""
    found: list[BaseException] = []
    for callback in callbacks:
        try:
            _call(callback, "on_end")
        except BaseException as error:
            found.append(error)
    return found


def _warn(errors: Iterable[BaseException]) -> None:
    for error in errors:
        _logger.warning("%s", describe(error))


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Callbacks from `module:Class` or `./file.py:Class`, made without arguments; one that was given is used itself.

    Raises:
        ConfigError: a module or class does not exist, or is no Callback.    PartError: it raised an exception.
    """
    found = [(name, find_attribute(name, "callbacks")) for name in names]
    return [x if isinstance(x, Callback) else made_by(name, "callbacks", Callback, _NAME) for name, x in found]


def check_callbacks(names: Sequence[str]) -> None:
    """Raise ConfigError as `load_callbacks`, without making one."""
    for name in names:
        if not isinstance(find_attribute(name, "callbacks"), Callback):
            find_maker(name, "callbacks", Callback, _NAME)
