"""The process of evaluation is killed while it evaluates, or the training is stopped meanwhile."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from rlframe.evaluation.process import EvaluationService, EvaluatorProcess


def kill_evaluations(n: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on, kill the process in its next `n` evaluations; returns a list to which their numbers are added."""
    killed: list[int] = []
    begin = EvaluationService._begin

    def begin_and_kill(self: EvaluationService) -> None:
        kills = len(killed) < n
        if kills:  # it is stopped first, as on a busy machine it would have its result before it is killed
            os.kill(self.child.pid, signal.SIGSTOP)
        begin(self)
        if kills:
            killed.append(self.number)
            os.kill(self.child.pid, signal.SIGKILL)

    monkeypatch.setattr(EvaluationService, "_begin", begin_and_kill)
    return killed


def stop_while_evaluating(patch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM to this process once it waits for an evaluation, at the end of a training."""

    def stopped(evaluator: EvaluatorProcess, wait: bool, stop: Any = None) -> list[Any]:
        if evaluator.busy:
            os.kill(os.getpid(), signal.SIGTERM)
        return []

    patch.setattr(EvaluatorProcess, "finished", stopped)
