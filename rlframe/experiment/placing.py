"""Where the agent of a run is, and how its updates are compiled: by itself, or with other runs of its process."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rlframe.agents import Agent
from rlframe.algos.compiled import CompileChoice


class Placing(ABC):
    """What `build` asks where runs may share memory and updates."""

    n_runs: int  # that share them

    @abstractmethod
    def place(self, agent: Agent) -> None:
        """Move the parameters of an agent, before anything has views of them."""

    @abstractmethod
    def compiled(self, choice: CompileChoice) -> CompileChoice:
        """How updates are compiled, given whether that is worth its time."""


class Alone(Placing):
    """Of a run that shares nothing."""

    n_runs = 1

    def place(self, agent: Agent) -> None:
        pass

    def compiled(self, choice: CompileChoice) -> CompileChoice:
        return choice


ALONE = Alone()
