"""Callbacks of tests, named on command lines as tests.runners.own_callbacks:Class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlframe.core.ranks import current_ranks
from rlframe.core.types import Samples, Trajectory
from rlframe.runners import Callback, Runner


class Recorder(Callback):
    """Writes down the name of every hook that is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_start(self, runner: Runner) -> None:
        assert runner is self.runner
        self.calls.append("start")

    def on_batch(self, samples: Samples) -> None:
        self.calls.append(f"batch of {int(samples.valid.sum())}")

    def on_episode(self, trajectory: Trajectory) -> None:
        self.calls.append(f"episode {trajectory.env}")

    def on_update(self, metrics: Mapping[str, Any]) -> None:
        assert "algo/entropy" in metrics
        self.calls.append("update")

    def on_evaluation(self, row: Mapping[str, float]) -> None:
        self.calls.append(f"evaluation of {row['eval/n_episodes']}")

    def on_log(self, row: Mapping[str, float]) -> None:
        self.calls.append(f"log at {row['env_steps']}")

    def on_snapshot(self, env_steps: int) -> None:
        self.calls.append(f"snapshot at {env_steps}")

    def on_end(self) -> None:
        self.calls.append("end")


class Counter(Callback):
    """Counts batches and updates over resumes, and logs them."""

    def __init__(self) -> None:
        self.n_batches = self.n_updates = 0

    def on_batch(self, samples: Samples) -> None:
        self.n_batches += 1
        self.log("counter/batch_mean", self.n_batches)

    def on_update(self, metrics: Mapping[str, Any]) -> None:
        self.n_updates += 1

    def on_log(self, row: Mapping[str, float]) -> None:
        self.log("counter/updates", self.n_updates)

    def state_dict(self) -> dict[str, Any]:
        return {"n_batches": self.n_batches, "n_updates": self.n_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.n_batches, self.n_updates = state["n_batches"], state["n_updates"]


class Stopper(Counter):
    """Stops the run at every second batch."""

    def on_batch(self, samples: Samples) -> None:
        super().on_batch(samples)
        if self.n_batches % 2 == 0:
            self.stop(f"{self.n_batches} batches")


class StopsRank1(Callback):
    """Stops the run at the first batch of rank 1."""

    def on_batch(self, samples: Samples) -> None:
        if current_ranks().rank == 1:
            self.stop("rank 1 has a batch")


class Failing(Callback):
    """Fails at the third update."""

    n = 0

    def on_update(self, metrics: Mapping[str, Any]) -> None:
        self.n += 1
        if self.n == 3:
            raise ValueError("three is too many")


class NotACallback:
    """Not a subclass of Callback."""
