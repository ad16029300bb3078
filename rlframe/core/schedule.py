"""Values that change with env_steps, counted over all ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """From `initial` to `final` over `n_steps` env_steps, constant after; constant throughout if the two are equal."""

    initial: float
    final: float
    n_steps: float  # env_steps

    def __post_init__(self) -> None:
        if self.n_steps <= 0:
            raise ValueError(f"a schedule needs n_steps > 0, got {self.n_steps}")

    def __call__(self, env_steps: int) -> float:
        fraction = min(max(env_steps / self.n_steps, 0.0), 1.0)
        return self.initial + fraction * (self.final - self.initial)


def annealed(kind: str, initial: float, n_steps: float) -> Linear:
    """The schedule a config names: `constant`, or `linear` to zero at `n_steps`.

    Raises:
        ValueError: another name.
    """
    if kind not in ("constant", "linear"):
        raise ValueError(f"schedule={kind!r} is unknown; use constant or linear")
    return Linear(initial, initial if kind == "constant" else 0.0, n_steps)
