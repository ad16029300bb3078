"""What a policy is worth, estimated from a dataset of episodes before it ever acts, with 95 % intervals.

    report = estimate(rlframe.load_policy(RUN_DIR).target(), episodes, discount=0.99, methods=["wis", "dr", "fqe"])
    print(report.table())

The worth is the expected discounted return of an episode. Where all truncated episodes of the dataset are of one
length, that of the longest, it is taken for a time limit, and the worth is that of episodes with this limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chz
import numpy as np
import torch

from rlframe.core.arguments import checked
from rlframe.core.config import check_one_of
from rlframe.core.errors import ConfigError, aligned, pluralize
from rlframe.core.struct import map_tree
from rlframe.data.cutting import LOG_PROB
from rlframe.data.episodes import Episode
from rlframe.evaluation.cloning import CloneConfig, cloned_log_prob
from rlframe.evaluation.episode_rows import EpisodeRows, check_episodes, rows_of, space_of, time_limit_of
from rlframe.evaluation.fitted_q import FittedQ, FittedQConfig, Problem, fitted_q
from rlframe.evaluation.target_policy import TargetPolicy
from rlframe.ops import off_policy_estimates as ops
from rlframe.ops.off_policy_estimates import Terms
from rlframe.record.directory import finite

Array = np.ndarray
OF_RATIOS: Mapping[str, Callable[[Array, Array, float], Terms]] = {
    "is": ops.importance_sampling,
    "wis": ops.weighted_importance_sampling,
    "pdis": ops.per_decision,
    "wpdis": ops.weighted_per_decision,
}
OF_BOTH: Mapping[str, Callable[[Array, Array, Array, Array, float], Terms]] = {
    "dr": ops.doubly_robust,
    "wdr": ops.weighted_doubly_robust,
}
FQE = "fqe"
METHODS = (*OF_RATIOS, *OF_BOTH, FQE)
FEW = 30.0  # effective episodes, below which intervals of ratios are too short


@chz.chz
class EstimateConfig:
    """What is fitted for an estimate."""

    q: FittedQConfig = chz.field(default=FittedQConfig(), doc="of dr, wdr and fqe")
    clone: CloneConfig = chz.field(default=CloneConfig(), doc="of datasets without log-probabilities")


@dataclass(frozen=True)
class Estimate:
    """A method's estimate and its 95 % interval."""

    method: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Report:
    """Estimates of one policy from one dataset, and what they rest on."""

    estimates: tuple[Estimate, ...]
    played: Estimate  # discounted return of the dataset's own episodes
    n_episodes: int
    n_steps: int
    discount: float
    time_limit: int  # env steps; 0: none
    behaviour: str  # log-probabilities of the dataset: recorded, cloned, or "" if no method needs them
    effective_episodes: float  # (Σ ρ)² / Σ ρ² of whole episodes; nan without ratios
    mean_ratio: float  # of whole episodes, 1 in expectation; nan without ratios

    def metrics(self) -> dict[str, float]:
        """The numbers by the names of the log: estimate/wis, estimate/wis_low, estimate/wis_high and so on."""
        found: dict[str, float] = {}
        for each in self.estimates:
            name = f"estimate/{each.method}"
            found |= {name: each.value, f"{name}_low": each.low, f"{name}_high": each.high}
        if self.behaviour:
            found |= {"estimate/effective_episodes": self.effective_episodes, "estimate/mean_ratio": self.mean_ratio}
        return found

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON; None for what is not known."""
        numbers = {each.method: {"value": each.value, "low": each.low, "high": each.high} for each in self.estimates}
        names = ("n_episodes", "n_steps", "discount", "time_limit", "behaviour", "effective_episodes", "mean_ratio")
        own = {name: getattr(self, name) for name in names}
        return finite({"estimates": numbers, "played": self.played.value, **own})

    def table(self) -> str:
        """A line for each method, one for the dataset's own episodes, and what they rest on."""
        numbers = {each.method: (each.value, each.low, each.high) for each in (*self.estimates, self.played)}
        largest = max((abs(x) for each in numbers.values() for x in each if math.isfinite(x)), default=1.0)
        decimals = 2 + max(0, -math.floor(math.log10(largest or 1.0)))
        shown = [(method, *(f"{x:.{decimals}f}" for x in each)) for method, each in numbers.items()]
        rows = [("method", "estimate", "95 % from", "to"), *shown]
        return "\n".join(
            [*aligned(rows, "<>>>"), *self.notes(), *([f"warning: {self.warning}"] if self.warning else [])]
        )

    def notes(self) -> list[str]:
        """What the numbers rest on, a sentence each."""
        limit = f", of episodes of at most {self.time_limit} steps" if self.time_limit else ""
        found = [
            f"expected discounted return (discount {self.discount:g}){limit}, from "
            f"{pluralize(self.n_episodes, 'episode')} of {self.n_steps:,} env steps"
        ]
        if self.behaviour:
            found.append(
                f"log-probabilities of the data: {self.behaviour}; ratios of whole episodes: "
                f"{self.effective_episodes:.1f} effective episodes, mean {self.mean_ratio:.3g} (1 is right)"
            )
        return found

    @property
    def warning(self) -> str:
        """What speaks against the numbers; empty if nothing does."""
        if not self.behaviour or self.effective_episodes >= FEW:
            return ""
        return (
            f"fewer than {FEW:.0f} effective episodes: the intervals of ratios are too short; the policy is too far "
            f"from the data, or the episodes are too long or too few (see fqe)"
        )


@checked
def estimate(
    policy: TargetPolicy,
    episodes: Iterable[Episode],
    discount: float,
    methods: Sequence[str],
    seed: int = 0,
    config: EstimateConfig = EstimateConfig(),  # noqa: B008  # frozen
) -> Report:
    """Estimate the worth of a policy by each of `methods`; the same again for the same seed.

    Args:
        discount: γ per env step, in [0, 1].    methods: of METHODS, each once.
    Raises:
        ConfigError: an unknown method, a greedy policy with ratios, or episodes that do not fit.
    """
    episodes = list(episodes)
    limit = check_estimate(methods, policy, episodes, discount)
    rows = rows_of(episodes, limit)
    params = torch.cat([policy.params(episode) for episode in episodes])
    reward = rows.padded(rows.reward.numpy())
    log_ratio, behaviour = np.zeros_like(reward), ""
    if {*methods} != {FQE}:
        log_b, behaviour = _behaviour(episodes, rows, policy, limit, config.clone, seed)
        log_ratio = rows.padded(_log_prob(policy, params, rows) - log_b)
    fitted = None
    if {*methods} - {*OF_RATIOS}:
        space = space_of(policy.observation_space, limit)
        fitted = fitted_q(Problem(rows, params, policy, space, discount, limit), config.q, seed)
    found = tuple(
        _interval(name, _terms(name, rows, log_ratio, reward, fitted, discount), fitted if name == FQE else None)
        for name in methods
    )
    of_data = ops.importance_sampling(np.zeros_like(reward), reward, discount)
    return Report(
        found,
        _interval("dataset", of_data),
        len(episodes),
        int(rows.length.sum()),
        discount,
        limit,
        behaviour,
        ops.effective_sample_size(log_ratio) if behaviour else math.nan,
        ops.mean_ratio(log_ratio) if behaviour else math.nan,
    )


def check_estimate(
    methods: Sequence[str], policy: TargetPolicy, episodes: Sequence[Episode], discount: float, prefix: str = ""
) -> int:
    """Raise ConfigError for what cannot be estimated; returns the time limit of the episodes, 0 for none.

    `prefix`: of keys, for messages.
    """
    check_methods(methods, policy, prefix)
    if not 0 <= discount <= 1:
        raise ConfigError(f"discount={discount:g} must be from 0 to 1")
    check_episodes(episodes, policy.observation_space, policy.action_space)
    limit = time_limit_of(episodes)
    if discount == 1 and not limit and {*methods} - {*OF_RATIOS}:
        raise ConfigError(
            f"discount=1 is for {', '.join(OF_RATIOS)}, or episodes with a time limit; use 0.99 or so "
            "(in a training run it is sampler.discount, by default the algorithm's)"
        )
    return limit


def check_methods(methods: Sequence[str], policy: TargetPolicy, prefix: str = "") -> None:
    """Raise ConfigError unless these are some of METHODS, each once, and fit the policy; `prefix`: of keys."""
    for method in methods:
        check_one_of("estimate", method, METHODS)
    if not methods or len({*methods}) < len(methods):
        raise ConfigError(f"estimate={','.join(methods)} must name methods, each once, of {', '.join(METHODS)}")
    if policy.greedy and (ratios := [method for method in methods if method != FQE]):
        raise ConfigError(
            f"estimate={ratios[0]} needs the probabilities of a policy that acts with noise, and this one is greedy: "
            f"it gives the other actions of the data none; use {prefix}explore=true, or {prefix}estimate="
            f"{'[fqe]' if prefix else 'fqe'}"
        )


def _behaviour(
    episodes: Sequence[Episode], rows: EpisodeRows, policy: TargetPolicy, limit: int, config: CloneConfig, seed: int
) -> tuple[Array, str]:
    """Log-probabilities [N] of the actions of the data, and where they are from."""
    if all(LOG_PROB in episode.info for episode in episodes):
        log_prob = np.concatenate([np.asarray(episode.info[LOG_PROB], float) for episode in episodes])
        if log_prob.shape != rows.row.shape:
            raise ConfigError(
                f"info[{LOG_PROB!r}] of the dataset has shape {log_prob.shape} for {len(rows.row)} actions; it must "
                f"be one number for each"
            )
        if np.isfinite(log_prob).all():
            return log_prob, "recorded"
    space = space_of(policy.observation_space, limit)
    return cloned_log_prob(rows, space, policy.action_space, config, seed), "cloned"


@torch.no_grad()
def _log_prob(policy: TargetPolicy, params: torch.Tensor, rows: EpisodeRows) -> Array:
    """Log-probabilities [N] of the actions by the target policy."""
    action = map_tree(lambda x: x.to(params.device), rows.action)
    return policy.distribution.log_prob(params[rows.row.to(params.device)], action).double().cpu().numpy()


def _terms(
    method: str, rows: EpisodeRows, log_ratio: Array, reward: Array, fitted: FittedQ | None, discount: float
) -> Terms:
    if method in OF_RATIOS:
        return OF_RATIOS[method](log_ratio, reward, discount)
    assert fitted is not None
    if method == FQE:
        return fitted.terms
    v, ends = fitted.v.copy(), rows.row.numpy()[rows.bootstraps.numpy() == 0] + 1
    v[ends] = 0
    return OF_BOTH[method](log_ratio, reward, rows.padded(fitted.q), rows.padded(v), discount)


def _interval(method: str, terms: Terms, fitted: FittedQ | None = None) -> Estimate:
    return Estimate(method, terms.value(), *ops.normal_interval(terms, variance=fitted.spread if fitted else 0.0))
