"""stack=true: the seeds of a setting trained in one process, each a run of its own, whose updates are made at once."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import chz

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.core.errors import ConfigError, Interrupted, ReadableError, printable
from rlframe.envs.pettingzoo import find_multi_agent
from rlframe.experiment import hardware
from rlframe.experiment.compilation import Placing
from rlframe.experiment.config import Experiment
from rlframe.experiment.job import Job, read_job
from rlframe.experiment.settings import to_flat
from rlframe.experiment.train import train_placed
from rlframe.experiment.trust import foreign
from rlframe.kernels.device import choose_device
from rlframe.models.encoders import has_images
from rlframe.record.loggers import DEFAULT_LOGGERS
from rlframe.record.messages import speaking_as
from rlframe.record.snapshot import list_snapshots
from rlframe.runners import MinibatchRl
from rlframe.samplers import auto
from rlframe.system.affinity import pinned
from rlframe.system.env_vars import env_vars_set
from rlframe.system.machine import retain_freed_memory
from rlframe.system.meeting import Meeting
from rlframe.system.signals import snapshot_grace_s, stop_request
from rlframe.updates.compiled import CompileChoice, has_updates
from rlframe.updates.stacked import REMEDY, UpdateStack

_logger = logging.getLogger("rlframe")


class SeedsFailed(ReadableError):
    """Some of the runs of a stack failed; the others have come to their end."""


def check_stackable(c: Experiment) -> None:
    """Raise ConfigError if the seeds of this experiment cannot be trained as a stack."""
    flat, slow = to_flat(c), "where ten seeds in a stack are no faster than one by one (or add device=cpu)"
    for what, is_so in {
        f"world_size={c.world_size}": c.world_size > 1,
        f"learners={c.learners}": c.learners != 1,
        f"runner={flat['runner']}": c.runner.runner_class is not MinibatchRl,
        f"sampler={flat['sampler']}": not (c.sampler.undecided or c.sampler.in_process),
        f"device={c.device}, {slow}": choose_device(c.device).type != "cpu",
        f"eval.n_workers={c.eval.n_workers}": c.eval.n_workers > 0,
        f"model.memory={c.model.memory}": c.model.memory != "none",
        **{f"{key}={value}": value for key, value in flat.items() if key.endswith("dropout")},
        f"reward.bonus={flat['reward.bonus']}": flat["reward.bonus"] != "none",
        "what is on Ray": c.on_ray(),
        "environments of several agents": c.agents.given() or find_multi_agent(c.env),
        f"loggers=[{','.join(c.loggers)}]": set(c.loggers) - set(DEFAULT_LOGGERS),
    }.items():
        if is_so:
            _refuse(what)


def _refuse(what: str) -> NoReturn:
    raise ConfigError(f"stack=true is not for {what}; {REMEDY}")


def _seat(number: int, stack: UpdateStack) -> Placing:
    """Of one of the runs of a stack."""

    def place(agent: Agent) -> None:
        if agent.agents():
            _refuse("environments of several agents")
        observation_space: Any = agent.observation_space
        if has_images(observation_space):
            _refuse("observations that are images, whose updates it would not make faster")
        stack.place(agent, number)

    def compiled(choice: CompileChoice, algo: Algorithm) -> CompileChoice:
        if not has_updates(algo):
            _refuse(f"{type(algo).__name__}, which makes its updates without updates_of (rlframe.updates.compiled)")
        return replace(stack.agreed(choice), prepare=partial(stack.prepare, number), shared=True)

    return Placing(stack.meeting.n, place, compiled)


def read_stack(words: Mapping[str, str], seeds: Sequence[str]) -> list[Job]:
    """The job of each seed, from the words of a launch without one; a run that has a snapshot is resumed.

    Raises:
        ConfigError: a key or value is wrong, or it cannot be stacked.
    """
    if not words.get("log_dir") or not all(seed.isdecimal() for seed in seeds):
        given = ",".join(seeds)
        raise ConfigError(
            f"stack={given}: several seeds train at once with stack=true; add repeats=N or sweep.seed=0,1,2"
        )
    trusts = {"trust": "true"} if words.get("trust", "").lower() == "true" or foreign(words) else {}
    # It may have been shorter before, and on another slot.
    now = {key: x for key, x in words.items() if key in ("runner.n_steps", "affinity")}
    jobs = []
    for seed in seeds:
        run = Path(words["log_dir"]) / f"run_{seed}"
        resumes = bool(list_snapshots(run / "snapshot"))
        own = {"resume": str(run), **now, **trusts} if resumes else {**words, "seed": seed, "run_ID": seed}
        jobs.append(read_job(own))
        check_stackable(jobs[-1].experiment)
    return jobs


def run_stack(jobs: Sequence[Job]) -> None:
    """Train a stack of jobs to their ends, and print what became of each.

    Raises:
        ConfigError: their parts do not fit together.    Interrupted: a signal stopped them; snapshots were written.
        SeedsFailed: some failed.
    """
    ends = zip(jobs, train_stack(jobs), strict=True)
    failed = {job.experiment.seed: error for job, error in ends if error is not None}
    errors = [*failed.values()]
    for kind in (ConfigError, Interrupted):
        for error in errors:
            if isinstance(error, kind):
                raise error
    for seed, error in failed.items():
        print(printable(f"seed {seed}: {type(error).__name__}: {error}"), file=sys.stderr)
    if errors:
        raise SeedsFailed(f"{len(errors)} of {len(jobs)} seeds failed, the first: {errors[0]}") from errors[0]


def train_stack(jobs: Sequence[Job]) -> list[BaseException | None]:
    """Train jobs that differ in their seeds alone, to their ends: each in a thread, one of which runs at a time.

    Returns the error that ended each, or None.
    """
    retain_freed_memory()
    first = _serial(jobs[0].experiment)
    resolved = hardware.resolve(first, threads=jobs[0].threads)
    stack, level = UpdateStack(Meeting(len(jobs))), _logger.level
    errors: list[BaseException | None] = [None for _ in jobs]
    with (
        env_vars_set(first.env_vars),
        pinned(resolved.affinity.master),
        stop_request(snapshot_grace_s() * len(jobs), first.runner.max_time_s) as stop,
    ):

        def train(number: int, job: Job) -> None:
            stack.meeting.begin(number)
            try:
                own = _serial(job.experiment)
                own = chz.replace(own, precision=resolved.experiment.precision, eval=resolved.experiment.eval)
                with speaking_as(f"seed {job.experiment.seed}"):
                    placed = replace(resolved, experiment=own)
                    train_placed(job, placed, _seat(number, stack), stop, console=number == 0)
            except BaseException as error:
                errors[number] = error
            finally:
                stack.meeting.leave(number)

        threads = [
            threading.Thread(None, copy_context().run, f"seed {job.experiment.seed}", (train, number, job), daemon=True)
            for number, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    _logger.setLevel(level)
    return errors


def _serial(experiment: Experiment) -> Experiment:
    """With sampler=serial where it is auto: all samplers give the same samples."""
    sampler = experiment.sampler
    if not sampler.undecided:
        return experiment
    return chz.replace(experiment, sampler=auto.candidates(sampler, 1)["serial"])
