"""The process of evaluation is killed while it evaluates."""

from __future__ import annotations

import os
import signal

import pytest

from rlframe.evaluation.process import EvaluationService


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
