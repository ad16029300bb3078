"""What a runner drives: a Learner, which is an agent with the algorithm that trains it, or several by name."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.algos.base import UpdateMetrics
from rlframe.algos.saved import check_attributes
from rlframe.core.errors import ConfigError, ReadableError, naming, pluralize, qualified_name, shortened
from rlframe.core.multi_agent import columns_of, joint_of
from rlframe.core.objects import is_own
from rlframe.core.types import Samples
from rlframe.evaluation.evaluator import BaseEvaluator
from rlframe.record.metrics import of_learner
from rlframe.rewards.base import UNCHANGED, Rewards
from rlframe.samplers import Source

_logger = logging.getLogger("rlframe")

_V = TypeVar("_V")
_ONLY = "agent"  # the name of a learner that is given without one


@dataclass(frozen=True)
class Learner:
    """An agent, the algorithm that trains it, and what becomes of a batch's rewards before they are learned from.

    Replay, critics and targets are the algorithm's. Of several learners, the name of each stands in those of its
    metrics and of its state in snapshots, after the group: algo/red/loss, agent/red. The only one of a run needs none.
    """

    agent: Agent
    algo: Algorithm
    rewards: Rewards = UNCHANGED
    name: str = ""  # of one among several; set by their runner
    team: Agent | None = None  # that acts with its agent, if an environment has several
    joint: bool = False  # it learns from the rows of all its agents together
    policy: str = ""  # of the team, whose agent it is

    def __post_init__(self) -> None:
        """Raises TypeError for arguments in another order; see also `check_attributes`."""
        if not (hasattr(self.agent, "initial_state") and hasattr(self.algo, "updates_due")):
            got = f"{type(self.agent).__name__}, {type(self.algo).__name__}"
            raise TypeError(f"a learner is Learner(agent, algo), not Learner({got})")
        check_attributes(self.algo)
        self.algo.watch()

    @cached_property
    def _own_algorithm(self) -> str:
        """What errors of an algorithm of the user's own say of it; empty for rlframe's."""
        if not is_own(self.algo):
            return ""
        classes = type(self.algo).__mro__
        own = {name for cls in classes if is_own(cls) for name, x in vars(cls).items() if inspect.isfunction(x)}
        theirs = {name for cls in classes if not is_own(cls) for name in vars(cls) if not name.startswith("__")}
        theirs -= Algorithm.__abstractmethods__
        which = f", which overrides {', '.join(sorted(own & theirs))}," if own & theirs else ""
        return f"algorithm {qualified_name(type(self.algo))}{which}"

    @property
    def of(self) -> str:
        """` of red`, for messages; empty for the only one."""
        return f" of {self.name}" if self.name else ""

    def own_parts(self) -> dict[str, str]:
        """The classes of its parts that are the user's, which a resumed run must have too."""
        critic = getattr(self.algo, "critic", None)
        parts = {
            "agent": self.agent,
            "model": getattr(self.agent, "model", None),
            "algorithm": self.algo,
            "replay": getattr(self.algo, "replay", None),
            "critic": getattr(critic, "networks", critic),
        }
        names = {name: qualified_name(type(x)) for name, x in parts.items() if x is not None and is_own(x)}
        return {name: text for name, text in names.items() if not text.startswith("torch.")}

    def check_parts(self, saved: Mapping[str, str]) -> None:
        """Raise ValueError if the parts of a saved state are of other classes."""
        own = self.own_parts()
        for name in {**saved, **own}:
            before, now = (names.get(name, f"rlframe's own {name}") for names in (saved, own))
            if before.rpartition(":")[2] != now.rpartition(":")[2]:  # a script is __main__, or has its name
                raise ValueError(
                    f"it was saved with {before} as {name}{self.of}, and this run has {now}; a run that a script "
                    f"composed continues in that script"
                )

    def receive(self, samples: Samples) -> None:
        """Let the algorithm receive a batch, with the rewards that it learns from.

        Raises:
            PartError: an algorithm or a bonus of the user's own raised an exception.    ConfigError: no Samples.
        """
        with naming(f"{qualified_name(type(self.rewards))} failed") if is_own(type(self.rewards)) else nullcontext():
            learned_from = self.rewards(samples)
        if not isinstance(learned_from, Samples):
            name = qualified_name(type(self.rewards))
            raise ConfigError(f"{name} returned {type(learned_from).__name__}; return Samples, with the new rewards")
        with naming(f"{self._own_algorithm} failed in receive") if self._own_algorithm else nullcontext():
            self.algo.receive(learned_from)

    def update(self) -> UpdateMetrics:
        """Make one update.

        Raises:
            PartError: an algorithm of the user's own raised an exception.
            ConfigError: it returns no metrics, or learns from replay and counts no update, so that it stays due.
        """
        progress, algo = self.algo.progress, type(self.algo).__name__
        before = progress.updates
        with naming(f"{self._own_algorithm} failed in update") if self._own_algorithm else nullcontext():
            metrics = self.algo.update()
        if progress.unreached:
            self._tell_unreached(progress.unreached)
        if not isinstance(metrics, Mapping):
            raise ConfigError(f"{algo}.update returned {type(metrics).__name__}; return metrics by name, {{}} for none")
        if progress.updates == before and self.algo.n_rows() and self.algo.updates_due():
            raise ConfigError(f"{algo}.update counted no update, so it stays due; add: self.progress.updates += 1")
        return metrics

    def _tell_unreached(self, unreached: list[torch.Tensor]) -> None:
        """Warn of parameters of the user's networks that the first loss does not depend on; all are then forgotten."""
        critic = getattr(self.algo, "critic", None)
        parts = {"": self.agent, "critic": getattr(critic, "networks", critic)}
        modules = [
            (".".join(filter(None, (part, name))), x)
            for part, whole in parts.items()
            if isinstance(whole, torch.nn.Module)
            for name, x in whole.named_modules()
        ]
        own = [(name, x) for name, x in modules if name and is_own(x) and not type(x).__module__.startswith("torch.")]
        used = [(name, x) for name, x in own if not name.startswith(self.algo.without_loss)]
        names = {id(p): f"{module}.{name}" for module, x in used for name, p in x.named_parameters()}
        if told := [names[id(x)] for x in unreached if id(x) in names]:
            _logger.warning(
                "the first update%s gave %s no gradient: %s. Unless a later loss uses them, they do not learn: "
                "something detaches them, or they can be left out or frozen with requires_grad_(False)",
                self.of, pluralize(len(told), "parameter"), shortened(", ".join(told)),
            )  # fmt: skip
        unreached.clear()

    def check_batch(self, samples: Samples) -> None:
        """Raise ConfigError if a sampler has not counted the env steps of its batch, which would never end."""
        counted: Any = samples.n_env_steps
        if not isinstance(counted, int):
            kind = type(counted).__name__
            raise ConfigError(f"the sampler's batch{self.of}: n_env_steps is a {kind}; make it an int")
        if not counted and bool(samples.valid.any()):
            raise ConfigError(
                f"the sampler's batch{self.of} has valid rows and says n_env_steps=0; count them, for example with "
                f"rlframe.rollout.buffer.numbered(samples, rows, start)"
            )

    def named(self, values: Mapping[str, _V]) -> dict[str, _V]:
        """Metrics, or parts of a snapshot, with this learner's name in theirs."""
        return {of_learner(key, self.name): value for key, value in values.items()} if self.name else {**values}


class Diverged(ReadableError):
    """A loss, gradient or parameter became NaN or Inf; the state since is not worth saving."""


class Learners(dict[str, Learner]):
    """The learners of a run, by name. Each of several knows its name."""

    def __init__(self, given: Learner | Mapping[str, Learner]) -> None:
        """Raises:
        ConfigError: there is none, or a name does not fit into the name of a metric.
        """
        learners = {_ONLY: given} if isinstance(given, Learner) else dict(given)
        if not learners or any(not name or set(name) & set("/. \t\n") for name in learners):
            names = ", ".join(map(repr, learners)) or "none"
            raise ConfigError(f"learners need names without spaces, dots and slashes, such as red; got {names}")
        several = len(learners) > 1
        super().__init__({name: replace(each, name=name if several else "") for name, each in learners.items()})
        self.first = next(iter(self.values()))
        self._progress = [learner.algo.progress for learner in self.values()]

    @property
    def only(self) -> Learner:
        """The only one. Raises ConfigError if there are several."""
        if len(self) > 1:
            raise ConfigError(f"this run has the learners {', '.join(self)}: use runner.learners[NAME]")
        return self.first

    @property
    def env_steps(self) -> int:
        """Valid rows trained on, over all ranks; of several, those of the one that has most."""
        return max([progress.env_steps for progress in self._progress])

    @property
    def updates(self) -> int:
        """Gradient steps; of several, those of the one that has most."""
        return max([progress.updates for progress in self._progress])

    def can_receive(self) -> bool:
        return all(learner.algo.can_receive() for learner in self.values())

    def updates_due(self) -> bool:
        return any(learner.algo.updates_due() for learner in self.values())

    def check_agents(self, sampler: Source, evaluator: BaseEvaluator | None) -> None:
        """Raise ConfigError if an algorithm learns another agent than its Learner has, or the sampler has none of them.

        An evaluator that plays another agent is told in the log: it may have averaged weights.
        """
        for learner in self.values():
            if not learner.algo.learns(learner.agent):
                raise ConfigError(f"the algorithm{learner.of} learns another agent than its Learner has; give both one")
        agents = [learner.agent for learner in self.values()]
        if not any(map(sampler.acts_with, agents)):
            raise ConfigError(f"{type(sampler).__name__} acts with another agent than the Learner has; give both one")
        if evaluator is not None and not any(map(evaluator.plays, agents)):
            _logger.warning("the evaluator plays another agent than the Learner has")

    def batches(self, found: Samples | Mapping[str, Samples]) -> list[tuple[Learner, Samples]]:
        """What a source has collected, by learner.

        Raises:
            ConfigError: the source has batches for other learners, or something else.
        """
        if isinstance(found, Samples) and self.first.team is not None:
            found = {name: self._of_policy(name, found) for name in found.inputs.observation}
            if len(self) == 1:
                found = found[self.first.policy]
        if isinstance(found, Samples) and len(self) == 1:
            return [(self.first, found)]
        if not isinstance(found, Samples | Mapping):
            raise ConfigError(f"collect of the sampler gave a {type(found).__name__}, neither Samples nor some by name")
        if isinstance(found, Samples) or not found.keys() <= self.keys():
            of = "one batch" if isinstance(found, Samples) else f"batches of {', '.join(found)}"
            raise ConfigError(f"the sampler has {of}, and the learners of this run are {', '.join(self)}")
        return [(self[name], samples) for name, samples in found.items()]

    def _of_policy(self, name: str, samples: Samples) -> Samples:
        """What a policy learns from, of a batch of environments of several agents."""
        learner = self.get(name, self.first)
        return joint_of(samples, name) if learner.joint else columns_of(samples, name)

    def acting(self) -> list[Agent]:
        """The agents that samplers act with."""
        return list({id(acts): acts for each in self.values() for acts in (each.team or each.agent,)}.values())

    def algos(self) -> dict[str, Algorithm]:
        return {name: learner.algo for name, learner in self.items()}

    def counters(self) -> dict[str, float]:
        """The metrics of the states of algorithms and rewards."""
        agent_steps = sum(progress.agent_steps for progress in self._progress)
        found: dict[str, float] = {"agent_steps": agent_steps} if agent_steps else {}
        for learner in self.values():
            skipped = learner.algo.progress.skipped
            own = {**learner.algo.counters(), **learner.rewards.counters()}
            found |= learner.named({**own, **({"algo/skipped": skipped} if skipped else {})})
        return found

    def lost(self) -> list[str]:
        """State of algorithms that the loaded snapshot lacks."""
        return [name for learner in self.values() for name in learner.algo.lost_state()]

    def check_parameters(self, place: str, cause: BaseException | None) -> None:
        """Raise Diverged if a parameter is NaN or Inf; `place`: where the run is."""
        for learner in self.values():
            if rate := learner.algo.progress.diverged(learner.agent.parameters()):
                raise Diverged(
                    f"training diverged: at {place} a parameter{learner.of} is NaN or Inf; the last snapshot is from "
                    f"before. Try a lower learning rate ({rate}) or smaller rewards"
                ) from cause

    def state_dict(self) -> dict[str, Any]:
        """Agent, algorithm and rewards, each under a key of its own, so that one can be read without the others."""
        found: dict[str, Any] = {}
        for each in self.values():
            own = {"agent": each.agent.state_dict(), "algo": each.algo.state_dict()}
            found |= each.named({**own, "rewards": each.rewards.state_dict(), "parts": each.own_parts()})
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises ValueError if a parameter in it is NaN or Inf, or it has other parts."""
        for learner in self.values():
            if (saved := state.get(of_learner("parts", learner.name))) is not None:
                learner.check_parts(saved)
            learner.agent.load_state_dict(state[of_learner("agent", learner.name)])
            learner.algo.load_state_dict(state[of_learner("algo", learner.name)])
            learner.rewards.load_state_dict(state[of_learner("rewards", learner.name)])
            if learner.algo.progress.diverged(learner.agent.parameters()):
                raise ValueError(f"a parameter{learner.of} is NaN or Inf; resume from one before, if there is one")
