"""Ray Tune: `trainable(settings)`, a function for `tune.Tuner` that trains, reports rows of the log, and resumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import rlframe
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.core.parts import dotted
from rlframe.record.rank_state import unused_path
from rlframe.record.snapshot import read_meta, resolve_snapshot

try:
    from ray import tune
except ImportError:
    raise ConfigError('Ray Tune is not installed: pip install "rlframe[tune]"') from None

_OF_TRIALS = {  # what a trial does differently, unless its settings say so
    "affinity": "none",  # Ray tells the trials how many cores they have, not which
    "snapshot_mode": "none",  # Tune keeps the checkpoints
    "loggers": (),  # Tune logs what is reported
    "log_level": "WARNING",
}
_OF_TUNE = {  # settings that are not a trial's, and what to use
    "log_dir": "storage_path of tune.RunConfig",
    "resume": "tune.Tuner.restore, or init= for trained weights",
}


def trainable(
    settings: Mapping[str, Any], metrics: Sequence[str] = (), checkpoint_every: int = 1
) -> Callable[[dict[str, Any]], None]:
    """A function for tune.Tuner that trains a run with these settings and those of `param_space`, which win.

        tuner = tune.Tuner(
            trainable({"algo": "ppo", "env": "CartPole-v1", "runner.n_steps": 100_000}),
            param_space={"algo.learning_rate": tune.loguniform(1e-5, 1e-2), "seed": tune.grid_search([0, 1])},
            tune_config=tune.TuneConfig(metric="eval/return_mean", mode="max"),
        )

    Settings are those of rlframe.train. A report is a row of the log, with the newest value of metrics that the row
    does not have; `time_attr` of a scheduler and `stop` may be any of them, such as env_steps. A checkpoint is the
    complete state: the trial continues from it bit for bit, and from that of another trial with its own numbers in the
    algorithm (see rlframe.restore). A trial has one torch thread for each of its CPUs. It is recorded in its own
    directory, in from_<env_steps>/run_0 for each of its starts.

    Args:
        metrics: rows are reported once all of these are known; default: the mean return, eval/return_mean, or
            episode/return_mean in a run that does not evaluate. Schedulers fail on a report without their metric.
        checkpoint_every: reports for each checkpoint, the last report has one anyway, unless the run is stopped
            after it, between two rows; 0: none. Trials that PBT, PB2 or HyperBand pause go back to their last
            checkpoint, and so need one at each report.
    Raises:
        ConfigError: in the trial, before training: a setting is wrong. At its end: it never had one of the metrics.
    """
    given = dict(settings)

    def rlframe_run(config: dict[str, Any]) -> None:  # trials have its name
        _train_trial(merged(given, config), metrics, checkpoint_every)

    return rlframe_run


def merged(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a trial, by flat keys: those of all trials, and over them those that Tune has drawn.

    Copies of their objects, since Tune sends its own on, and a process may run one trial after the other.
    """
    both = {**_flat(settings), **_flat(config)}
    for key, other in _OF_TUNE.items():
        if key in both:
            raise ConfigError(f"{key}={both[key]!s:.200} is not for trials of Ray Tune: use {other}")
    return deepcopy(both)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys with plain numbers; searchers may draw those of NumPy."""
    found = {key: x.item() if isinstance(x, np.generic) else x for key, x in dotted(settings.items()).items()}
    return {"runner.n_steps" if key == "n_steps" else key: x for key, x in found.items()}


def for_cpus(settings: Mapping[str, Any], n_cpus: float) -> dict[str, Any]:
    """The settings of a trial that has so many CPUs."""
    n = max(1, int(n_cpus))
    sampler: dict[str, Any] = {"sampler": "serial"} if n == 1 else {"sampler": "auto", "sampler.n_workers": n}
    chosen = "sampler" in settings or "sampler.n_workers" in settings
    return {**_OF_TRIALS, "threads": n, **({} if chosen else sampler), **settings}


def _train_trial(settings: Mapping[str, Any], metrics: Sequence[str], checkpoint_every: int) -> None:
    context = tune.get_context()
    n_cpus = context.get_trial_resources().bundles[0].get("CPU", 1.0)
    with _started(for_cpus(settings, n_cpus), Path(context.get_trial_dir())) as run:
        latest = _finite(run.runner.log.latest)  # of the row of the checkpoint
        wanted = metrics or [run.runner.return_metric]
        n_reports, row = 0, {}
        for row in run:
            latest |= _finite(row)
            if any(name not in latest for name in wanted):
                continue
            n_reports += 1
            is_last = run.runner.end_reason or run.runner.stop_requested()
            if checkpoint_every and (n_reports % checkpoint_every == 0 or is_last):
                with TemporaryDirectory(prefix="rlframe_tune_") as folder:
                    run.save(folder)
                    tune.report(dict(latest), checkpoint=tune.Checkpoint.from_directory(folder))
            else:
                tune.report(dict(latest))
    if missing := [name for name in wanted if row and name not in latest]:
        raise ConfigError(
            f"Ray Tune waits for the metric {missing[0]}, which this run never had{nearest(missing[0], latest)}; it "
            f"has {', '.join(latest)}"
        )


def _started(settings: Mapping[str, Any], directory: Path) -> Any:
    """The trial's run, new or from its checkpoint, recorded below the trial's directory."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return rlframe.build(log_dir=_unused(directory, 0), **settings)
    with checkpoint.as_directory() as folder:
        env_steps = read_meta(resolve_snapshot(Path(folder)))["env_steps"]
        again = {key: value for key, value in settings.items() if key != "experiment"}  # the state's config has it
        return rlframe.restore(folder, log_dir=_unused(directory, env_steps), trust=True, **again)


def _unused(directory: Path, env_steps: int) -> Path:
    return unused_path(directory / f"from_{env_steps}", ".")


def _finite(row: Mapping[str, float]) -> dict[str, float]:
    """Without metrics that are NaN, which schedulers cannot compare."""
    return {name: value for name, value in row.items() if not math.isnan(value)}
