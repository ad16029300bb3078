"""Exploration of your own: a subclass of QExploration or ActionNoise, such as ./mine.py:Chaos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chz

from rlframe.core.config import option
from rlframe.core.errors import ConfigError, naming, shortened
from rlframe.core.parts import find_attribute
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.exploration.base import HIGHEST, ActionNoise, ExploreConfig, QExploration, last


@chz.chz
class Config(ExploreConfig):
    """Written algo.explore=module:Class for short."""

    name: str = option("", "module:Class or ./file.py:Class, a subclass of QExploration or ActionNoise")
    kwargs: Mapping[str, Any] = chz.field(default_factory=dict, doc="of the class: algo.explore.kwargs.name=value")
    level: Scheduled = scheduled(1.0, "rate or scale, which its level_of returns", high=HIGHEST)
    level_last: Scheduled = last("level", high=HIGHEST)

    @chz.validate
    def _check(self) -> None:
        if self.name:
            self.load()

    def load(self) -> type[QExploration] | type[ActionNoise]:
        """The class.

        Raises:
            ConfigError: there is none of this name, or it is no exploration.
        """
        key = f"algo.explore={self.name or 'own'}"
        if not self.name:
            raise ConfigError(f"{key} needs algo.explore.name=module:Class")
        cls = find_attribute(self.name, "algo.explore")
        if not (isinstance(cls, type) and issubclass(cls, QExploration | ActionNoise)):
            raise ConfigError(f"{key} is no subclass of rlframe.exploration.QExploration or ActionNoise")
        return cls

    def make_q(self, n_actions: int, masked: bool) -> QExploration:
        made: QExploration = self._made(QExploration, "Q-values", n_actions, masked)
        return made

    def make_noise(self, size: int) -> ActionNoise:
        made: ActionNoise = self._made(ActionNoise, "actions of numbers", size)
        return made

    def _made(self, base: type, of: str, *arguments: Any) -> Any:
        cls: Any = self.load()
        if not issubclass(cls, base):
            raise ConfigError(f"algo.explore={self.name}: for {of} it must be a subclass of {base.__name__}")
        with naming(f"algo.explore={self.name} cannot be made"):
            try:
                return cls(*arguments, graded=self.graded, **self.kwargs)
            except TypeError as error:
                hint = "its arguments are algo.explore.kwargs.name=value"
                raise ConfigError(f"algo.explore={self.name}: {shortened(str(error))}; {hint}") from None

    def levels(self) -> tuple[Scheduled, Scheduled]:
        return self.level, self.level_last
