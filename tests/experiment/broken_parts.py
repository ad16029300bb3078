"""Parts of a user's own that fail, named as tests.experiment.broken_parts:Class."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from rlframe.core.types import Samples
from rlframe.distributions.gaussian import TanhGaussian
from rlframe.exploration.q import Epsilon
from rlframe.record import Logger
from rlframe.rollout import EpisodeStatistic
from rlframe.runners import Callback

CALLED: list[Any] = []  # arguments of the calls that must not happen


def fail(*arguments: Any, **named: Any) -> Any:
    raise ZeroDivisionError("by my part")


def leave(*arguments: Any, **named: Any) -> Any:
    sys.exit(3)


class NoPart:
    """No part of any kind."""

    def __init__(self, *arguments: Any) -> None:
        CALLED.append(arguments)


class MadeCallback(Callback):
    __init__ = fail


class SavedCallback(Callback):
    state_dict = fail


class LoadedCallback(Callback):
    load_state_dict = fail


class LogsText(Callback):
    def on_batch(self, samples: Samples) -> None:
        self.log("a/b", "text")  # type: ignore[arg-type]


class LogsArray(Callback):
    def on_batch(self, samples: Samples) -> None:
        self.log("a/b_last", np.zeros(3))  # type: ignore[arg-type]


class SetCallback(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"a": {1}}


class LeavingCallback(Callback):
    __init__ = leave


class LeavesAtStart(Callback):
    on_start = leave


class LeavesAtEnd(Callback):
    on_end = leave


class LongName(Callback):
    def on_batch(self, samples: Samples) -> None:
        self.log("a/" + "b" * 101, 1.0)


class Statistic(EpisodeStatistic):
    def add(self, observation: Any, action: Any, reward: np.ndarray) -> None: ...

    def result(self) -> dict[str, float]:
        return {"mine": 1.0}


class MadeStatistic(Statistic):
    __init__ = fail


class AddedStatistic(Statistic):
    add = fail


class ResultStatistic(Statistic):
    result = fail


class TextStatistic(Statistic):
    def result(self) -> dict[str, float]:
        return {"mine": "text"}  # type: ignore[dict-item]


class SavedStatistic(Statistic):
    state_dict = fail


class OwnLogger(Logger):
    def write(self, row: Mapping[str, float]) -> None: ...
    def truncate_after(self, env_steps: int) -> None: ...
    def close(self) -> None: ...


class MadeLogger(OwnLogger):
    __init__ = fail


class WrittenLogger(OwnLogger):
    write = fail


class CheckedLogger(OwnLogger):
    check = fail


class LeavingLogger(OwnLogger):
    close = leave


class TrimmedLogger(OwnLogger):
    truncate_after = fail


class ClosedLogger(OwnLogger):
    close = fail


class MadeEncoder(nn.Module):
    __init__ = fail


class AppliedEncoder(nn.Module):
    def __init__(self, space: Any) -> None:
        super().__init__()

    forward = fail


class SteppedOptimizer(torch.optim.SGD):
    step = fail


class SavedOptimizer(torch.optim.SGD):
    state_dict = fail


class MadeOptimizer(torch.optim.SGD):
    __init__ = fail


class MadeExploration(Epsilon):
    __init__ = fail


class MadeDistribution(TanhGaussian):
    __init__ = fail
