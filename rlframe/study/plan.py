"""From a grid to runs: settings, seeds, order and directories, and the slots of the machine they run on. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, counted
from rlframe.system.affinity import Affinity, Topology, plan

SWEEP = "sweep."
INNERMOST, OUTERMOST = "innermost", "outermost"
_MAX_NAME = 200  # bytes of a directory's name that any file system takes


@dataclass(frozen=True)
class Run:
    """One run of a study: what decides its result, and how to start it. The slot's `affinity=` comes after."""

    setting: str  # name of its setting, a directory below the study's; empty where there is only one setting
    run_ID: int
    words: Mapping[str, str]  # all its key=value but for where it lives and on what it runs
    directory: Path  # <study>/<setting>/run_<ID>
    command: tuple[str, ...]
    again: tuple[str, ...]  # goes on from the snapshot in its directory

    @property
    def name(self) -> str:
        """Its directory within the study."""
        return f"{self.setting}/run_{self.run_ID}" if self.setting else f"run_{self.run_ID}"

    @property
    def log(self) -> Path:
        """Where all its attempts print: beside its directory, which is its own to make."""
        return self.directory.with_name(f"{self.directory.name}.log")


@dataclass(frozen=True)
class Program:
    """What every run of a study starts: `command key=value ... log_dir=DIR run_ID=N`."""

    command: tuple[str, ...]
    resumes_by_directory: bool  # `command resume=RUN_DIR` and nothing else; or the same words and `resume=true`

    def run(self, study: Path, setting: str, run_id: int, words: Mapping[str, str]) -> Run:
        """A run of it."""
        folder = study / setting
        place = (f"log_dir={folder}", f"run_ID={run_id}")
        start = (*self.command, *[f"{key}={value}" for key, value in words.items()], *place)
        directory = folder / f"run_{run_id}"
        again = (*self.command, f"resume={directory}") if self.resumes_by_directory else (*start, "resume=true")
        return Run(setting, run_id, dict(words), directory, start, again)


def split_values(text: str) -> tuple[str, ...]:
    """The values between commas, those within brackets being part of one: `[64,64],[256,256]` are two."""
    values, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return tuple(value.strip() for value in values)


def read_grid(words: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The values of every key that is swept, from the words `sweep.KEY=v1,v2`.

    Raises:
        ConfigError: a value is empty or there twice, or the key is given beside.
    """
    grid: dict[str, tuple[str, ...]] = {}
    for word, text in words.items():
        if not word.startswith(SWEEP):
            continue
        key, values = word.removeprefix(SWEEP), split_values(text)
        if not key or "" in values:
            raise ConfigError(f"{word}={text}: write sweep.KEY=value,value with no value empty")
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise ConfigError(f"{word}={text}: {twice} is there twice")
        if key in words:
            raise ConfigError(f"{key} is given as {words[key]} and swept over {text}; leave one of them out")
        grid[key] = values
    return grid


def settings_of(grid: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Every combination of a grid, the last key varying fastest."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def make_runs(
    program: Callable[[str, int, dict[str, str]], Run],
    base: Mapping[str, str],
    settings: Sequence[Mapping[str, str]],
    seeds: Sequence[str],
    order: str,
    run_id: int = 0,
) -> tuple[Run, ...]:
    """Every setting with every seed.

    Args:
        program: makes a run of a setting's name, an ID and words, such as `partial(a_program.run, study)`.
        base: words that all settings have in common.
        seeds: they number the runs of a setting, run_<seed>; without any there is one, run_<run_id>.
        order: innermost, all seeds of a setting one after another; outermost, all settings with the first seed first.
    Raises:
        ConfigError: two settings are the same, a seed is no whole number, or there is no such order.
    """
    if order not in (INNERMOST, OUTERMOST):
        known = (INNERMOST, OUTERMOST)
        raise ConfigError(f"seeds={order} is not one of {', '.join(known)}{nearest(order, known)}")
    for seed in seeds:
        if not seed.isdecimal():
            raise ConfigError(f"sweep.seed={','.join(seeds)}: {seed!r} is not a whole number")
    named = list(zip(_setting_names(settings), settings, strict=True))
    if not seeds:
        return tuple(program(name, run_id, {**base, **setting}) for name, setting in named)
    pairs = [(each, seed) for each in named for seed in seeds]
    if order == OUTERMOST:
        pairs = [(each, seed) for seed in seeds for each in named]
    return tuple(program(name, int(seed), {**base, **setting, "seed": seed}) for (name, setting), seed in pairs)


def _setting_names(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """A directory's name for each: learning_rate=1e-3,clip=0.2; empty for the one setting without words."""
    keys = list(dict.fromkeys(key for setting in settings for key in setting))
    short = [key.rpartition(".")[2] for key in keys]
    titles = {key: last if short.count(last) == 1 else key for key, last in zip(keys, short, strict=True)}
    names: list[str] = []
    for index, setting in enumerate(settings):
        if setting in settings[:index]:
            raise ConfigError(f"the setting {dict(setting)} is there twice")
        name = ",".join(f"{titles[key]}={_safe(value)}" for key, value in setting.items())
        clear = name not in names and len(name.encode()) <= _MAX_NAME and (name or len(settings) == 1)
        names.append(name if clear else f"setting_{index}")
    return names


def _safe(value: str) -> str:
    """A value as a part of a directory's name: [64,64] as 64x64, ALE/Pong-v5 as ALE_Pong-v5."""
    return re.sub(r"[^\w.+=-]", "_", re.sub(r"[\[\](){}\s]", "", value).replace(",", "x"))


@dataclass(frozen=True)
class Slot:
    """A place for one run at a time."""

    index: int
    code: str  # what its runs' `affinity=` says
    affinity: Affinity

    def where(self) -> str:
        """Its CPUs and GPUs, for a table."""
        gpus = f", GPU {','.join(map(str, self.affinity.gpus))}" if self.affinity.gpus else ""
        cpus = ",".join(map(str, self.affinity.master))
        return (f"CPU {cpus}" if cpus else "not pinned") + gpus


def deal(code: str, topology: Topology, n_runs: int, on_gpu: bool = True) -> list[Slot]:
    """All slots that an affinity code makes.

    Args:
        code: `none`: one, of everything, not pinned; a code without slt; or `auto`: a slot a GPU, the cores dealt
            evenly to them. Where there is no GPU, a slot a core, or fewer and larger ones if there are fewer runs than
            cores. A container that is granted less CPU time than it has cores gets a slot for each CPU granted, none
            pinned.
        on_gpu: runs use a GPU where there is one.
    Raises:
        ConfigError: the code does not fit the machine, or names a slot.
    """
    if re.search(r"(^|_)\d+slt(_|$)", code):
        raise ConfigError(f"affinity={code}: the runs of a study go to all slots; leave out slt")
    if code == "auto":
        code, n_copies = _auto(topology, max(1, n_runs), on_gpu)
        if n_copies > 1:
            return [Slot(index, code, plan(code, topology)) for index in range(n_copies)]
    n_slots = plan(code, topology).n_slots
    if n_slots == 1:
        return [Slot(0, code, plan(code, topology))]
    return [Slot(k, f"{code}_{k}slt", plan(code, topology, slot=k)) for k in range(n_slots)]


def _auto(topology: Topology, n_runs: int, on_gpu: bool) -> tuple[str, int]:
    """A code, and how many times it is to be had side by side as it is."""
    n_cores = len({(cpu.socket, cpu.core) for cpu in topology.cpus})
    n_gpus = len(topology.gpus)
    if n_gpus and on_gpu:
        return f"{min(n_gpus, n_cores, n_runs)}gpu_1gpr", 1
    if topology.quota < n_cores:
        return "none", max(1, min(int(topology.quota), n_runs))
    return f"{max(1, n_cores // n_runs)}cpr" + ("_0gpu" if n_gpus else ""), 1


def describe(slots: Sequence[Slot]) -> str:
    """What there is, in a few lines."""
    lines = [counted(len(slots), "slot") + ":"]
    lines += [f"  slot {slot.index}  {slot.where()}  (affinity={slot.code})" for slot in slots]
    return "\n".join(lines)
