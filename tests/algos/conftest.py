"""Fixtures of the algorithms' tests."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from rlframe.updates import compiled


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs as they are recorded, run by torch and not by what a compiler makes of them."""
    graphs: list[Any] = []

    def run(graph: Any, examples: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return lambda *tensors: graph(*tensors)

    monkeypatch.setattr(compiled, "_import_compiler", lambda: None)
    monkeypatch.setattr(compiled, "_compile", run)
    return graphs


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings of rlframe so far."""
    caplog.set_level(logging.INFO, "rlframe")
    return lambda: [x.message for x in caplog.records if x.levelno == logging.WARNING and x.name == "rlframe"]
