"""python -m rlframe.launch [key=value ...]: from the words of the command line to one run."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframe.core.command_line import KeyValues, run_command
from rlframe.core.errors import ConfigError
from rlframe.core.files import read_json
from rlframe.experiment.presets import load_preset, preset_names, presets_for
from rlframe.system.affinity import pin
from rlframe.system.machine import gc_paused, limit_threads

if TYPE_CHECKING:
    from rlframe.core.ranks import Ranks
    from rlframe.experiment.config import Experiment
    from rlframe.system.distributed import RankInfo

DEFAULT_PRESET = "classic/ppo_cartpole"  # where the command line says neither env nor algo nor experiment
_ADJUSTABLE = ("runner.", "eval.", "snapshot_", "device", "threads", "affinity", "sampler")  # by a resumed run
_FIXED = ("sampler.batch_T", "sampler.batch_B", "sampler.decorrelation_steps")  # all samplers give the same samples
_NEEDED = ("algo", "env", "sampler.batch_T", "sampler.batch_B", "runner.n_steps")  # to rebuild a run from its config

_USAGE = """\
usage: python -m rlframe.launch [key=value ...]

  python -m rlframe.launch                                  PPO on CartPole-v1 (experiment=classic/ppo_cartpole)
  python -m rlframe.launch experiment=atari/ppo_pong seed=1  a preset; anything on the command line wins over it
  python -m rlframe.launch experiment=RUN_DIR/params.json log_dir=DIR   a run again, from its config
  python -m rlframe.launch env=Pendulum-v1 algo=ppo algo.learning_rate=1e-3 runner.n_steps=2e5
  python -m rlframe.launch resume=RUN_DIR                    go on with a run
  python -m rlframe.launch init=RUN_DIR env=...              a new run from trained weights
  python -m rlframe.launch sweep.seed=0,1,2 sweep.algo.learning_rate=1e-3,3e-4 log_dir=DIR affinity=2cpr
                                                             a run for each combination, queued on slots of two cores;
                                                             the same command, or resume=DIR, goes on with the study

keys beside those below: experiment=NAME, resume=RUN_DIR, trust=true (run also what a run's params.json names that is
no part of rlframe: module:Class, ./file.py; what stands on the command line needs no trust), dry_run=true (print the
config and who would run where, and stop), tune_sampler=true (measure every sampler for real and take the fastest),
traceback=true (show where an error came from)
keys of a sweep: sweep.KEY=VALUE,VALUE (lists in brackets), retries=0 (times a failed run is started again, from its
snapshot), stall_s=3600 (without a new line in its logs after which a run is taken for hung and killed; 0: never),
seeds=innermost|outermost (all seeds of a setting first, or all settings with the first seed)
"""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status: 0, 1 the run failed, 2 refused, 128 + n stopped by signal n."""
    if any(word in ("-h", "--help", "help") for word in argv):
        return _help()
    return run_command(_launch, argv)


def beside(words: Mapping[str, str]) -> str:
    """What probably wants cores beside torch's threads (see system.threads); asked before what would know is loaded."""
    config: dict[str, Any] = {}
    with contextlib.suppress(ConfigError, OSError, ValueError):  # who reads it for its content tells what is wrong
        source = f"{words['resume']}/params.json" if "resume" in words else words.get("experiment", "")
        config = load_preset(source) if source else {}
    config |= words
    if str(config.get("sampler.batch_B")) == "1" and not str(config.get("runner")).startswith("async"):
        return "update" if config.get("algo") == "dqn" and "ALE/" in str(config.get("env")) else "nothing"
    threads = any(name in str(config.get(key)) for key in ("env", "env_backend") for name in ("ALE/", "envpool"))
    return "threads" if threads else "processes"


def _help() -> int:
    with gc_paused():
        import chz

        from rlframe.experiment.config import Experiment

    print(_USAGE)
    print(f"presets: {', '.join(preset_names())}\n")
    print(chz.Blueprint(Experiment).get_help())
    return 0


def _launch(argv: list[str]) -> int:
    words = KeyValues(argv)  # before the imports that load torch: a mistyped word is refused at once
    limit_threads(beside(words.remaining))
    with gc_paused():
        from rlframe.experiment import config as experiments
        from rlframe.experiment import hardware
        from rlframe.study.sweep import is_study, run_sweep
        from rlframe.system import distributed

    if is_study(words.remaining):
        return run_sweep(words, _checked)
    dry_run, tune = words.flag("dry_run"), words.flag("tune_sampler")
    resume, trust = words.text("resume"), words.flag("trust")
    layers, notes = _resumed(resume, words.remaining, trust) if resume else _fresh(words, trust)
    experiment = experiments.from_flat(*layers, words.remaining)
    place = distributed.rank_from_environment()
    started = place.world_size > 1
    experiment = experiments.for_ranks(experiment, place.world_size if started else experiment.world_size)
    n_here = place.local_world_size if started else experiment.world_size
    hardware.affinity_of(experiment, 0, n_here)  # refused now, if they do not fit
    if place.max_restarts and not (resume or experiment.log_dir):
        raise ConfigError(
            f"--max-restarts={place.max_restarts}: restarted ranks go on with their run; give log_dir=DIR, where it is"
        )
    if dry_run:
        settled = hardware.settle(experiment, tune, 0, n_here)
        print(json.dumps(experiments.to_flat(settled.experiment), indent=2))
        print(hardware.describe_processes(settled))
        return 0
    distributed.launch_ranks(partial(_train, experiment, resume, tuple(notes), tune), experiment.world_size)
    return 0


def _checked(words: dict[str, str]) -> Experiment:
    """The config that a command line makes."""
    from rlframe.experiment.config import from_flat

    of_run = KeyValues(f"{key}={value}" for key, value in words.items())
    layers, _ = _fresh(of_run, of_run.flag("trust"))
    return from_flat(*layers, of_run.remaining)


def _train(experiment: Experiment, resume: str, notes: tuple[str, ...], tune: bool, place: RankInfo) -> None:
    """Train as one rank, mostly the only one."""
    import chz

    from rlframe.experiment import config as experiments
    from rlframe.experiment import hardware
    from rlframe.experiment.build import build
    from rlframe.record import current_run, logger_context
    from rlframe.system.machine import retain_freed_memory

    found = _newest_of(resume, experiment.snapshot_mode, place.rank) if resume else None
    retain_freed_memory()
    settled = hardware.settle(experiment, tune, place.local_rank, place.local_world_size)
    config = experiments.to_flat(settled.experiment)
    pin(settled.affinity.master)
    with hardware.joined(settled, place) as ranks:
        if restarted := ranks.broadcast("" if resume else _run_of_this_job(experiment, config, place)):
            resume, found = restarted, _newest_of(restarted, experiment.snapshot_mode, place.rank)
        saved = _agreed(found, ranks) if found else {}
        whole = chz.replace(settled.experiment, init="") if saved else settled.experiment  # it has its weights
        built = build(whole, settled.affinity)
        try:
            with logger_context(
                log_dir=resume or experiment.log_dir,
                run_ID=experiment.run_ID,
                name=experiment.title(),
                config=config,
                snapshot_mode=experiment.snapshot_mode,
                snapshot_gap=experiment.snapshot_gap,
                snapshot_keep=experiment.snapshot_keep,
                snapshot_best=experiment.snapshot_best,
                snapshot_errors=experiment.snapshot_errors,
                resume=bool(resume),
            ) as run:
                if not place.rank:
                    _tell([*notes, *settled.notes, settled.affinity.describe()], built.facts, run.directory)
                if saved:
                    built.runner.resume(saved)
                    _tell_if_done(built.runner.done)
                elif resume:
                    current_run().trim(-1)
                    logging.getLogger("rlframe").info(f"{resume} has no snapshot yet: it begins anew")
                built.train()
        finally:
            built.close()
    if not place.rank:
        _farewell(run.directory)


_Found = tuple[Path, Any, Mapping[str, Any]]


def _newest_of(run: str, snapshot_mode: str, rank: int) -> _Found | None:
    """The snapshot to go on from, with its state; none where the run ended before its first, and so begins anew."""
    from rlframe.core.errors import SnapshotError
    from rlframe.record.rank_state import list_snapshots
    from rlframe.record.snapshot import load_newest

    if snapshot_mode != "none" and not list_snapshots(Path(run) / "snapshot"):
        return None
    found = load_newest(Path(run), rank)
    if not isinstance(found[1], dict) or not found[1]:
        raise SnapshotError(f"{found[0]} holds no training state; init= takes weights from it, if it has any")
    return found


def _agreed(found: _Found, ranks: Ranks) -> Any:
    """This rank's state in the newest snapshot that was whole for every rank."""
    from rlframe.record.snapshot import load_snapshot

    own, state, meta = found
    _, oldest = min(ranks.gather((int(meta["env_steps"]), own.name)))
    return state if oldest == own.name else load_snapshot(own.with_name(oldest), ranks.rank)[0]


def _tell(notes: Sequence[str], facts: Mapping[str, str], directory: Path) -> None:
    for note in [*notes, *(f"{name}: {fact}" for name, fact in facts.items()), f"run: {directory}"]:
        logging.getLogger("rlframe").info(note)


def _run_of_this_job(experiment: Experiment, config: Mapping[str, Any], place: RankInfo) -> str:
    """The run directory to go on with, where torchrun's ranks have run before; else empty.

    A job is known by its run directory and by what is fixed of its config: torchrun starts ranks anew for many reasons,
    on other machines too, and does not always say that it does.
    """
    directory = Path(experiment.log_dir).expanduser().absolute() / f"run_{experiment.run_ID}"
    if not place.job or not experiment.log_dir or not (directory / "params.json").is_file():
        return ""
    before = read_json(directory / "params.json").get("config", {})
    same = all(before.get(key) == value for key, value in config.items() if _is_fixed(key))
    return str(directory) if same else ""


def _is_fixed(key: str) -> bool:
    """Whether a resumed run cannot change it."""
    return not key.startswith(_ADJUSTABLE) or key in _FIXED


def _fresh(words: KeyValues, trust: bool) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The layers below the command line, and what to tell about them."""
    from rlframe.experiment.trust import refuse_foreign

    preset = words.text("experiment")
    if not preset and "env" not in words.remaining and "algo" not in words.remaining:
        preset = DEFAULT_PRESET
    if preset:
        config = load_preset(preset)
        if preset.endswith(".json"):  # of a run, which may be anybody's; a preset in YAML is written by hand
            refuse_foreign(config, preset, trust)
            config.pop("log_dir", None)  # where that run is
        return [config], [f"experiment={preset}"]
    others = presets_for(words.remaining.get("env", "CartPole-v1"))
    return [], [f"presets for this environment: {', '.join(f'experiment={name}' for name in others)}"] if others else []


def _resumed(resume: str, words: dict[str, str], trust: bool) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The config of the run to go on with."""
    from rlframe.experiment.trust import read_config

    fixed = [key for key in words if _is_fixed(key)]
    if fixed:
        raise ConfigError(
            f"resume goes on with the run as it is: {', '.join(fixed)} cannot change "
            f"(what can: {', '.join(_ADJUSTABLE)}, but not {', '.join(_FIXED)}); "
            f"for a new run from its weights use init={resume}"
        )
    path = Path(resume) / "params.json"
    if not path.is_file():
        raise ConfigError(f"resume={resume}: there is no {path}; name a run directory")
    config = read_config(path, trust)
    lacking = [key for key in _NEEDED if key not in config]
    if lacking:
        raise ConfigError(f"{path} lacks {', '.join(lacking)}: a script wrote it, so resume the run from that script")
    return [config], [f"resuming {resume}"]


def _tell_if_done(why: str) -> None:
    if why:
        logging.getLogger("rlframe").info(
            f"nothing is left to train: {why}; go further by a larger runner.n_steps or runner.target_score"
        )


def _farewell(directory: Path) -> None:
    shown = directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory
    python = Path(sys.executable)
    program = str(python.relative_to(Path.cwd())) if python.is_relative_to(Path.cwd()) else "python"
    run, program = shlex.quote(str(shown)), shlex.quote(str(program))
    print(f"run:      {shown}")
    print(f"evaluate: {program} -m rlframe.evaluate {run}")
    print(f"plot:     {program} -m rlframe.plot {run}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
