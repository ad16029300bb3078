"""Interface of algorithms: every runner calls `receive`, `updates_due` and `update`."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import chz
import torch
from torch import Tensor

from rlframe.agents import Agent
from rlframe.algos.saved import UnsavedState, check_saved, load_states, states_of
from rlframe.core.arguments import checked
from rlframe.core.errors import qualified_name, warn_once
from rlframe.core.objects import is_own
from rlframe.core.schedule import Scheduled
from rlframe.core.struct import Tree, map_tree
from rlframe.core.types import Samples
from rlframe.updates.optimizer_step import OptimizerStep
from rlframe.updates.progress import Progress

_UNSAVED = "(unsaved)"  # the key of what a state lacks, as far as it is known

UpdateMetrics = Mapping[str, Tensor | float]  # by name, without the group "algo/"; tensors become floats at the log


def observed(samples: Samples) -> Tree:
    """The observations of a batch for running statistics: [T, B], or without absent rows [n].

    Batches of a device are not looked at, and keep all rows. What precedes row 0 is not known: where nobody acted there
    it counts as the last observation of an episode if another begins, but not of several agents, one of which may come.
    """
    if samples.n_rows == samples.valid.numel() or not samples.valid.is_cpu:
        return samples.observation
    first, whole = samples.inputs.first, samples.n_valid < 0  # whether a column is an environment
    last = first[1:2] & ~first[:1] if whole else torch.zeros_like(samples.valid[:1])  # of an episode, in row 0
    present = samples.valid | torch.cat([last, (samples.terminated | samples.truncated)[:-1]])
    return samples.observation if present.all() else map_tree(lambda x: x[present], samples.observation)


class Algorithm(ABC):
    """Learns from batches. Updates the agent's parameters in place; owns target networks and critics."""

    progress: Progress
    config: Any = None  # its Config, to be recorded
    without_loss: tuple[str, ...] = ()  # parts of the agent that rlframe makes and no loss uses, such as model.critic
    origin: str = ""  # what it began with, of another run
    saved: Sequence[str]  # names of the attributes with state, besides the agent: parts, generators, tensors, numbers

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """The constructors of rlframe's algorithms tell of parts in the wrong places.

        Raises:
            TypeError: see `check_saved`.
        """
        super().__init_subclass__(**kwargs)
        check_saved(cls)
        if "__init__" in vars(cls) and not is_own(cls):
            cls.__init__ = checked(cls.__init__)

    def __setattr__(self, name: str, x: Any) -> None:
        """Raises AttributeError for a field of the config once a learner has the algorithm: nobody would read it."""
        if name in vars(self).get("_unread", ()):
            raise AttributeError(
                f"{type(self).__name__}.{name} is of the config, which nothing reads while a run trains; save the run, "
                f'and go on by rlframe.restore(path, **{{"algo.{name}": ...}})'
            )
        super().__setattr__(name, x)

    @property
    def learning_rate(self) -> float:
        """Of the policy or Q-function now. Set, to a number or a schedule, it stays so, also in snapshots.

        So does every part with the same key, such as the temperature. Those with a key of their own, such as
        `critic_optimizer`, are OptimizerSteps too: `keep_rate` sets each of them.
        """
        return float(vars(self)["optimizer"].rate)

    @learning_rate.setter
    def learning_rate(self, rate: Scheduled) -> None:
        parts = vars(self)
        key = parts["optimizer"].rate_key
        for part in list(parts.values()):
            if getattr(part, "rate_key", "") == key:
                part.keep_rate(rate)

    @abstractmethod
    def receive(self, samples: Samples) -> None:
        """Receive a batch; it is the sampler's memory, valid until its next `collect`."""

    @abstractmethod
    def updates_due(self) -> int:
        """How many calls of `update` are due.

        Batches may be received while several are due, so an algorithm that learns from the batch itself, not from
        replay, makes all its gradient steps in one call.
        """

    def can_receive(self) -> bool:
        """Whether it may receive another batch now: none that it has yet to learn from would be lost."""
        return True

    def n_rows(self) -> int:
        """The rows that it could learn from without another batch: those of its replay; 0 without one."""
        return 0

    def observe_data(self) -> None:  # noqa: B027
        """Update the agent's running statistics by rows of replay that were never received: those of a dataset."""

    def check_run(self, n_steps: int) -> None:  # noqa: B027
        """Raise ConfigError if nothing would be learned in a run of so many env_steps."""

    def check_schedules(self, n_steps: int) -> None:
        """Warn if its schedules end before a run of so many env_steps."""
        if (schedules := vars(self).get("schedules")) is not None:
            schedules.check(n_steps)

    def learns(self, agent: Agent) -> bool:
        """Whether it trains this agent, as far as it says."""
        return vars(self).get("agent", agent) is agent

    def updates_in(self, n_steps: int, batch_size: int) -> int:
        """Gradient steps of a run of so many env_steps, in batches of so many; 0 if that is not known."""
        return 0

    def rows_of_step(self, batch_size: int) -> int:
        """Rows that a gradient step learns from, given those of a batch."""
        return batch_size

    @abstractmethod
    def update(self) -> UpdateMetrics:
        """Learn once; returns statistics by name."""

    def drop_updates(self) -> None:  # noqa: B027
        """Drop the due updates of a replay ratio."""

    def least_exploring(self) -> range:
        """This rank's environments that explore least, whose episodes are reported on their own; often none."""
        return range(0)

    def facts(self) -> dict[str, str]:
        """Facts by name, for the log at the start of a run."""
        return {}

    def counters(self) -> dict[str, float]:
        """Metrics of the algorithm's state, named with their groups, for each row of the log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The states of all that is `saved`: arrays and plain values. See `states_of`."""
        found = states_of(self, self.saved)
        if is_own(self):
            self.watch()
            self._unsaved_state().tell()
            found[_UNSAVED] = self._unsaved_state().present(self, self.saved)
        return found

    def watch(self) -> None:
        """Notice from now on what changes and `saved` does not name, in a user's algorithm; snapshots warn of it.

        One of rlframe's refuses new attributes that are named like fields of its config.
        """
        if is_own(self):
            self._unsaved_state().look(self, getattr(self, "saved", ()))
        elif self.config is not None:
            vars(self)["_unread"] = chz.chz_fields(type(self.config)).keys() - {*vars(self), *dir(type(self))}

    def lost_state(self) -> list[str]:
        """What of its state the loaded snapshot lacks, as far as it is known."""
        return self._unsaved_state().lost

    def _unsaved_state(self) -> UnsavedState:
        return vars(self).setdefault("_unsaved", UnsavedState())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. See `load_states`."""
        device = next((x.device for x in self.progress.learned), torch.device("cpu"))
        missing = load_states(self, self.saved, state, device)
        self._unsaved_state().lost = sorted({*state.get(_UNSAVED, ()), *missing})
        self.watch()


class Frozen(Algorithm):
    """Counts what its agent plays, and does not learn: for a policy such as an opponent from another run."""

    saved = ("progress",)

    def __init__(self, config: Any) -> None:
        """`config`: of the algorithm that made the agent, to be recorded."""
        self.config, self.progress = config, Progress()

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)

    def updates_due(self) -> int:
        return 0

    def update(self) -> UpdateMetrics:
        return {}


def optimizer_steps(algo: Algorithm) -> dict[str, OptimizerStep]:
    """Those among an algorithm's attributes, by their names."""
    return {name: part for name, part in vars(algo).items() if isinstance(part, OptimizerStep)}


def warn_if_unused(algo: Algorithm, module: str) -> None:
    """Warn if the user's module has algorithms, and its config makes none of them: the method has another name."""
    known = [each for each in getattr(sys.modules.get(module), "__dict__", {}).values() if isinstance(each, type)]
    own = [each for each in known if issubclass(each, Algorithm) and each.__module__ == module]
    if own and not isinstance(algo, tuple(own)) and not module.startswith("rlframe."):
        named = " or ".join(each.__name__ for each in own)
        warn_once(f"the config of {module} makes {qualified_name(type(algo))}, not {named}; see its make_algorithm")
