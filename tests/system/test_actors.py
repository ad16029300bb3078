"""Actors: which errors of Ray are deaths, after which another actor starts."""

from __future__ import annotations

from typing import Any

import pytest

from rlframe.system.actors import Actors
from rlframe.system.service import RestartBudget


class Numbers(Actors):
    def launch(self, i: int) -> Any:
        return i


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray")
@pytest.mark.parametrize("name", ["ActorDiedError", "ActorUnavailableError", "OutOfMemoryError", "NodeDiedError"])
def test_actors_that_died_were_killed_for_memory_or_lost_their_node_are_replaced(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    ray = pytest.importorskip("ray")
    actors = Numbers("sampler=ray", RestartBudget(2, "sampler.max_restarts", "actors", "a batch"), "restarted")
    actors.start(2)
    error = getattr(ray.exceptions, name)
    assert issubclass(error, actors.deaths)
    actors.replace(1, error.__new__(error))
    assert f"actor 1 of sampler=ray: {name}; restarted (restart 1)" in caplog.text
