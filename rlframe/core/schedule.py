"""Schedules: numbers that change linearly with env_steps, such as exploration rates and learning rates.

Algorithms call a schedule with `env_steps` counted over all ranks, so it does not depend on `world_size`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """Linear interpolation from `initial` to `final` over the first `n_steps` env_steps, constant afterwards.

    value(s) = initial + min(max(s / n_steps, 0), 1) * (final - initial)

    Raises ValueError if n_steps <= 0.
    """

    initial: float
    final: float
    n_steps: float  # env_steps over all ranks, > 0

    def __post_init__(self) -> None:
        if self.n_steps <= 0:
            raise ValueError(f"n_steps={self.n_steps} of a schedule must be > 0 env_steps; use a longer run")

    def __call__(self, env_steps: int) -> float:
        """The value at `env_steps`; `initial` before step 0."""
        fraction = min(max(env_steps / self.n_steps, 0.0), 1.0)
        return self.initial + fraction * (self.final - self.initial)


def annealed(kind: str, initial: float, n_steps: float) -> Linear:
    """The schedule of a config field `schedule`.

    Args:
        kind: `constant`, always `initial`; or `linear`, from `initial` to 0 at `n_steps`.
        n_steps: env_steps over all ranks, usually the length of the run.
    """
    if kind not in ("constant", "linear"):
        raise ValueError(f"schedule={kind!r} is unknown; use constant or linear")
    return Linear(initial, initial if kind == "constant" else 0.0, n_steps)
