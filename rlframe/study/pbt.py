"""Population-based training: its plan, and what members copy and try. Jaderberg et al. 2017, arXiv 1711.09846.

All members train to the next interval. Then those with the lowest scores each copy one with a high score (truncation
selection, section 4.1.1) and change its settings. `rlframe.study.population` has the members' runs do so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlframe.core.command_line import KeyValues
from rlframe.core.errors import ConfigError
from rlframe.core.files import number_in
from rlframe.core.seeding import Role, generator
from rlframe.experiment.config import Experiment
from rlframe.experiment.resumable import check_changeable
from rlframe.experiment.study_keys import PBT_KEYS
from rlframe.study.record import RETURNS, metric_of
from rlframe.study.search_space import Domain, read_space, word_of

FACTORS = (0.8, 1.2)  # of a number that is changed (appendix A)
_N_INTERVALS = 20  # of a run, by default
_MAX_MEMBERS = 1_000


@dataclass(frozen=True)
class PbtPlan:
    """What a population searches, and how."""

    space: Mapping[str, Domain]  # by key
    n_members: int
    interval_steps: int
    n_steps: int
    seed: int  # of member 0 and of all decisions; member k has seed + k
    quantile: float = 0.25
    resample: float = 0.25
    metric: str = RETURNS[0]  # -metric if lower is better
    scheduled: frozenset[str] = frozenset()  # keys of the space that take schedules

    @classmethod
    def read(cls, words: Mapping[str, str], experiment: Experiment) -> PbtPlan:
        """That of the words of a study whose members have this config, but for what is searched.

        Raises:
            ConfigError: a wrong word, or a config whose runs cannot be stopped and copied at each interval.
        """
        given = KeyValues(f"{key}={words[key]}" for key in ("seed", "metric", "n_runs", *PBT_KEYS) if key in words)
        log_steps, n_steps = experiment.runner.log_interval_steps, experiment.runner.n_steps
        interval = given.count("pbt.interval_steps", max(n_steps // _N_INTERVALS, log_steps))
        _check_runs(experiment, interval)
        n_members, quantile = given.count("n_runs", 8), given.number("pbt.quantile", 0.25, 0, 1)
        if not 0 < quantile <= 0.5:
            raise ConfigError(f"pbt.quantile={quantile:g} must be above 0 and at most 0.5, the worse half")
        if not 2 <= n_members <= _MAX_MEMBERS or n_members * quantile < 1:
            raise ConfigError(
                f"n_runs={n_members} members with pbt.quantile={quantile:g} leave none to replace, or are more than "
                f"{_MAX_MEMBERS:,}; use n_runs={max(2, math.ceil(1 / quantile))} or more, or a larger pbt.quantile"
            )
        resample, metric = given.number("pbt.resample", 0.25, 0, 1), metric_of(given)
        seed = given.count("seed", 0)
        space = read_space(words)
        scheduled = frozenset(check_changeable(experiment, space))
        return cls(space, n_members, interval, n_steps, seed, quantile, resample, metric, scheduled)

    @property
    def n_replaced(self) -> int:
        """Members that may copy others after an interval."""
        return int(self.n_members * self.quantile)

    def describe(self) -> str:
        """The space, for the preview of a study."""
        lines = [f"  {key:<30} {each}" for key, each in self.space.items()]
        how = (
            f"every {self.interval_steps:,} env_steps, up to {self.n_steps:,}, the worst "
            f"{self.n_replaced} of {self.n_members} members by {self.metric} copy one of the best {self.n_replaced}"
        )
        return "\n".join([f"population-based training: {how}", *lines])

    def facts(self) -> dict[str, object]:
        """What cannot change when a study is continued, by key."""
        space = {f"search.{key}": [each.kind, *each.values] for key, each in self.space.items()}
        numbers = {"n_runs": self.n_members, "pbt.interval_steps": self.interval_steps, "runner.n_steps": self.n_steps}
        rest = {"pbt.quantile": self.quantile, "pbt.resample": self.resample, "metric": self.metric, "seed": self.seed}
        return {**space, **numbers, **rest}


def _check_runs(experiment: Experiment, interval: int) -> None:
    """Raise ConfigError unless runs of this config stop after each interval, with a snapshot."""
    if experiment.runner.learns_from_data:
        raise ConfigError("runner=offline_rl takes no env_steps, by which the intervals of searcher=pbt are counted")
    log_steps, n_steps = experiment.runner.log_interval_steps, experiment.runner.n_steps
    if not 0 < interval < n_steps:
        raise ConfigError(f"pbt.interval_steps={interval:,} must be above 0 and below runner.n_steps={n_steps:,}")
    if log_steps > interval:
        raise ConfigError(
            f"pbt.interval_steps={interval:,} is shorter than runner.log_interval_steps={log_steps:,}, and members "
            f"stop at rows of their logs; set runner.log_interval_steps={interval}, or a longer interval"
        )
    if experiment.snapshot_mode == "none":
        raise ConfigError("snapshot_mode=none: members of a population are continued from snapshots; use last")
    if experiment.stop or experiment.runner.target_return != math.inf:
        word = "stop=" if experiment.stop else "runner.target_return=inf"
        raise ConfigError(f"all members of a population train for runner.n_steps, without stop or a target; set {word}")


@dataclass(frozen=True)
class Member:
    """A member from the start of an interval on."""

    settings: Mapping[str, str]  # words, by key of the space
    env_steps: int = 0  # of the snapshot that it goes on from
    score: float = math.nan  # at the end of the interval before, higher is better; nan: none, or its run failed
    copied: int = -1  # the member whose snapshot that is; -1: its own


def first_members(plan: PbtPlan) -> list[Member]:
    """The members at the start, drawn from the space."""
    rngs = [generator(plan.seed, Role.ALGO, 0, k) for k in range(plan.n_members)]
    return [Member({key: drawn(each, rng) for key, each in plan.space.items()}) for rng in rngs]


def next_members(plan: PbtPlan, number: int, members: Sequence[Member]) -> list[Member]:
    """What members copy and try after interval `number`, from 1; the same for the same arguments.

    The worst copy even if their scores are equal to those of the best, so that the settings go on to change.

    Args:
        members: with their scores and env_steps at the end of the interval.
    """
    scores = [-math.inf if math.isnan(member.score) else member.score for member in members]
    order = sorted(range(len(members)), key=lambda k: (scores[k], -k))  # worst first
    failed = [k for k in order if scores[k] == -math.inf]
    worst = order[: max(plan.n_replaced, len(failed))]
    best = [k for k in order[-plan.n_replaced :] if k not in worst]
    found = []
    for k, member in enumerate(members):
        rng = generator(plan.seed, Role.ALGO, number, k)
        if best and k in worst:
            donor = int(rng.choice(best))
            settings = {
                key: changed(plan.space[key], x, plan.resample, rng) for key, x in members[donor].settings.items()
            }
            found.append(Member(settings, members[donor].env_steps, member.score, donor))
        else:
            found.append(Member(member.settings, member.env_steps, member.score))
    return found


def drawn(domain: Domain, rng: np.random.Generator) -> str:
    """A word drawn from a domain."""
    if domain.kind == "choice":
        return domain.values[int(rng.integers(len(domain.values)))]
    low, high = map(float, domain.values)
    match domain.kind:
        case "int":
            return str(int(rng.integers(int(low), int(high) + 1)))
        case "logint":
            return str(min(int(high), int(math.exp(rng.uniform(math.log(low), math.log(high + 1))))))
        case "loguniform":
            return word_of(math.exp(rng.uniform(math.log(low), math.log(high))))
    return word_of(float(rng.uniform(low, high)))


def changed(domain: Domain, word: str, resample: float, rng: np.random.Generator) -> str:
    """A word near this one, within its bounds, or with probability `resample` one that is drawn anew.

    A number is multiplied by one of FACTORS, a whole one moves by at least 1, a choice to one beside it.
    """
    anew, up = rng.random() < resample, bool(rng.integers(2))
    if anew:
        return drawn(domain, rng)
    if domain.kind == "choice":
        place = domain.values.index(word) + (1 if up else -1)
        return domain.values[min(max(place, 0), len(domain.values) - 1)]
    low, high = map(float, domain.values)
    moved = float(word) * FACTORS[up]
    if "int" not in domain.kind:
        return word_of(min(max(moved, low), high))
    least = int(word) + 1 if up else int(word) - 1
    whole = max(round(moved), least) if up else min(round(moved), least)
    return str(int(min(max(whole, low), high)))


def schedules(plan: PbtPlan, pieces: Sequence[Member]) -> dict[str, str]:
    """The settings of a member over time, as words of one run; of keys that take no schedule the last.

    Args:
        pieces: the member and those that it stems from, oldest first; see `Member.env_steps`.
    """
    found = {}
    for key in plan.space:
        values = [piece.settings[key] for piece in pieces]
        if key not in plan.scheduled or len(set(values)) == 1 or not all(math.isfinite(number_in(x)) for x in values):
            found[key] = values[-1]
            continue
        points = [f"0:{values[0]}"]
        for i in range(1, len(pieces)):
            if values[i] != values[i - 1]:
                points += [f"{pieces[i].env_steps}:{values[i - 1]}", f"{pieces[i].env_steps}:{values[i]}"]
        found[key] = f"piecewise({','.join(points)})"
    return found
