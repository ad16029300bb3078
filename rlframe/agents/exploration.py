"""Exploration schedules: how random an agent acts as training goes on."""

from __future__ import annotations

from rlframe.agents import QAgent
from rlframe.core.ranks import current_ranks
from rlframe.core.schedule import Linear


class EpsilonSchedule:
    """Sets an agent's epsilon: from `initial` linearly over `n_steps`, to `final` of the first environment, to `last`
    of the last one (0: to `final` as well)."""

    def __init__(self, initial: float, final: float, last: float, n_steps: float, n_envs: int) -> None:
        """`n_envs`: of this rank; the last environment is that of all ranks."""
        self.first = Linear(initial, final, max(n_steps, 1))
        self.last = Linear(initial, last or final, max(n_steps, 1))
        self.n_envs = n_envs * current_ranks().world_size

    def apply(self, agent: QAgent, env_steps: int) -> None:
        """Explore as after `env_steps`."""
        agent.set_epsilon(self.first(env_steps), self.last(env_steps), self.n_envs)
