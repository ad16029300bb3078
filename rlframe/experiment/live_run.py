"""LiveRun: a run in a script or notebook, trained one row of its log at a time; made by rlframe.build and restore."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from contextvars import copy_context
from pathlib import Path
from typing import Any, Self

import numpy as np

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.core.errors import ConfigError
from rlframe.core.files import disk_error, read_json
from rlframe.evaluation.policy import Policy
from rlframe.evaluation.team_policy import TeamPolicy, policy_of
from rlframe.experiment.build import Built
from rlframe.record.context import logger_context
from rlframe.record.directory import check_config, write_params
from rlframe.record.snapshot import save_snapshot
from rlframe.runners import Runner
from rlframe.samplers import Source

_logger = logging.getLogger("rlframe")


class LiveRun:
    """A context manager: it closes its environments and its record at its end, or at `close`.

    run = rlframe.build("sac", "Pendulum-v1", n_steps=20_000)
    for row in run:  # trains up to the next row of the log
        if row.get("eval/return_mean", -1e9) > -200:
            break
    run.save("pendulum")
    """

    def __init__(
        self, built: Built, config: Mapping[str, Any], record: Mapping[str, Any] | None, opened: ExitStack
    ) -> None:
        """Args:
        config: of the run, flat.    record: arguments of logger_context; None: nothing is recorded.
        opened: what is to be closed after the run, on which it puts its own.
        """
        self.config, self._built = dict(config), built
        self._table: list[dict[str, float]] = []
        self._trained_s = 0.0  # the time between rows is not counted
        # Everything happens in one context of contextvars, since cells of a notebook may have one each.
        self._context, self._opened = copy_context(), opened
        self._close = weakref.finalize(self, self._context.run, self._opened.close)  # also when Python exits
        self._opened.push(built)
        if record is not None:
            self._within(self._opened.enter_context, logger_context(config=config, **record))
        self._rows = rows = [built.runner.rows()]  # a place for one, in which an error puts the next
        self._opened.callback(lambda: rows[0].close())  # without self, which could not be collected

    def _within(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._context.run(self._built.learning_call, function, *arguments)

    @property
    def runner(self) -> Runner:
        return self._built.runner

    @property
    def agent(self) -> Agent:
        """The agent of the run; a Team of those of several policies."""
        return self.runner.learners.acting()[0]

    @property
    def algo(self) -> Algorithm:
        return self.runner.algo

    @property
    def sampler(self) -> Source:
        return self.runner.sampler

    @property
    def policy(self) -> Policy | TeamPolicy:
        """Acts with the agent as it is: `run.policy.act(observation)`; of several policies, all (see load_policy)."""
        return policy_of(self.agent, self._built.spaces, self._built.env)

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """Every metric of the rows so far, [n_rows], NaN in rows that do not have it."""
        names = dict.fromkeys(name for row in self._table for name in row)
        return {name: np.array([row.get(name, np.nan) for row in self._table]) for name in names}

    def frame(self) -> Any:
        """`metrics` as a pandas DataFrame.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            from pandas import DataFrame  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError:
            raise ConfigError("frame() needs pandas: pip install pandas") from None
        return DataFrame(self.metrics)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, float]:
        """Train up to the next row of the log, and return it.

        Raises:
            StopIteration: the training has come to its end.    ConfigError: the run is closed.
            Otherwise see `Runner.train`; the next call goes on from there.
        """
        if not self._close.alive:
            raise ConfigError("this run is closed; save it before, and continue with rlframe.restore")
        start = time.monotonic()
        try:
            with self.runner.stop_request(self._trained_s) as self.runner.stop:
                row: dict[str, float] = self._within(next, self._rows[0])
        except StopIteration:
            raise
        except BaseException:
            self._rows[0] = self.runner.rows()
            raise
        finally:
            self._trained_s += time.monotonic() - start
        self._table.append(row)
        return row

    def train(self) -> dict[str, float]:
        """Train to the end; returns the last row of the log."""
        for _ in self:
            pass
        return self._table[-1] if self._table else {}

    def evaluate(self) -> dict[str, float]:
        """The metrics of an evaluation of the agent as it is; not logged.

        Raises:
            ConfigError: the run has no evaluator.
        """
        evaluator = self.runner.evaluator
        if evaluator is None:
            raise ConfigError("this run has no evaluator: use runner=minibatch_rl_eval and eval.n_episodes above 0")
        return self._within(evaluator.evaluate_now, self.runner.env_steps)

    def load(self, state: Mapping[str, Any], source: str) -> None:
        """Continue from a saved state, before the first row; `source`: where it is, for the log."""
        self._within(_logger.info, f"restored from {source}")
        self._within(self.runner.resume, state)

    def save(self, path: str | Path) -> Path:
        """Write the complete state into `path`, for `rlframe.restore`, `load_policy` and the commands.

        A directory with earlier states of the same run gets one more.

        Raises:
            ConfigError: it holds something else.    RecordError: a disk error.
        """
        directory = Path(path).expanduser()
        params = directory / "params.json"
        if params.is_file() and read_json(params).get("config") != self.config:
            raise ConfigError(f"{directory} is another run's; save into another directory")
        if not params.is_file() and directory.exists() and any(directory.iterdir()):
            raise ConfigError(f"{directory} is not empty, and holds no run; save into another directory")
        check_config(self.config)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not params.is_file():
                write_params(params, self.config)
        except OSError as error:
            raise disk_error("a run", directory, error) from error
        runner = self.runner
        facts = {"env_steps": runner.env_steps, "updates": runner.updates, "score": None}
        return save_snapshot(directory / "snapshot", self._within(runner.state_dict), facts)

    def close(self) -> None:
        """Close the environments, and the record after a last snapshot. May be called twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
