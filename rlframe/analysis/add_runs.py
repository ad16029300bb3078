"""Adding runs to result files: each seed once, with how it was measured; all of one configuration, and ended."""

import fcntl
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.analysis.curves import (
    ALIKE,
    CLOCKS,
    RunData,
    as_trained,
    configs_of,
    differences,
    find_runs,
    folder_of,
    read_run,
    runs_without_log,
)
from rlframe.analysis.results import Results, read_results, read_seeds, spell_seeds
from rlframe.core.errors import ConfigError, pluralize
from rlframe.core.files import as_csv, prepare_output, read_json, write_output

_RETURNS = tuple(re.compile(rf"{group}/(.*/)?return_mean") for group in ("eval", "episode"))
_OF_ONE_RUN = re.compile(r"seed|run_ID|name|log_dir|resume|affinity|sync|trust|snapshot_\w+|log_level|dry_run|stack")
_MOST_NAMED = 8  # keys in a message
_WAIT_S, _POLL_S = 30.0, 0.05  # for another process that adds to a file of the same folder
_FINISHED = ("completed", "stopped")  # `stopped`: by a callback, which is part of the config


def add_runs(dirs: Sequence[Path], out: Path, columns: Sequence[str], note: str, partial: bool) -> Results:
    """Add the seeds of run directories to a result file, which is made if there is none.

    Args:
        dirs: run directories, or directories that contain some.    columns: metrics to keep; empty: the mean returns.
        note: on the circumstances, such as other work on the machine.    partial: also runs that have not ended.
    Raises:
        ConfigError: the runs or the file differ in more than the seed, a run has not ended, or a seed is there already
            with other numbers. Nothing is written then.
    """
    paths = list(dict.fromkeys(path.resolve() for directory in dirs for path in _runs_in(directory, partial)))
    return _add({out: paths}, columns, note, partial)[0]


def add_settings(dirs: Sequence[Path], out: Path, columns: Sequence[str], note: str, partial: bool) -> list[Results]:
    """As `add_runs`, to a file for each setting, in the folder `out`: SETTING.csv, its path in DIR."""
    files: dict[Path, list[Path]] = {}
    for directory in dirs:
        for run in _runs_in(directory, partial):
            top, folder = directory.resolve(), folder_of(run.resolve())
            name = folder.relative_to(top) if folder != top and folder.is_relative_to(top) else folder.name
            files.setdefault(out / f"{name}.csv", []).append(run.resolve())
    return _add({file: list(dict.fromkeys(runs)) for file, runs in files.items()}, columns, note, partial)


def _runs_in(directory: Path, partial: bool) -> list[Path]:
    found = find_runs(directory)
    if not partial and (missing := runs_without_log(directory)):
        raise ConfigError(
            f"{directory} is not complete, as {missing[0]} has no log; let the study end, by its command if it "
            f"failed, or add partial=true and say so in note="
        )
    return found


def _add(runs: Mapping[Path, Sequence[Path]], columns: Sequence[str], note: str, partial: bool) -> list[Results]:
    """Add runs to the file of each, or to none."""
    for out in runs:
        for each in (out, out.with_suffix(".json")):
            prepare_output(each)
    with ExitStack() as turns:
        for folder in dict.fromkeys(sorted(out.parent for out in runs)):
            turns.enter_context(in_turn(folder))
        found = [_with_runs(out, paths, columns, note, partial) for out, paths in runs.items()]
        for results in found:
            _write(results)
    return found


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Context of one process at a time, of those that change a file of this folder; others wait.

    Raises:
        ConfigError: another has it for long, as a run or study has its own folder to its end.
    """
    descriptor, end_s = os.open(folder, os.O_RDONLY), time.monotonic() + _WAIT_S
    try:
        while not _locked(descriptor):
            if time.monotonic() > end_s:
                raise ConfigError(
                    f"{folder} has been in use by another process for {_WAIT_S:g} s, perhaps by a run or study that is "
                    f"recorded there; name a file in another folder"
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Try to lock a folder; True also on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _with_runs(out: Path, paths: Sequence[Path], columns: Sequence[str], note: str, partial: bool) -> Results:
    """What a result file, if there is one, becomes with these runs."""
    facts_file = out.with_suffix(".json")
    if facts_file.exists() and not out.exists():
        raise ConfigError(f"out={out} would overwrite {facts_file}, which is not of a result file; name another file")
    runs = {path: read_run(path) for path in paths}
    facts = {path: _facts(path, note, partial) for path in paths}
    old = read_results(out) if out.exists() else None
    if old and not old.config:
        raise ConfigError(f"{out} has no recorded config to compare with; write another file: out=FILE.csv")
    _check_equal([*([(out, old.config)] if old else []), *((path, facts[path][0]) for path in paths)])
    kept = tuple(old.columns) if old and not columns else _columns(runs, columns)
    rows: dict[int, list[tuple[str, ...]]] = dict(old.rows) if old else {}
    if old and kept != old.columns:
        raise ConfigError(f"{out} has the columns {', '.join(old.columns)}, not {', '.join(kept)}; leave out columns=")
    measured = list(old.measured) if old else []
    for path, run in runs.items():
        seed, own = facts[path][0].get("seed"), _rows(path, run.columns, kept)
        if not isinstance(seed, int):
            raise ConfigError(f"{path / 'params.json'} names no seed")
        if rows.get(seed) == own:
            continue
        if seed in rows:
            measured = _without_start(measured, seed, rows[seed], own, f"seed {seed} of {path} is in {out} already")
        rows[seed] = own
        measured.append({"seeds": str(seed), **facts[path][1]})
    config = old.config if old else next(iter(facts.values()))[0]
    config = {key: value for key, value in config.items() if not _OF_ONE_RUN.fullmatch(key)}
    return Results(out, kept, dict(sorted(rows.items())), config, _merged(measured))


def _facts(path: Path, note: str, partial: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of a run, with what a resume changed, and how it was measured; ConfigError if it has not ended."""
    params = read_json(path / "params.json")
    configs, ended = configs_of(params), "running"
    if (path / "result.json").exists():
        ended = str(read_json(path / "result.json").get("ended"))
    if ended not in _FINISHED and not partial:
        raise ConfigError(
            f"{path} has not reached its end ({ended}); let it end, or add partial=true and say so in note="
        )
    if copies := params.get("changes"):
        raise ConfigError(
            f"{path} is of a population, and copied others {pluralize(len(copies), 'time')}: its curve is not of one "
            f"setting; train those of best.json anew"
        )
    if not configs[0]:
        raise ConfigError(f"{path / 'params.json'} has no config")
    config = as_trained(configs)
    git, host = _mapping(params.get("git")), _mapping(params.get("host"))
    machine = {"cpu": host.get("cpu"), "cpu_count": host.get("cpu_count"), "os": str(host.get("os", "")).split("-")[0]}
    line = params.get("command_line")
    program, *words = map(str, line) if isinstance(line, list) and line else [""]
    is_launch = Path(program).name == "launch.py" or program.endswith(" launch")
    kept = [word for word in words if not _OF_ONE_RUN.fullmatch(word.partition("=")[0])]
    chosen = _mapping(params.get("chosen"))
    if "precision" in chosen:  # by the machine: then it is no difference
        config.pop("precision", None)
    fact = {
        "date": str(params.get("started", ""))[:10],
        "command": shlex.join(["python", "-m", "rlframe.launch", *kept] if is_launch else [Path(program).name, *kept]),
        "versions": _mapping(params.get("versions")),
        "revision": f"{git.get('revision', '')}{' and changes' if git.get('dirty') else ''}",
        "machine": {key: value for key, value in machine.items() if value},
        "chosen": chosen,
        "ended": ended,
        "resumed": len(configs) - 1,
        "note": note,
    }
    return config, {key: value for key, value in fact.items() if value}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _check_equal(configs: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
    (first, one), *others = configs
    for path, other in others:
        differing = {key: found for key, found in differences([one, other]).items() if key not in ALIKE}
        if differing:
            each = [f"{key} is {values[0]} and {values[1]}" for key, values in differing.items()]
            words = ", ".join(each[:_MOST_NAMED])
            words += f" and {len(each) - _MOST_NAMED} more" if len(each) > _MOST_NAMED else ""
            several = len({folder_of(each) for each, _ in configs if each.is_dir()}) > 1
            remedy = "write a file for each" + (", by out=FOLDER/" if several else "")
            raise ConfigError(f"{first} and {path} are of different configurations: {words}; {remedy}")


def _columns(runs: Mapping[Path, RunData], named: Sequence[str]) -> tuple[str, ...]:
    """Clocks, then the named metrics of the runs, or their mean returns: of evaluations, else of training episodes."""
    known = [[name for name, x in run.columns.items() if np.isfinite(x).any()] for run in runs.values()]
    returns = ([name for name in known[0] if pattern.fullmatch(name)] for pattern in _RETURNS)
    metrics = [name for name in dict.fromkeys(named) if name not in CLOCKS]
    if named and not metrics:
        raise ConfigError(f"columns={','.join(named)} are kept in any case; name a metric, such as eval/return_mean")
    metrics = metrics or next(filter(None, returns), [])
    for path, there in zip(runs, known, strict=True):
        missing = [name for name in ("env_steps", *metrics) if name not in there]
        if missing or not metrics:
            has = ", ".join(there) or "no rows"
            raise ConfigError(f"{path} has no {missing[0] if missing else 'returns'}; it has {has}")
    return (*(name for name in CLOCKS if all(name in run.columns for run in runs.values())), *metrics)


def _rows(path: Path, run: Mapping[str, np.ndarray], names: Sequence[str]) -> list[tuple[str, ...]]:
    """The rows that have a metric, as text."""
    if missing := [name for name in names if name not in run]:
        raise ConfigError(f"{path} has no {missing[0]}, a column of the result file")
    table = np.stack([run[name] for name in names], axis=1)
    metrics = [name not in CLOCKS for name in names]
    kept = np.flatnonzero(np.isfinite(table[:, metrics]).any(axis=1))
    if len(kept) and kept[-1] < len(table) - 1:
        clock = run["env_steps" if "env_steps" in run else names[0]]
        ends = f"its curve ends at {clock[kept[-1]]:,.0f} of {clock[-1]:,.0f} steps"
        print(f"{path}: {ends}: later rows have no finite {', '.join(compress(names, metrics))}", file=sys.stderr)
    return [tuple(map(_cell, names, row)) for row in table[kept]]


def _cell(name: str, x: float) -> str:
    if not math.isfinite(x):
        return ""
    return f"{x:.0f}" if name in ("env_steps", "updates") else f"{x:.1f}" if name in CLOCKS else f"{x:.6g}"


def _without_start(
    measured: Sequence[Mapping[str, Any]], seed: int, before: list[Any], rows: list[Any], already: str
) -> list[dict[str, Any]]:
    """What was measured without a seed that went on: added when it had not ended, its rows begin with those of then.

    Raises:
        ConfigError: it had ended, or has other rows; `already` says which.
    """
    (entry,) = [each for each in measured if seed in read_seeds(each["seeds"])]
    if entry.get("ended") in _FINISHED or rows[: len(before)] != before:
        raise ConfigError(f"{already}, with other numbers; seeds are measured once")
    kept = [x for x in read_seeds(entry["seeds"]) if x != seed]
    others = [dict(each) for each in measured if each is not entry]
    return [*others, {**entry, "seeds": spell_seeds(kept)}] if kept else others


def _merged(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for all seeds that were measured in the same way on the same day."""
    seeds: dict[str, list[int]] = {}
    for entry in measured:
        others = json.dumps({key: value for key, value in entry.items() if key != "seeds"})
        seeds.setdefault(others, []).extend(read_seeds(entry["seeds"]))
    return [{"seeds": spell_seeds(found), **json.loads(others)} for others, found in seeds.items()]


def _write(results: Results) -> None:
    rows = [[seed, *row] for seed, own in results.rows.items() for row in own]
    entries = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in results.measured)
    facts = f'{{\n "config": {json.dumps(results.config)},\n "measured": [\n  {entries}\n ]\n}}\n'
    write_output(results.path, as_csv([["seed", *results.columns], *rows]))
    write_output(results.path.with_suffix(".json"), facts)
