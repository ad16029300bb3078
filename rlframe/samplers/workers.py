"""What samplers with worker processes have in common: how many, on which CPUs, and what happens when they die."""

from __future__ import annotations

from collections.abc import Sequence

import chz

from rlframe.core.config import AUTO, choice, count, count_or_auto, option
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs import EnvConfig
from rlframe.envs.workers import EnvWorkers, Supervision
from rlframe.samplers.base import SamplerConfig
from rlframe.system.process import START_METHODS


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

    def make_envs(self, env: EnvConfig, seed: int, cpus: Sequence[Sequence[int]]) -> EnvWorkers:
        seeds = env_seeds(seed, Role.ENV, self.batch_B)
        n_workers = len(cpus) if self.n_workers == AUTO else self.n_workers
        return EnvWorkers(env, self.batch_B, seeds, n_workers, cpus, self.supervision(), self.preload())

    def preload(self) -> tuple[str, ...]:
        """What the workers need beside their environments."""
        return ()


def check_workers(envs: object, sampler: str) -> None:
    """Raises:
    TypeError: `envs` are not in worker processes.
    """
    if not isinstance(envs, EnvWorkers):
        raise TypeError(f"{sampler} needs environments in worker processes: give it EnvWorkers(...)")
