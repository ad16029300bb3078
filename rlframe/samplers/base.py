"""What a sampler is: it fills one [T, B] batch after another by stepping environments with an agent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from rlframe.agents import Agent
from rlframe.core.types import BatchSpec, Samples, Trajectory


class Sampler(ABC):
    """Owns its environments. `Samples` are allocated once and overwritten: valid until the next `collect`."""

    batch_spec: BatchSpec
    backend: str  # what steps the environments, for the log

    @abstractmethod
    def collect(self) -> Samples:
        """Step every environment T times with the agent as it was at the last `refresh`.

        Raises:
            EnvError: an environment failed.
        """

    @abstractmethod
    def trajectories(self) -> list[Trajectory]:
        """The episodes that ended since the last call."""

    @abstractmethod
    def refresh(self, agent: Agent) -> None:
        """Act with these parameters from now on."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Noise generators. Environments are not in it: after a resume their episodes start anew."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments. May be called twice."""
