"""What a runner logs and saves beside the training state: metrics, timers, episodes, snapshots, skipped updates."""

from __future__ import annotations

import logging
import math
import statistics
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlframe.agents import Agent
from rlframe.core.config import nearest
from rlframe.core.errors import PartError, RecordError, warn_once
from rlframe.core.ranks import Ranks
from rlframe.core.types import Trajectory
from rlframe.evaluation.evaluator import BaseEvaluator, Result
from rlframe.evaluation.report import RETURN_MEAN, diagnostic_means, metric_of, summarize
from rlframe.evaluation.schedule import EvaluationSchedule
from rlframe.record import Metrics, Timers, current_run
from rlframe.record.metrics import over_ranks, step_of
from rlframe.record.rank_state import RankEntry, env_steps_of, write_rank_state
from rlframe.runners.callbacks import Training
from rlframe.runners.config import RunnerConfig
from rlframe.runners.stop_rule import StopRule
from rlframe.system.machine import Usage
from rlframe.system.signals import StopRequest

_logger = logging.getLogger("rlframe")


class TrainingLog:
    """Owned by a runner and saved with it: everything that the next row of the log is made from."""

    def __init__(self, ranks: Ranks, stop: str, window: int, n_envs: int) -> None:
        """Args:
        stop: the text of a StopRule; empty: none.    window: episodes, over all ranks, in episode/return_mean.
        n_envs: environments of each rank.
        """
        self.stop, self._rule = stop, StopRule(stop) if stop else None
        self.rule_holds = False  # on the newest values
        self.ranks, self.metrics, self.timers, self._usage = ranks, Metrics(), Timers(), Usage()
        n_own = -(-window // ranks.n_samplers)
        self.recent: deque[Trajectory] = deque(maxlen=n_own)  # of this rank
        self.least_exploring: deque[Trajectory] = deque(maxlen=n_own)  # the same of environments that explore least
        self.unrecorded: list[dict[str, Any]] = []  # rows for episodes.csv
        self._n_envs = n_envs
        self.env_seeds: Sequence[int] = ()  # of this rank's environments, for episodes.csv
        self.n_episodes = 0  # of this rank
        self.last = -1  # the runner's clock at the last row; -1: there is no row yet
        self.return_mean = math.nan  # of the last row
        self.latest: dict[str, float] = {}  # the newest value of every metric

    def add_episodes(self, finished: Sequence[Trajectory], env_steps: int, least: Mapping[str, range]) -> None:
        """Note the episodes that ended at the latest at `env_steps`; `least`: those that explore least, by learner."""
        self.n_episodes += len(finished)
        self.recent.extend(finished)
        self.least_exploring.extend(each for each in finished if each.env in least.get(each.agent, ()))
        self.unrecorded += [self._described(each, env_steps) for each in finished]

    def _described(self, episode: Trajectory, env_steps: int) -> dict[str, Any]:
        seed = {"seed": self.env_seeds[episode.env]} if self.env_seeds else {}
        return {
            "env_steps": env_steps,
            "env": self.ranks.rank * self._n_envs + episode.env,
            **({"agent": episode.agent} if episode.agent else {}),
            **seed,
            "return": episode.return_,
            "length": episode.length,
            "end": "terminated" if episode.terminated else "truncated",
            **{metric_of(name): value for name, value in episode.diagnostics.items()},
        }

    def record_episodes(self) -> None:
        """Write the episodes of all ranks that are not yet in episodes.csv, by env_steps, by which it is trimmed."""
        rows = [row for rows in self.ranks.gather(self.unrecorded) for row in rows]
        current_run().log_episodes(sorted(rows, key=lambda row: row["env_steps"]))
        self.unrecorded = []

    def follow(self, metrics: Mapping[str, float]) -> None:
        """Follow the stop rule on the newest values, with these."""
        self.latest |= metrics
        if self._rule is None:
            return
        self.rule_holds = self._rule(self.latest)
        if self.latest.get("updates") and (missing := self._rule.missing(self.latest)):
            known = nearest(missing[0], self.latest)
            warn_once(f"stop={self._rule.text!r}: this run has no metric {missing[0]!r} so far{known}")

    def row(
        self, env_steps: int, updates: int, evaluation: Mapping[str, float], counters: Mapping[str, float]
    ) -> dict[str, float]:
        """The row of the interval that ends now, over all ranks; the next interval starts."""
        own = {
            "env_steps": env_steps,
            "updates": updates,
            **evaluation,
            **self._episodes(),
            **counters,
            **self._usage.metrics(),
            **_gpu_usage(),
            **self.timers.flush(env_steps, updates),
            **self.metrics.flush(),
        }
        return over_ranks(self.ranks.gather(own))

    def _episodes(self) -> dict[str, float]:
        own = [[*map(astuple, each)] for each in (self.recent, self.least_exploring)]
        recent, least_exploring = (
            [Trajectory(*row) for rows in each for row in rows] for each in zip(*self.ranks.gather(own), strict=True)
        )
        row = summarize(recent, "episode")
        for agent in sorted({each.agent for each in recent} - {""}):
            row |= summarize([each for each in recent if each.agent == agent], f"episode/{agent}")
        if least_exploring:
            row["episode/return_mean_least_exploring"] = statistics.fmean(each.return_ for each in least_exploring)
        if recent:
            row["episode/discounted_return_mean"] = statistics.fmean(each.discounted_return for each in recent)
            row["episode/nonzero_rewards_mean"] = statistics.fmean(each.nonzero_rewards for each in recent)
        if n_episodes := self.ranks.sum(self.n_episodes):
            row["episode/count"] = n_episodes
        return {**row, **{_mean_of(name): mean for name, mean in diagnostic_means(recent).items()}}

    def state_dict(self) -> dict[str, Any]:
        return {
            "reported": self.last,
            "return_mean": self.return_mean,
            "latest": dict(self.latest),
            "metrics": self.metrics.state_dict(),
            "n_episodes": self.n_episodes,
            "elapsed_s": self.timers.elapsed_s(),
            "recent": [list(astuple(trajectory)) for trajectory in self.recent],
            "least_exploring": [list(astuple(trajectory)) for trajectory in self.least_exploring],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last, self.return_mean = state["reported"], state["return_mean"]
        self.n_episodes, self.latest = state["n_episodes"], {}
        self.follow(state["latest"])
        self.metrics.load_state_dict(state["metrics"])
        self.timers = Timers(state["elapsed_s"])
        self.unrecorded, n = [], self.recent.maxlen
        self.recent = deque((Trajectory(*row) for row in state["recent"]), n)
        self.least_exploring = deque((Trajectory(*row) for row in state["least_exploring"]), n)


def _mean_of(diagnostic: str) -> str:
    """The metric of a diagnostic's mean over episodes: env/<name>, or episode/<policy>/return_mean."""
    metric = metric_of(diagnostic)
    return metric if metric.startswith("env/") else f"{metric}_mean"


def _gpu_usage() -> dict[str, float]:
    """Of the current GPU, if this process uses one."""
    if not torch.cuda.is_initialized():
        return {}
    found = {"memory/gpu_mb": torch.cuda.max_memory_allocated() / 1e6}
    with suppress(ModuleNotFoundError, RuntimeError):  # its load needs NVIDIA's management library
        found["system/gpu_load"] = torch.cuda.utilization() / 100
    return found


def torch_rng_states(agent: Agent) -> dict[str, Tensor]:
    """States of torch's own generators, by kind of device, from which users' networks draw (dropout)."""
    device = next(agent.parameters()).device
    own = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **own}


def load_torch_rng(states: Mapping[str, Tensor], agent: Agent) -> None:
    """Continue from saved states; a GPU's is left out if the agent is not on one now."""
    torch.set_rng_state(states["cpu"].cpu())
    device = next(agent.parameters()).device
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


class Reporting(Training):
    """What a runner reports, besides what it trains."""

    options: RunnerConfig
    evaluator: BaseEvaluator | None
    evaluations: EvaluationSchedule
    log: TrainingLog
    ranks: Ranks
    stop: StopRequest

    @property
    def step(self) -> int:
        """Where rows and snapshots stand: see `step_of`."""
        return step_of({"env_steps": self.env_steps, "updates": self.updates})

    @property
    def return_metric(self) -> str:
        """The metric that target_return and snapshot_mode=best compare."""
        return RETURN_MEAN if self.evaluator is not None else "episode/return_mean"

    @property
    def end_reason(self) -> str:
        """Why the training is complete; empty if it is not."""
        found, wanted = self.log.latest.get(self.return_metric, math.nan), self.options.target_return
        if found >= wanted - 1e-6 * abs(wanted):  # rewards are float32
            return f"{self.return_metric} {found:g} is at least runner.target_return={wanted:g}"
        if self.log.rule_holds:
            return f"stop={self.log.stop!r} holds"
        if self.now >= self.n_steps:
            return f"it has {self.now:,} of {self.n_steps:,} {self.clock.value}"
        return ""

    def evaluate(self) -> dict[str, float]:
        """The metrics of an evaluation with the current parameters; empty without an evaluator."""
        if self.evaluator is None:
            return {}
        self.evaluator.film_in(current_run().film_folder)
        return self.evaluator.evaluate(self.step, self.stop.__bool__)

    def counters(self) -> dict[str, float]:
        """Metrics of this runner since the last call."""
        return {}

    def check_parameters(self, cause: BaseException | None = None) -> None:
        """Raise Diverged if a parameter is NaN or Inf."""
        self.learners.check_parameters(f"{self.clock.value} {self.now:,}", cause)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The complete training state, for `load_state_dict`."""


def report(runner: Reporting) -> dict[str, float]:
    """Evaluate, log a row, and write a snapshot if the run's snapshot mode wants one.

    Returns the row, with the metrics of an evaluation that has ended since the one before.
    """
    row, late = dict(runner.log.latest), list[Result]()
    if runner.log.last < runner.now:  # else a stop request ended the evaluation after its row
        evaluation, late = _evaluate_if_due(runner)
        row = _log_row(runner, runner.evaluations.with_best(runner.step, evaluation))
        late = _log_late(runner, late)
    if runner.end_reason:  # which this row may have brought about: the agent is evaluated as it is now
        evaluation, more = _evaluate_if_due(runner)
        late += _log_late(runner, [*more, *([(runner.step, evaluation)] if evaluation else [])])
    with runner.log.timers("recording"):
        current_run().await_scores({runner.evaluations.awaited, *(step for step, _ in late)})
        save_snapshot(runner, final=False)
        for step, metrics in late:
            current_run().score_snapshot(step, metrics)
    return {**row, **(late[-1][1] if late else {})}


def _evaluate_if_due(runner: Reporting) -> tuple[dict[str, float], list[Result]]:
    with runner.log.timers("evaluating"):
        ending, stop = bool(runner.end_reason), runner.stop.__bool__
        runner.evaluations.updates = runner.updates
        return runner.evaluations.make(runner.now, runner.step, ending, runner.evaluate, stop)


def _log_row(runner: Reporting, evaluation: Mapping[str, float]) -> dict[str, float]:
    log, callbacks = runner.log, runner.callbacks
    counters = {**runner.sampler.counters(), **runner.learners.counters(), **runner.counters()}
    row = log.row(runner.env_steps, runner.updates, evaluation, counters)
    log.return_mean = row.get(runner.return_metric, math.nan)
    try:
        if evaluation:
            callbacks.call("on_evaluation", MappingProxyType(evaluation))
        callbacks.call("on_log", MappingProxyType(row))
    finally:  # what was measured is logged although a callback fails
        row |= log.ranks.broadcast(log.metrics.flush())  # what on_log of rank 0 logged: all follow one stop rule
        with log.timers("recording"):
            current_run().log(row)
        log.last = runner.now  # before the snapshot, which has it
        log.follow(row)
    return row


def _log_late(runner: Reporting, late: Sequence[Result]) -> list[Result]:
    """Log evaluations that were started earlier, each as a row of its own; returns them with the best score."""
    found = [(step, runner.evaluations.with_best(step, metrics)) for step, metrics in late]
    for step, metrics in found:
        place = {"env_steps": step} if runner.env_steps or not step else {"env_steps": 0, "updates": step}
        current_run().log_evaluation({**place, **metrics})
        runner.log.follow(metrics)
        runner.callbacks.call("on_evaluation", MappingProxyType(metrics))
    return found


def save_snapshot(runner: Reporting, final: bool) -> None:
    """Write a snapshot of all ranks if the run's snapshot mode wants one; `final`: the training ends.

    Raises:
        RecordError: the disk is full or the directory is gone, and the run must stop then.
    """
    run, ranks, step = current_run(), runner.ranks, runner.step

    def write_others(folder: Path) -> list[RankEntry]:
        """Every rank but the first writes its state into the folder of the snapshot."""
        folder = Path(ranks.broadcast(str(folder)))
        own = [write_rank_state(folder, ranks.rank, runner.state_dict())] if ranks.rank else []
        return [part for parts in ranks.gather(own) for part in parts]

    runner.log.record_episodes()  # of all env_steps of the snapshot
    if not ranks.broadcast(run.snapshot_due(step, runner.updates, final)):
        return
    updates, row = runner.updates, runner.log.latest
    is_of_now = runner.now == runner.log.last and row.get("updates", updates) == updates
    return_mean = runner.log.return_mean if is_of_now else math.nan  # of these parameters, not of some before
    with runner.stop.protect():
        path = run.snapshot(
            runner.state_dict, runner.env_steps, return_mean, updates=updates, final=final, other_ranks=write_others
        )
    if ranks.broadcast(path is not None):
        runner.callbacks.call("on_snapshot", runner.env_steps)


def write_result(runner: Reporting, how: str, why: str) -> None:
    """Write result.json: how and why the training ended, and its scores.

    `how`: completed, stopped (by a callback), out_of_time, interrupted or failed.
    """
    evaluations, latest = runner.evaluations, runner.log.latest
    scored = runner.return_metric == RETURN_MEAN and math.isfinite(evaluations.best)  # not of those before a resume
    current_run().write_result(
        {
            "ended": how,
            "reason": why,
            "env_steps": runner.env_steps,
            "updates": runner.updates,
            "elapsed_s": round(runner.log.timers.elapsed_s(), 3),
            "score": runner.return_metric,
            "final_score": latest.get(runner.return_metric),
            "final_env_steps": evaluations.final_env_steps if scored else runner.env_steps,
            "best_score": evaluations.best if scored else None,
            "best_env_steps": evaluations.best_env_steps if scored else None,
            "metrics": latest,
        }
    )


def save_after_error(runner: Reporting, error: BaseException) -> None:
    """Write a last snapshot; if that fails too, only log it: `error`, the first one, is the one to report.

    Raises:
        Diverged: a parameter is NaN or Inf.    PartError: the error is that of sys.exit.
    """
    runner.check_parameters(error)
    if runner.ranks.world_size == 1:  # a snapshot needs all ranks, and the others may not save now
        try:
            save_snapshot(runner, final=True)
        except (RecordError, PartError) as another:
            _logger.warning("%s", another)
    if isinstance(error, SystemExit):  # which would end the run midway without a word
        raise PartError(
            f"sys.exit({error.code}) was called at {runner.clock.value} {runner.now:,} of {runner.n_steps:,}, by the "
            f"environment, a callback or a network; raise an exception instead"
        ) from error


def describe_saved(step: int) -> str:
    """Whether a run that was stopped at `step` can continue."""
    newest = current_run().newest_snapshot()
    if newest and (last := env_steps_of(Path(newest))) < step:
        return f"no snapshot written; the last is of step {last:,}"
    return "snapshot written; resume= continues the run" if newest else "no snapshot written"


def describe_resumed(
    reasons: Sequence[str], unsaved: Sequence[str] = (), of_callbacks: Sequence[str] = (), held: bool = False
) -> str:
    """What the log says.

    Args:
        reasons: of each environment, why its episode starts anew, empty where it continues.
        unsaved: state of algorithms that was not saved.    of_callbacks: that of callbacks, or was not loaded.
        held: whether an algorithm had a batch, after an error, from which it had not learned, or not to the end; or an
            update that was not finished.
    """
    lost, anew = [reason for reason in reasons if reason], []
    if lost:
        why = "; ".join(dict.fromkeys(lost))
        anew.append(f"{len(lost)} of {len(reasons)} running episodes start anew ({why})")
    if of_all := [*unsaved, *of_callbacks]:
        anew.append(f"{', '.join(of_all)} begin anew, which no snapshot restores")
    if held:
        anew.append("the batch or update that an error interrupted is lost")
    if not anew:
        return "the run continues exactly, running episodes included"
    going_on = "what `saved` names continues" if unsaved else "parameters, optimizer and counts continue"
    return f"{going_on}; {'; '.join(anew)}"
