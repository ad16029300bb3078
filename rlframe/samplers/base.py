"""What a sampler is: it fills one [T, B] batch after another by stepping environments with an agent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import chz
import numpy as np

from rlframe.agents import Agent
from rlframe.core.config import count
from rlframe.core.errors import ConfigError
from rlframe.core.types import BatchSpec, Samples, Trajectory

NOT_SAVED = "the snapshot holds no environments"  # a reason why episodes begin anew


class Sampler(ABC):
    """Owns its environments. `Samples` are allocated once and overwritten: valid until the next `collect`.

    One seed gives one history, the same array for array in every sampler, however environments are split.
    """

    batch_spec: BatchSpec
    backend: str  # what steps the environments, for the log

    @abstractmethod
    def collect(self) -> Samples:
        """Step every environment T times with the agent as it was at the last `refresh`.

        Raises:
            EnvError: an environment failed.    WorkersFailed: worker processes died too often.
        """

    @abstractmethod
    def trajectories(self) -> list[Trajectory]:
        """The episodes that ended since the last call, by the time of their end, then by environment."""

    @abstractmethod
    def refresh(self, agent: Agent) -> None:
        """Act with these parameters from now on."""

    def counters(self) -> dict[str, float]:
        """Metrics of the sampler itself, `sampler/<name>`, since its start; none where there is nothing to count."""
        return {}

    @abstractmethod
    def tell_life(self, life: np.ndarray) -> None:
        """From now on, change `life[0]` while steps are made: for who watches a sampler in a process of its own."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that decides the next batches beside the agent: noise generators, environments, running episodes.

        After a batch that was broken off, noise generators alone: episodes will begin anew.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Go on from a saved state, of this sampler or another of as many environments, before the first `collect`.

        Returns:
            Why the episode of an environment has to begin anew, of each; empty where it goes on.
        Raises:
            EnvError: an environment could not be reset.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the environments. May be called twice."""


@chz.chz
class SamplerConfig:
    """Sizes of a batch: what every sampler's Config has."""

    batch_T: int = count(128, "time steps a batch, of each environment")
    batch_B: int = count(8, "environments")
    decorrelation_steps: int = count(0, "random steps first, so that episodes of varying length do not begin together")

    @chz.validate
    def _check_sizes(self) -> None:
        if self.batch_T < 1 or self.batch_B < 1 or self.decorrelation_steps < 0:
            raise ConfigError(
                f"sampler.batch_T={self.batch_T} and sampler.batch_B={self.batch_B} must be at least 1, "
                f"sampler.decorrelation_steps={self.decorrelation_steps} at least 0"
            )


def noise_state(rngs: Sequence[np.random.Generator]) -> list[Any]:
    """The states of noise generators."""
    return [rng.bit_generator.state for rng in rngs]


def load_noise(rngs: Sequence[np.random.Generator], states: Sequence[Any]) -> None:
    """Set noise generators to saved states."""
    for rng, saved in zip(rngs, states, strict=True):
        rng.bit_generator.state = saved
