"""Search: trials whose settings Optuna chooses by the scores of those before; `search.KEY=`, `n_runs=`.

A trial is a setting of a study, with one run for each seed. The journal of Optuna is in the study's directory, so that
the same command goes on where a search was stopped.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.analysis.aggregates import iqm
from rlframe.analysis.trials import SEARCH_JOURNAL
from rlframe.core.command_line import KeyValues
from rlframe.core.config import check_one_of, nearest
from rlframe.core.errors import ConfigError, pluralize
from rlframe.core.files import drop_torn_line, open_to_append
from rlframe.core.seeding import Role, seed_int
from rlframe.experiment.study_keys import SEARCH_KEYS
from rlframe.record.metrics import METRICS, signed, without_learner
from rlframe.study.added import AddedFile, warn
from rlframe.study.plan import MAX_RUNS, PlannedRun
from rlframe.study.queue import MoreRuns
from rlframe.study.record import DONE, PRUNED, RETURNS, Status, logged_columns, metric_of, size_and_time
from rlframe.study.search_space import Domain, read_space, word_of

PBT = "pbt"  # the searcher that is in rlframe.study.pbt
_WILCOXON_SEEDS = 5  # the first number of seeds of which the test, at p < 0.1, may save one: it needs four
_WAITS = 3  # trials whose logs may lack the metric before any has it
_SEARCHERS, _PRUNERS = ("tpe", "random", "cmaes", PBT), ("none", "median", "asha", "wilcoxon")


@dataclass(frozen=True)
class SearchPlan:
    """What is searched, and how."""

    space: Mapping[str, Domain]  # by key
    n_trials: int
    seeds: tuple[int, ...]  # of each trial
    searcher: str = "tpe"
    pruner: str = "none"
    metric: str = RETURNS[0]  # -metric if lower is better
    interval_steps: int = 1  # env_steps between values, as planned: pruners compare trials interval by interval

    @classmethod
    def read(cls, words: Mapping[str, str], seeds: Sequence[int]) -> SearchPlan:
        """That of the words of a study; raises ConfigError for a wrong one."""
        given = KeyValues(f"{key}={words[key]}" for key in SEARCH_KEYS if key in words)
        space = read_space(words)
        n_trials = given.count("n_runs", 32)
        if not 1 <= n_trials <= MAX_RUNS:
            raise ConfigError(f"n_runs={n_trials} must be from 1 to {MAX_RUNS:,} trials")
        searcher, pruner = given.text("searcher", _SEARCHERS[0]), given.text("pruner", _PRUNERS[0])
        check_one_of("searcher", searcher, _SEARCHERS)
        check_one_of("pruner", pruner, _PRUNERS)
        return cls(space, n_trials, tuple(seeds), searcher, pruner, metric_of(given))

    def check_seeds(self) -> None:
        """Raise ConfigError if one is there twice, or there are too few for the pruner."""
        if twice := [seed for seed in self.seeds if self.seeds.count(seed) > 1]:
            raise ConfigError(f"sweep.seed= has the seed {twice[0]} {self.seeds.count(twice[0])} times; give each once")
        if self.pruner == "wilcoxon" and len(self.seeds) < _WILCOXON_SEEDS:
            raise ConfigError(
                f"pruner=wilcoxon compares trials seed by seed, and no result of {pluralize(len(self.seeds), 'seed')} "
                f"is clear enough to save one; use repeats={_WILCOXON_SEEDS} or more, or pruner=median"
            )

    def values(self, words: Mapping[str, str]) -> dict[str, Any]:
        """Values of the space from their words, for a trial that is added; raises ConfigError for wrong ones."""
        for key in words:
            if key not in self.space:
                known = tuple(self.space)
                raise ConfigError(f"{key:.60} is not searched; a trial sets {', '.join(known)}{nearest(key, known)}")
        return {key: self.space[key].value(key, text) for key, text in words.items()}

    def describe(self) -> str:
        """The space, for the preview of a study."""
        lines = [f"  {key:<30} {each}" for key, each in self.space.items()]
        how = f"{self.n_trials} trials of {len(self.seeds)} seeds each, by {self.searcher}, pruner {self.pruner}"
        return "\n".join([f"search: {how}, for {self.metric}", *lines])


MakeRuns = Callable[[str, Mapping[str, str]], Sequence[PlannedRun]]  # of a trial, from its name and its words


class Search(MoreRuns):
    """The trials of a study, which a queue asks for runs."""

    def __init__(self, plan: SearchPlan, directory: Path, make_runs: MakeRuns) -> None:
        """Begin, or go on with the journal in `directory`, which exists.

        Raises:
            ConfigError: Optuna or what it needs is missing, or the journal is damaged, or that of another search.
        """
        self.plan, self._make_runs = plan, make_runs
        self._column, self._sign = signed(plan.metric)
        with _journal():
            self._optuna = check_installed(plan)
            self._study = self._opened(directory / SEARCH_JOURNAL)
            self._distributions = {key: each.made() for key, each in plan.space.items()}
        self._trials: dict[str, Any] = {}  # that are running, by setting
        self._runs: dict[str, list[PlannedRun]] = {}
        self._scores: dict[str, dict[int, float]] = {}  # by setting and run_ID; nan: pruned
        self._reasons: dict[str, str] = {}  # why a trial is pruned, by setting
        self._rows: dict[str, int] = {}  # that were reported of a run
        self._seen: dict[str, tuple[int, int]] = {}  # size and time of a run's log when it was last read
        self._columns: dict[str, None] = {}  # of all logs
        self._n_done = 0  # runs
        self._added, self._queued = AddedFile(directory), 0  # trials that were added and wait in the journal

    def _opened(self, path: Path) -> Any:
        optuna, plan = self._optuna, self.plan
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)  # of a queue that was killed; the study has its own
        with open_to_append(path) as file:
            drop_torn_line(file)
        try:
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
        except (KeyError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{path} is damaged: {what:.200}; restore it, or use another log_dir") from None
        pruners = optuna.pruners
        pruner = {
            "none": pruners.NopPruner,
            "median": pruners.MedianPruner,
            "asha": lambda: pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
            "wilcoxon": pruners.WilcoxonPruner,
        }[plan.pruner]()
        direction = "maximize" if self._sign > 0 else "minimize"
        of = {"storage": storage, "study_name": "search", "direction": direction, "load_if_exists": True}
        study = optuna.create_study(pruner=pruner, **of)
        study.sampler = self._sampler(len(study.get_trials(deepcopy=False)))
        known = {**study.user_attrs}
        space = {key: [each.kind, *each.values] for key, each in plan.space.items()}
        for name, value in {"space": space, "metric": plan.metric, "seeds": [*plan.seeds]}.items():
            if known.get(name, value) != value:
                other = f"another {name}" if name != "seeds" else "other seeds"
                raise ConfigError(f"{path} is a search of {other}, {known[name]}; use another log_dir")
            study.set_user_attr(name, value)
        return study

    def _sampler(self, n_trials: int) -> Any:
        """One that goes on after so many trials, and does not draw those of the start again."""
        seed, samplers = seed_int(self.plan.seeds[0], Role.ALGO, n_trials), self._optuna.samplers
        return {
            "tpe": lambda: samplers.TPESampler(seed=seed),
            "random": lambda: samplers.RandomSampler(seed=seed),
            "cmaes": lambda: samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False),
        }[self.plan.searcher]()

    def started(self) -> list[PlannedRun]:
        """The runs of all trials so far, in order."""
        with _journal():
            for frozen in self._study.get_trials(deepcopy=False):
                if frozen.state == self._optuna.trial.TrialState.WAITING:
                    continue
                running = frozen.state == self._optuna.trial.TrialState.RUNNING
                trial = self._continued(frozen._trial_id) if running else None
                self._add(frozen.number, (trial or frozen).params, trial)
        return [run for runs in self._runs.values() for run in runs]

    def _continued(self, trial_id: int) -> Any:
        """A trial that goes on; what a queue that was killed had not yet drawn is drawn now."""
        trial = self._optuna.trial.Trial(self._study, trial_id)
        for key, each in self._distributions.items():
            trial._suggest(key, each)
        return trial

    def _add(self, number: int, values: Mapping[str, Any], trial: Any) -> list[PlannedRun]:
        """The runs of a trial; None: it has ended."""
        setting = f"trial_{number}"
        runs = self._make_runs(setting, {key: word_of(value) for key, value in values.items()})
        self._runs[setting], self._scores[setting] = list(runs), {}
        if trial is not None:
            self._trials[setting] = trial
        return list(runs)

    def more(self) -> list[PlannedRun]:
        """The runs of the next trial, first of those that were added; none if there are enough trials.

        Raises ConfigError if a run has ended and the metric is not in its log.
        """
        self._check_metric()
        with _journal():
            self._queue_added()
            if not self._is_open():
                return []
            trial = self._study.ask(self._distributions)
        self._queued = max(0, self._queued - 1)
        return self._add(trial.number, trial.params, trial)

    def has_more(self) -> bool:
        return self._is_open() or self._added.has_new()

    def _is_open(self) -> bool:
        return bool(self._queued) or len(self._runs) < self.plan.n_trials

    def _queue_added(self) -> None:
        """Tell Optuna of the trials that were added since the last time; each is in the journal once."""
        if not (lines := self._added.new()):
            return
        known = {each.user_attrs.get("added") for each in self._study.get_trials(deepcopy=False)}
        for added in lines:
            try:
                values = self.plan.values(added.arguments)
            except ConfigError as error:
                warn(str(error))
                continue
            if added.token not in known:
                self._study.enqueue_trial(values, user_attrs={"added": added.token})
        waiting = [self._optuna.trial.TrialState.WAITING]
        self._queued = len(self._study.get_trials(deepcopy=False, states=waiting))

    def finished(self, run: PlannedRun, status: Status) -> None:
        """Note a run that has ended, and tell Optuna of the trial if it was the last one.

        A trial of which a run fails stays open: the run is tried again when the study is continued. One without a score
        has failed for Optuna.
        """
        trial = self._trials.get(run.setting)
        if trial is None or status.state not in (DONE, PRUNED):
            return
        scores = self._scores[run.setting]
        scores[run.run_ID] = self._score(run) if status.state == DONE else math.nan
        self._n_done += status.state == DONE
        if status.state == PRUNED:  # by this search, or before it was continued
            self._reasons.setdefault(run.setting, status.reason)
        with _journal():
            if self.plan.pruner == "wilcoxon" and math.isfinite(scores[run.run_ID]):
                trial.report(scores[run.run_ID], self.plan.seeds.index(run.run_ID))
                if trial.should_prune():
                    self._reasons[run.setting] = "pruned: worse than the best trial, by Wilcoxon's test over seeds"
            if len(scores) < len(self._runs[run.setting]):
                return
            self._tell(run.setting, trial)

    def _tell(self, setting: str, trial: Any) -> None:
        values, states = np.array(list(self._scores[setting].values())), self._optuna.trial.TrialState
        has_all = np.isfinite(values).all() and self.plan.pruner != "wilcoxon"  # each ended before it was stopped
        if setting in self._reasons and not has_all:
            self._study.tell(trial, state=states.PRUNED)
        elif np.isfinite(values).all():
            self._study.tell(trial, float(iqm([values])))
        else:
            self._study.tell(trial, state=states.FAIL)
        del self._trials[setting]

    def _score(self, run: PlannedRun) -> float:
        values, _, _ = self._values(run)
        return float(values[-1]) if len(values) else math.nan

    def _values(self, run: PlannedRun) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The metric of a run in its log so far, in which interval each value is, and which came after an update."""
        columns = logged_columns(run)
        self._columns |= dict.fromkeys(columns)
        values = columns.get(self._column, np.empty(0))
        updates, env_steps = (columns.get(name, np.full(len(values), np.nan)) for name in ("updates", "env_steps"))
        learned = np.where(np.isnan(updates), env_steps, updates) > 0  # the row of a late evaluation has no updates
        steps = np.nan_to_num(env_steps if np.nansum(env_steps) else updates)  # a run from data has updates alone
        found = np.isfinite(values)
        return values[found], np.maximum(1, steps[found] // self.plan.interval_steps).astype(int), learned[found]

    def reason_to_stop(self, run: PlannedRun) -> str:
        """Why a run that waits or goes on is not worth its time; empty if it is."""
        trial = self._trials.get(run.setting)
        if trial is None or run.setting in self._reasons or self.plan.pruner not in ("median", "asha"):
            return self._reasons.get(run.setting, "")
        if run.run_ID == self.plan.seeds[0]:  # the other seeds go on if the first does
            with _journal():
                self._report(run, trial)
        return self._reasons.get(run.setting, "")

    def _report(self, run: PlannedRun, trial: Any) -> None:
        seen = size_and_time(run.directory / "progress.csv")
        if seen == self._seen.get(run.name):
            return
        self._seen[run.name] = seen
        (values, intervals, learned), n = self._values(run), self._rows.get(run.name, 0)
        self._rows[run.name] = len(values)
        for k in range(n, len(values)):
            if not learned[k]:  # it says nothing about the settings
                continue
            trial.report(float(values[k]), int(intervals[k]))
            if trial.should_prune():  # after each value: asha keeps the newest as that of its rung
                self._reasons[run.setting] = f"pruned after {k + 1} values of {self._column}, by {self.plan.pruner}"
                return

    def _check_metric(self) -> None:
        """One that rlframe knows may come with other settings, and is waited for until some trials have ended."""
        n_waits = _WAITS * len(self.plan.seeds) if without_learner(self._column) in METRICS else 1
        if self._n_done >= n_waits and self._columns and self._column not in self._columns:
            hint = nearest(self._column, self._columns)
            raise ConfigError(f"metric={self.plan.metric} is not in the logs{hint}; begin anew with another")

    def describe_best(self) -> str:
        """The score and the words of the best trial; raises ConfigError if the metric is not in the logs."""
        self._check_metric()
        complete = self._study.get_trials(deepcopy=False, states=[self._optuna.trial.TrialState.COMPLETE])
        if not complete:
            lacks = self._n_done > 0 and self._column not in self._columns
            return "no trial is complete" + f": no log has {self._column}" * lacks
        found = max(complete, key=lambda each: self._sign * each.value)
        words = " ".join(f"{key}={word_of(value)}" for key, value in found.params.items())
        return f"best: trial_{found.number}, {self._column} {found.value:.6g}: {words}"


def check_installed(plan: SearchPlan) -> Any:
    """Optuna, and what it needs for this plan."""
    needed = {"cmaes": "cmaes"}.get(plan.searcher, ""), {"wilcoxon": "scipy"}.get(plan.pruner, "")
    try:
        import optuna
        import optuna.storages.journal

        for name in filter(None, needed):
            __import__(name)
    except ImportError as error:
        raise ConfigError(f'search. needs {error.name}: pip install "rlframe[search]"') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def _journal() -> Iterator[None]:
    """Around calls of Optuna, most of which write its journal: without its warnings of what it calls experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{SEARCH_JOURNAL} cannot be written: {error.strerror}; repeat the command then"
            ) from error
