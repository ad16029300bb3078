"""A study of one's own in a script: variants, as dicts, of any command that reads key=value words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlframe.core.command_line import run_command
from rlframe.core.errors import ConfigError
from rlframe.record.context import dated
from rlframe.study.plan import INNERMOST, Program, make_runs
from rlframe.study.queue import Options
from rlframe.study.slots import deal
from rlframe.study.study import Study, conduct
from rlframe.system.affinity import read_topology

_OF_QUEUE = ("seed", "log_dir", "run_ID", "affinity", "resume")  # words that the queue gives to a run
_DEFAULTS = Options()


def run_study(
    command: Sequence[str],
    variants: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    log_dir: str = "",
    affinity: str = "auto",
    order: str = INNERMOST,
    options: Options = _DEFAULTS,
) -> int:
    """Run every variant with every seed on the slots that `affinity` makes; returns the exit status.

    A run is `command key=value ... seed=N log_dir=DIR run_ID=N affinity=CODE`, and lives in DIR/run_<N>. If it has a
    snapshot there and did not finish, because it failed or the study was interrupted, it gets `resume=true` beside.

    Args:
        command: such as [sys.executable, __file__, "train"].
        variants: the settings; lists and tuples are written 64,64.
        log_dir: the study's directory; calling again with it goes on with the study. Empty: a new one below data/.
        order: innermost, all seeds of a variant one after another; outermost, all variants with the first seed first.
    """

    def body(_: list[str]) -> int:
        _check(variants, seeds)
        directory = Path(log_dir).expanduser().absolute() if log_dir else dated("study")
        words = [{key: _text(value) for key, value in variant.items()} for variant in variants]
        program = Program(tuple(command), resumes_by_directory=False)
        base = {key: value for key, value in words[0].items() if all(each.get(key) == value for each in words)}
        settings = [{key: value for key, value in each.items() if key not in base} for each in words]
        runs = make_runs(partial(program.run, directory), base, settings, [str(seed) for seed in seeds], order)
        facts = {"command": list(command), "variants": words, "seeds": list(seeds)}
        study = Study(directory, runs, facts, f"the same script with log_dir={directory}")
        return conduct(study, deal(affinity, read_topology(), len(runs)), options)

    return run_command(body, [])


def _check(variants: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> None:
    if not variants or not seeds:
        raise ConfigError(f"{len(variants)} variants and {len(seeds)} seeds make no study: at least one of each")
    taken = sorted({key for variant in variants for key in variant if key in _OF_QUEUE})
    if taken:
        raise ConfigError(f"a variant sets {', '.join(taken)}, which the queue gives to every run")


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
