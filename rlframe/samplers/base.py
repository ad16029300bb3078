"""What a sampler is: it fills [T, B] batches by stepping environments with an agent; and what samplers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import chz
import numpy as np

from rlframe.agents import Agent
from rlframe.core.config import AUTO, choice, count, count_or_auto, option
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, env_seeds
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs import EnvConfig, Envs
from rlframe.rollout.collector import Collector
from rlframe.rollout.env_pool import EnvPool, Supervision
from rlframe.rollout.inference import load_noise, noise_state
from rlframe.system.process import START_METHODS

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


class CentralSampler(Sampler, ABC):
    """Shares the agent with the learner, so its data always come from the newest parameters."""

    def __init__(
        self, envs: Envs | EnvPool, collector: Collector, rngs: Sequence[np.random.Generator], backend: str
    ) -> None:
        self.envs, self.collector, self.rngs, self.backend = envs, collector, rngs, backend
        self.batch_spec = BatchSpec(collector.batch.rows.T, envs.n)

    def collect(self) -> Samples:
        return self.collector.collect()

    def trajectories(self) -> list[Trajectory]:
        return self.collector.tracker.pop()

    def refresh(self, agent: Agent) -> None:
        """Nothing to do: the agent is shared."""

    def counters(self) -> dict[str, float]:
        of_workers = self.envs.counters() if isinstance(self.envs, EnvPool) else {}
        return {**of_workers, **self.collector.bounds.counters()}

    def tell_life(self, life: np.ndarray) -> None:
        for stepper in self.collector.steppers:
            stepper.tell_life(life)

    def state_dict(self) -> dict[str, Any]:
        return {"noise": noise_state(self.rngs), **(self.collector.state() if self.collector.whole else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        load_noise(self.rngs, state["noise"])
        return self.collector.resume(state) if "envs" in state else [NOT_SAVED] * self.envs.n

    def close(self) -> None:
        self.envs.close()


@chz.chz
class WorkersConfig(SamplerConfig):
    """The fields of samplers whose environments live in worker processes."""

    n_workers: int = count_or_auto("worker processes, or auto: one a core, at most one an environment")
    timeout_s: float = option(60.0, "seconds without a finished step, after which a worker is killed and replaced")
    max_restarts: int = count(100, "workers replaced within an hour, beyond which the run ends")
    start_method: str = choice("forkserver", START_METHODS, "how worker processes start")

    @chz.validate
    def _check_workers(self) -> None:
        if self.n_workers != AUTO and not 1 <= self.n_workers <= self.batch_B:
            raise ConfigError(
                f"sampler.n_workers={self.n_workers} must be from 1 to sampler.batch_B={self.batch_B}, or auto"
            )
        self.supervision()

    def supervision(self) -> Supervision:
        """What happens to workers that die or hang."""
        return Supervision(self.timeout_s, self.max_restarts, self.start_method)

    def make_envs(self, env: EnvConfig, seed: int, cpus: Sequence[Sequence[int]]) -> EnvPool:
        seeds = env_seeds(seed, Role.ENV, self.batch_B)
        n_workers = len(cpus) if self.n_workers == AUTO else self.n_workers
        return EnvPool(env, self.batch_B, seeds, n_workers, cpus, self.supervision(), self.preload())

    def preload(self) -> tuple[str, ...]:
        """What the workers need beside their environments."""
        return ()


def check_workers(envs: object, sampler: str) -> None:
    """Raises:
    TypeError: `envs` are not in worker processes.
    """
    if not isinstance(envs, EnvPool):
        raise TypeError(f"{sampler} needs environments in worker processes: give it EnvPool(...)")
