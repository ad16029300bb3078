"""python -m rlframe.launch [key=value ...]: train a run, resume one, or queue a sweep of runs."""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command: during imports Ctrl-C shows no traceback

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlframe.core.command_line import KeyValues, ending_at_ctrl_c, exit_with, run_command
from rlframe.core.errors import ConfigError, Interrupted, printable
from rlframe.experiment.presets import competing_work, early_env_vars, preset_names, with_default
from rlframe.system.env_vars import env_vars_set
from rlframe.system.machine import gc_paused, limit_threads

if TYPE_CHECKING:
    from rlframe.experiment.job import Job

_USAGE = """\
usage: python -m rlframe.launch [key=value ...]

  python -m rlframe.launch                                  PPO on CartPole-v1 (experiment=classic/ppo_cartpole)
  python -m rlframe.launch experiment=atari/ppo_pong seed=1  a preset; the command line overrides it
  python -m rlframe.launch experiment=RUN_DIR/params.json log_dir=DIR   a run again, from its config
  python -m rlframe.launch env=Pendulum-v1 algo=ppo algo.learning_rate=1e-3 runner.n_steps=2e5
  python -m rlframe.launch resume=RUN_DIR                    continue a run
  python -m rlframe.launch resume=s3://bucket/RUN_DIR        continue one that sync= has copied, on this machine
  python -m rlframe.launch init=RUN_DIR env=...              a new run from trained weights
  python -m rlframe.launch algo=sac --help                   the keys of what is named, their values and meanings
  python -m rlframe.launch experiment=atari/ppo_pong --show  every key, its value, and where that comes from
  python -m rlframe.launch --list algos                      or: optimizers bonuses envs presets samplers runners ...
  python -m rlframe.launch repeats=3 sweep.algo.learning_rate=1e-3,3e-4 log_dir=DIR affinity=2cpr
                                                             a run for each combination, queued on slots of two cores;
                                                             the same command, or resume=DIR, continues the study
  python -m rlframe.launch experiment=my_study.yaml log_dir=DIR   a study from a file (docs/guides/studies.md)

keys besides the settings below:
  experiment=NAME      a preset, the path of a YAML file, or of a run's params.json; auto: the preset for algo= and env=
  resume=RUN_DIR       continue a run or a study; resume=URI: a run that was copied there by sync=
  trust=true           allow a run's params.json to name code that is not part of rlframe (module:Class, ./file.py);
                       code named on the command line needs no trust
  dry_run=true         print the config and the processes, and stop
  tune_sampler=true    measure every sampler and use the fastest
  traceback=true       show the traceback of an error
  retries=0            times that a failed run is restarted from its snapshot
keys of a study:
  sweep.KEY=V1,V2      the values of a key, in every combination with other keys (lists in brackets)
  zip.KEY=V1,V2        the values of keys that change together: as many for each
  repeats=N            N seeds: seed, seed + 1, ...
  "search.KEY=uniform(LOW,HIGH)"   a value that is searched; or loguniform, int, logint, choice(V1,V2)
  n_runs=32            trials of a search, each with all seeds
  searcher=tpe         tpe | random | cmaes | pbt, population-based training of n_runs=8 members
  pruner=none          none | median | asha, on the way of the first seed | wilcoxon, over seeds
  pbt.interval_steps=N   env_steps after which members copy others; 0.05 of runner.n_steps
  pbt.quantile=0.25    the part of the members that copy, and that are copied
  pbt.resample=0.25    probability that a copied setting is drawn anew, not moved
  metric=eval/return_mean   the score of a search; -metric: lower is better
  stall_s=3600         kill a run that logs nothing for so many seconds; 0: never
  stack=false          true: the seeds of a setting are trained in one process, and their updates made at once
  seeds=innermost      innermost: all seeds of a setting first | outermost: all settings with the first seed first
"""

_NOT_OF_RUNS = ("dry_run", "retries", "stall_s", "stack", "seeds")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status: 0, 1 the run failed, 2 bad settings, 128 + n stopped by signal n."""
    flag = next((word for word in argv if word in ("-h", "--help", "help", "--show", "--list")), "")
    if not flag:
        return run_command(_launch, argv)
    shown = {"--show": _show, "--list": _list}.get(flag, _help)
    return run_command(shown, [word for word in argv if word != flag])


def _help(argv: list[str]) -> int:
    with gc_paused(), ending_at_ctrl_c():
        from rlframe.experiment.job import read_job
        from rlframe.experiment.keys import describe_keys

    described = describe_keys(read_job(_of_runs(argv)).experiment)
    print(f"{_USAGE}\npresets: {', '.join(preset_names())}\n\n{described}")
    return 0


def _show(argv: list[str]) -> int:
    with gc_paused(), ending_at_ctrl_c():
        from rlframe.experiment.job import read_job
        from rlframe.experiment.keys import show_keys

    job = read_job(with_default(_of_runs(argv)))
    print(show_keys(job.experiment, job.sources))
    return 0


def _of_runs(argv: list[str]) -> dict[str, str]:
    """The words that are settings of the run, or of all runs of a study, and whether its config is trusted."""
    with gc_paused(), ending_at_ctrl_c():
        from rlframe.study.plan import has_grid
        from rlframe.study.sweep import base_words

    words = KeyValues(argv).remaining
    words = base_words(words) if has_grid(words) else words
    return {key: value for key, value in words.items() if key not in _NOT_OF_RUNS}


def _list(argv: list[str]) -> int:
    with gc_paused(), ending_at_ctrl_c():
        from rlframe.experiment.keys import KINDS, list_parts

    if len(argv) != 1:
        raise ConfigError(f"--list needs one word: {', '.join(KINDS)}")
    print(list_parts(argv[0]))
    return 0


def _launch(argv: list[str]) -> int:
    words = KeyValues(argv)  # before the imports that load torch, so that a malformed word fails at once
    with env_vars_set(early_env_vars(words.remaining)):  # NumPy, torch and other libraries read some when they load
        return _launch_with(words)


def _launch_with(words: KeyValues) -> int:
    limit_threads(competing_work(words.remaining))
    with gc_paused(), ending_at_ctrl_c():
        from rlframe.core.config import split_values
        from rlframe.experiment.fetch import with_fetched
        from rlframe.experiment.job import check_words, place_job, read_job
        from rlframe.experiment.stacked import read_stack, run_stack
        from rlframe.experiment.train import describe_job
        from rlframe.record.remote import is_uri
        from rlframe.study.process import run_with_retries
        from rlframe.study.sweep import is_study, run_sweep, single_run
        from rlframe.system.distributed import rank_from_environment

    if is_study(words.remaining):
        return run_sweep(words, check_words)
    if (stack := words.text("stack").lower()) not in ("", "false"):
        run_stack(read_stack(with_default(words.remaining), split_values(stack.strip("[]"))))
        return 0
    dry_run, retries = words.flag("dry_run"), words.count("retries", 0)
    if is_uri(resume := words.remaining.get("resume", "")):
        if dry_run:
            raise ConfigError(f"resume={resume} with dry_run=true: a dry run fetches nothing; leave dry_run out")
        print(printable(f"fetching {resume}"), flush=True)
        words.remaining = with_fetched(words.remaining)
    job = read_job(with_default(words.remaining))
    if retries and not dry_run:
        if rank_from_environment().world_size > 1:
            raise ConfigError(f"retries={retries} is not for ranks of torchrun; use its --max-restarts={retries}")
        return run_with_retries(single_run(words.remaining, job.experiment), retries)
    job, n_here = place_job(job)
    if dry_run:
        print(describe_job(job, n_here))
        return 0
    _train(job, words.remaining)
    return 0


def _train(job: Job, words: Mapping[str, str]) -> None:
    """Train, and print the commands that follow. Words beside resume= hold for one start, so they are repeated."""
    from rlframe.envs.make import NO_ENV
    from rlframe.experiment.settings import to_flat
    from rlframe.experiment.train import train
    from rlframe.experiment.trust import foreign
    from rlframe.system.distributed import rank_from_environment

    place, experiment = rank_from_environment(), job.experiment
    needs_trust = bool(foreign({**to_flat(experiment), "sync": ""}))
    try:
        result = train(job)
    except Interrupted as error:
        if error.directory and place.world_size == 1:
            new = {"trust": "true"} if needs_trust else {"sync": experiment.sync} if experiment.sync else {}
            _print_continue(error.directory, words if job.resume else new)
        raise
    if not place.rank:
        has_env = experiment.env != NO_ENV or experiment.eval.env
        _print_next_commands(result.directory, " trust=true" * needs_trust + " env=ID" * (not has_env))


def _print_continue(directory: Path, given: Mapping[str, str]) -> None:
    words = {"resume": str(_relative(directory)), **{key: text for key, text in given.items() if key != "resume"}}
    command = shlex.join(f"{key}={text}" for key, text in words.items())
    print(printable(f"continue: {_python()} -m rlframe.launch {command}"), flush=True)


def _print_next_commands(directory: Path, for_evaluation: str) -> None:
    shown = _relative(directory)
    program, run = _python(), shlex.quote(str(shown))
    print(f"run:      {shown}")
    print(f"evaluate: {program} -m rlframe.evaluate {run}{for_evaluation}")
    print(f"plot:     {program} -m rlframe.plot {run}")


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _python() -> str:
    """The word that starts this Python here."""
    python = _relative(Path(sys.executable))
    return "python" if python.is_absolute() else shlex.quote(str(python))


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
