"""Schedules of an algorithm's Config, resolved in one place: `now`, the config with numbers for the newest batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import chz
import torch
from torch import Tensor

from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import idle_fields
from rlframe.core.schedule import Curve, Schedule, curve
from rlframe.core.struct import fill
from rlframe.updates.progress import Progress

_logger = logging.getLogger("rlframe")


class Schedules:
    """What the scheduled fields of a Config are at `progress.scheduled`, which they follow.

    `now` has the fields of the config. Without schedules it is the config itself. Scheduled fields are floats on a CPU;
    on a GPU tensors [] that are changed in place, so that CUDA graphs read them.
    """

    def __init__(self, config: Any, n_steps: float, progress: Progress, device: torch.device | str = "cpu") -> None:
        """Args:
        config: a chz class, or any object with attributes.    n_steps: env_steps of the run.
        device: where losses are computed.
        """
        names = list(chz.chz_fields(config)) if chz.is_chz(config) else list(vars(config))
        fields = {name: getattr(config, name) for name in names}
        self.config, self.n_steps, self.progress, self.device = config, n_steps, progress, torch.device(device)
        idle = idle_fields(config)
        given = {name: x.over(n_steps) for name, x in fields.items() if isinstance(x, Schedule)}
        self.curves = {name: each for name, each in given.items() if name not in idle}
        fields |= {name: each(0) for name, each in given.items() if name in idle}  # losses may read it all the same
        self.now: Any = config
        self.compiles = True  # no function of these numbers has failed to compile
        self._places: dict[str, Tensor] = {}  # of a GPU
        self._recorded: dict[str, Tensor] = {}  # of a CPU, where compiled updates read them
        if given:
            self.now = SimpleNamespace(**fields)
        if self.curves:
            progress.followers.append(self.follow)
            if self.device.type == "cuda":
                self.place(device)
            self.follow(progress.scheduled)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which `now` has tensors, for code that is recorded; on a CPU too they follow the schedules."""
        numbers = {name: vars(self.now)[name] for name in self.curves}
        if self.curves and not self._places:
            self._recorded = self._recorded or {name: torch.full((), float(x)) for name, x in numbers.items()}
            vars(self.now).update(self._recorded)
        try:
            yield
        finally:
            if self.curves:
                vars(self.now).update(numbers)

    def place(self, device: torch.device | str) -> None:
        """Hold the scheduled numbers in tensors on `device`, for code that is recorded there."""
        self._places = {name: torch.zeros((), device=device) for name in self.curves}
        vars(self.now).update(self._places)
        self.follow(self.progress.scheduled)

    def follow(self, env_steps: int) -> None:
        """Set `now` to the numbers at `env_steps`."""
        for name, value in self.at(env_steps).items():
            if name in self._places:
                fill(self._places[name], value)
            else:
                setattr(self.now, name, value)
            if name in self._recorded:
                fill(self._recorded[name], value)

    def at(self, env_steps: int) -> dict[str, float]:
        """The numbers of the scheduled fields."""
        return {name: each(env_steps) for name, each in self.curves.items()}

    def check(self, n_steps: int) -> None:
        """Warn if a run is longer or shorter than these schedules."""
        if self.curves and self.n_steps != n_steps:
            names, end = ", ".join(self.curves), f"{self.n_steps:,.0f} env_steps, and the run has {n_steps:,}"
            _logger.warning(f"schedules of {names} go over {end}: make the algorithm with n_steps={n_steps}")

    def of(self, name: str) -> Curve:
        """A field of the config by env_steps, constant if it has no schedule. Raises ConfigError if it has none."""
        if not hasattr(self.config, name):
            kind = type(self.config).__name__
            raise ConfigError(
                f"{kind} has no field {name}, which its algorithm reads; add {name}: Scheduled = scheduled(...)"
            )
        return curve(getattr(self.config, name), self.n_steps)

    def metrics(self) -> dict[str, float]:
        """The scheduled fields for the log."""
        return {f"algo/{name}": value for name, value in self.at(self.progress.scheduled).items()}
