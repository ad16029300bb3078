"""python -m rlframe.launch [key=value ...]: from the words of the command line to one run."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlframe.core.config import ConfigError

DEFAULT_PRESET = "classic/ppo_cartpole"  # where the command line says neither env nor algo nor experiment
_ADJUSTABLE = ("runner.", "eval.", "snapshot_", "device", "threads")  # keys that a resumed run may change

_USAGE = """\
usage: python -m rlframe.launch [key=value ...]

  python -m rlframe.launch                                  PPO on CartPole-v1 (experiment=classic/ppo_cartpole)
  python -m rlframe.launch experiment=atari/ppo_pong seed=1  a preset; anything on the command line wins over it
  python -m rlframe.launch env=Pendulum-v1 algo=ppo algo.learning_rate=1e-3 runner.n_steps=2e5
  python -m rlframe.launch resume=RUN_DIR                    go on with a run
  python -m rlframe.launch init=RUN_DIR env=...              a new run from trained weights

keys beside those below: experiment=NAME, resume=RUN_DIR, dry_run=true (print the config and stop),
traceback=true (show where an error came from)
"""


def parse(argv: list[str]) -> dict[str, str]:
    """key=value words as a mapping.

    Raises:
        ConfigError: a word of another form, or a key given twice.
    """
    found: dict[str, str] = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is not of the form key=value; --help lists the keys")
        if key in found:
            raise ConfigError(f"{key} is given twice: {found[key]!r} and {value!r}")
        found[key] = value
    return found


def flag(words: dict[str, str], key: str) -> bool:
    """Take a true/false word out of the command line."""
    value = words.pop(key, "false").lower()
    if value not in ("true", "false"):
        raise ConfigError(f"{key}={value!r} must be true or false")
    return value == "true"


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status: 0, 1 the run failed, 2 refused, 128 + n stopped by signal n."""
    if any(word in ("-h", "--help", "help") for word in argv):
        return _help()
    show_traceback = "traceback=true" in argv
    # After --help and the parsing of words: these import torch.
    from rlframe.envs import EnvError
    from rlframe.record.snapshot import SnapshotError
    from rlframe.system.signals import Interrupted

    try:
        return _launch(parse(argv))
    except Interrupted as stop:
        print(f"\n{stop}; go on with resume=RUN_DIR", file=sys.stderr)
        return stop.exit_status
    except KeyboardInterrupt:
        return 130
    except (ConfigError, SnapshotError) as error:
        return _fail(f"error: {error}", 2, show_traceback)
    except EnvError as error:
        return _fail(f"the run failed: {error}", 1, show_traceback)


def _fail(message: str, status: int, show_traceback: bool) -> int:
    if show_traceback:
        traceback.print_exc()
    print(message, file=sys.stderr)
    return status


def _help() -> int:
    import chz

    from rlframe.experiment import Experiment, preset_names

    print(_USAGE)
    print(f"presets: {', '.join(preset_names())}\n")
    print(chz.Blueprint(Experiment).get_help())
    return 0


def _launch(words: dict[str, str]) -> int:
    from rlframe import experiment as experiments
    from rlframe.record import logger_context
    from rlframe.record.snapshot import load_snapshot, resolve_snapshot
    from rlframe.system.memory import keep_freed_memory

    flag(words, "traceback")
    dry_run = flag(words, "dry_run")
    resume = words.pop("resume", "")
    layers, notes = _resumed(resume, words) if resume else _fresh(words)
    experiment = experiments.from_flat(*layers, words)
    flat = experiments.to_flat(experiment)
    if dry_run:
        print(json.dumps(flat, indent=2))
        return 0
    saved = load_snapshot(resolve_snapshot(Path(resume)))[0] if resume else {}
    keep_freed_memory()
    built = experiments.build(experiment)
    try:
        with logger_context(
            log_dir=resume or experiment.log_dir,
            run_ID=experiment.run_ID,
            name=experiment.title(),
            config=flat,
            snapshot_mode=experiment.snapshot_mode,
            snapshot_gap=experiment.snapshot_gap,
            resume=bool(resume),
        ) as run:
            for note in [*notes, *(f"{name}: {fact}" for name, fact in built.facts.items()), f"run: {run.directory}"]:
                logging.getLogger("rlframe").info(note)
            if saved:
                built.runner.resume(saved)
            built.runner.train()
    finally:
        built.close()
    _farewell(run.directory)
    return 0


def _fresh(words: dict[str, str]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The layers below the command line, and what to tell about them."""
    from rlframe.experiment import load_preset, presets_for

    preset = words.pop("experiment", "")
    if not preset and "env" not in words and "algo" not in words:
        preset = DEFAULT_PRESET
    if preset:
        return [load_preset(preset)], [f"experiment={preset}"]
    others = presets_for(words.get("env", "CartPole-v1"))
    return [], [f"presets for this environment: {', '.join(f'experiment={name}' for name in others)}"] if others else []


def _resumed(resume: str, words: dict[str, str]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The config of the run to go on with."""
    fixed = [key for key in words if not key.startswith(_ADJUSTABLE)]
    if fixed:
        raise ConfigError(
            f"resume goes on with the run as it is: {', '.join(fixed)} cannot change "
            f"(what can: {', '.join(_ADJUSTABLE)}); for a new run from its weights use init={resume}"
        )
    path = Path(resume) / "params.json"
    if not path.is_file():
        raise ConfigError(f"resume={resume}: there is no {path}; name a run directory")
    config = json.loads(path.read_text(encoding="utf-8"))["config"]
    return [config], [f"resuming {resume}: parameters, optimizer and counts go on; running episodes start anew"]


def _farewell(directory: Path) -> None:
    shown = directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory
    python = Path(sys.executable)
    program = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else "python"
    print(f"run:      {shown}")
    print(f"evaluate: {program} -m rlframe.evaluate {shown}")
    print(f"plot:     {program} -m rlframe.plot {shown}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
