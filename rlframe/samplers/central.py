"""What samplers have in common whose agent acts in this process, wherever its environments step."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlframe.agents import Agent
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs import Envs, EnvWorkers
from rlframe.samplers.base import NOT_SAVED, Sampler, load_noise, noise_state
from rlframe.samplers.collector import Collector


class CentralSampler(Sampler, ABC):
    """Shares the agent with the learner, so its data always come from the newest parameters."""

    def __init__(
        self, envs: Envs | EnvWorkers, collector: Collector, rngs: Sequence[np.random.Generator], backend: str
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
        of_workers = self.envs.counters() if isinstance(self.envs, EnvWorkers) else {}
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
