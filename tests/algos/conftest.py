"""Fixtures of the algorithms' tests."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from rlframe.algos import compiled


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
