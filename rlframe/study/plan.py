"""The plan of a study: its grid of settings and seeds, the runs of it, and the slots they run on. No side effects.

sweep.KEY=, zip.KEY= and repeats= make the grid.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlframe.analysis.curves import N_STEPS
from rlframe.core.command_line import KeyValues
from rlframe.core.config import check_one_of, split_values
from rlframe.core.errors import ConfigError, pluralize
from rlframe.experiment.study_keys import GRIDS, REPEATS, SWEEP, ZIP
from rlframe.system.affinity import Affinity, Topology, plan

MAX_RUNS = 5_000


@dataclass(frozen=True)
class Grid:
    """Every combination of the swept values, with each tuple of the zipped values."""

    swept: Mapping[str, tuple[str, ...]]
    zipped: Mapping[str, tuple[str, ...]]  # equally many of each key

    def n_runs(self) -> int:
        return math.prod(map(len, self.swept.values())) * len(self.tuples())

    def combinations(self) -> list[dict[str, str]]:
        """The values of each run; the zipped ones vary fastest, then the last swept key."""
        product = itertools.product(*self.swept.values())
        return [dict(zip(self.swept, values, strict=True)) | each for values in product for each in self.tuples()]

    def tuples(self) -> list[dict[str, str]]:
        tuples = zip(*self.zipped.values(), strict=True)
        return [dict(zip(self.zipped, values, strict=True)) for values in tuples] or [{}]


def has_grid(arguments: Mapping[str, str]) -> bool:
    """Whether any of the arguments makes a grid."""
    return any(name == REPEATS or bare_key(name) != name for name in arguments)


def bare_key(name: str) -> str:
    """KEY of sweep.KEY, zip.KEY and search.KEY; any other name unchanged."""
    prefix = next((prefix for prefix in GRIDS if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def read_grid(arguments: Mapping[str, str]) -> Grid:
    """The grid of these arguments.

    Raises:
        ConfigError: a value is empty or repeated, zipped keys have different numbers of values, a key is given in two
            ways, or there are too many runs.
    """
    swept, zipped = _values(arguments, SWEEP), _values(arguments, ZIP)
    for key in swept:
        if key in zipped:
            raise ConfigError(f"{key} is in both sweep.{key} and zip.{key}; remove one of them")
    if len(set(map(len, zipped.values()))) > 1:
        numbers = ", ".join(f"zip.{key} has {len(values)}" for key, values in zipped.items())
        raise ConfigError(f"zipped keys need the same number of values, but {numbers}")
    if REPEATS in arguments:
        swept["seed"] = _repeated_seeds(arguments)
    grid = Grid(swept, zipped)
    if grid.n_runs() > MAX_RUNS:
        raise ConfigError(f"the sweep has {grid.n_runs():,} runs, more than {MAX_RUNS:,}; sweep fewer values or keys")
    _check_distinct(grid)
    return grid


def _values(arguments: Mapping[str, str], prefix: str) -> dict[str, tuple[str, ...]]:
    """The values of every PREFIX.KEY=v1,v2."""
    found: dict[str, tuple[str, ...]] = {}
    for name, text in arguments.items():
        if not name.startswith(prefix):
            continue
        key, values = name.removeprefix(prefix), split_values(text)
        if not key or "" in values:
            raise ConfigError(f"{name}={text} needs the form {prefix}KEY=value,value without empty values")
        if key in arguments:
            raise ConfigError(f"{key} is given as {arguments[key]} and as {name}={text}; remove one of them")
        found[key] = values
    return found


def _check_distinct(grid: Grid) -> None:
    for key, values in grid.swept.items():
        if len(set(values)) < len(values):
            repeated = next(value for value in values if values.count(value) > 1)
            raise ConfigError(f"sweep.{key}={','.join(values)} contains {repeated} twice; remove one")
    tuples = grid.tuples()
    for index, each in enumerate(tuples):
        if each in tuples[:index]:
            shown = " ".join(f"{key}={value}" for key, value in each.items())
            raise ConfigError(f"the zipped values contain {shown} twice; remove one")


def _repeated_seeds(arguments: Mapping[str, str]) -> tuple[str, ...]:
    """seed, seed + 1, ..., as many as `repeats`."""
    words = KeyValues(f"{key}={arguments[key]}" for key in (REPEATS, "seed") if key in arguments)
    n, first = words.count(REPEATS, 1), words.count("seed", 0)
    if not 1 <= n <= MAX_RUNS:
        raise ConfigError(f"repeats={n} must be from 1 to {MAX_RUNS:,}")
    for name in (f"{SWEEP}seed", f"{ZIP}seed"):
        if name in arguments:
            raise ConfigError(f"repeats={n} and {name}={arguments[name]} both set the seeds; remove one of them")
    return tuple(str(first + k) for k in range(n))


INNERMOST, OUTERMOST = "innermost", "outermost"
_MAX_DIGITS = 15  # of a seed
_MAX_NAME = 200  # bytes of a directory's name that every file system allows


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study. The queue appends `affinity=` of the slot to its command."""

    setting: str  # directory within the study: experiment/setting, or one of them; empty if there is only one of each
    run_ID: int
    arguments: Mapping[str, str]  # key=value, without those for directory and hardware
    directory: Path  # <study>/<setting>/run_<ID>
    command: tuple[str, ...]
    resume_command: tuple[str, ...]  # continues from the snapshot in its directory
    stack_command: tuple[str, ...] = ()  # trains it with others that have the same, by stack=[seeds]; (): by itself

    @property
    def name(self) -> str:
        """Its directory within the study."""
        return f"{self.setting}/run_{self.run_ID}" if self.setting else f"run_{self.run_ID}"

    @property
    def log(self) -> Path:
        """The output of all its attempts; next to its directory, which the run creates itself."""
        return self.directory.with_name(f"{self.directory.name}.log")


@dataclass(frozen=True)
class CommandTemplate:
    """The command of every run of a study: `command key=value ... log_dir=DIR run_ID=N`."""

    command: tuple[str, ...]
    resumes_by_directory: bool  # resumed by `command resume=RUN_DIR`; else by the same arguments and `resume=true`
    is_foreign: Callable[[Mapping[str, str]], object] = lambda arguments: False  # then that needs trust=true as well

    def make_run(
        self, study: Path, experiment: str, setting: str, run_id: int, arguments: Mapping[str, str]
    ) -> PlannedRun:
        """The run with this ID and arguments. The names of experiment and setting are empty if there is only one."""
        setting = "/".join(filter(None, (experiment, setting)))
        folder = study / setting
        place = (f"log_dir={folder}", f"run_ID={run_id}")
        start = (*self.command, *[f"{key}={value}" for key, value in arguments.items()], *place)
        directory = folder / f"run_{run_id}"
        length = [f"{N_STEPS}={arguments[N_STEPS]}"] if N_STEPS in arguments else []  # it may have been shorter before
        trust = ["trust=true"] if self.is_foreign(arguments) else []
        by_directory = (*self.command, f"resume={directory}", *length, *trust)
        resume = by_directory if self.resumes_by_directory else (*start, "resume=true")
        return PlannedRun(setting, run_id, dict(arguments), directory, start, resume)


def make_runs(
    make_run: Callable[[str, int, dict[str, str]], PlannedRun],
    base: Mapping[str, str],
    combinations: Sequence[Mapping[str, str]],
    run_id: int = 0,
) -> tuple[PlannedRun, ...]:
    """A run for each combination of values, all seeds of a setting together.

    Args:
        make_run: makes a run from a setting's name, an ID and arguments: `partial(template.make_run, study, "")`.
        base: arguments of all runs.
        combinations: a setting is a combination without its `seed`. The run is run_<seed>, or without one run_<run_id>.
    Raises:
        ConfigError: two combinations are equal, or a seed is not a whole number.
    """
    settings: dict[frozenset[tuple[str, str]], tuple[dict[str, str], dict[int, dict[str, str]]]] = {}
    for combination in combinations:
        seed = combination.get("seed", str(run_id))
        if not seed.isdecimal() or len(seed) > _MAX_DIGITS:
            raise ConfigError(f"seed: {seed[:60]!r} is not a whole number of at most {_MAX_DIGITS} digits")
        setting = {key: value for key, value in combination.items() if key != "seed"}
        _, by_id = settings.setdefault(frozenset(setting.items()), (setting, {}))
        if int(seed) in by_id:
            raise ConfigError(f"the setting {dict(combination)} is given twice; remove one")
        by_id[int(seed)] = {**setting, "seed": seed} if "seed" in combination else setting
    names = setting_names([setting for setting, _ in settings.values()])
    return tuple(
        make_run(name, number, {**base, **arguments})
        for name, (_, by_id) in zip(names, settings.values(), strict=True)
        for number, arguments in by_id.items()
    )


def in_order(runs: Sequence[PlannedRun], order: str) -> tuple[PlannedRun, ...]:
    """The runs of `make_runs` as they are (innermost), or all settings with their first seed first (outermost).

    Raises:
        ConfigError: the order is unknown.
    """
    check_one_of("seeds", order, (INNERMOST, OUTERMOST))
    if order == INNERMOST:
        return tuple(runs)
    n_seen: Counter[str] = Counter()
    places = []
    for run in runs:
        places.append(n_seen[run.setting])
        n_seen[run.setting] += 1
    return tuple(run for _, run in sorted(zip(places, runs, strict=True), key=lambda pair: pair[0]))


def setting_names(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """A directory's name for each setting: learning_rate=1e-3,clip=0.2; empty for a single empty setting."""
    keys = list(dict.fromkeys(key for setting in settings for key in setting))
    short = [key.rpartition(".")[2] for key in keys]
    titles = {key: last if short.count(last) == 1 else key for key, last in zip(keys, short, strict=True)}
    names: dict[str, None] = {}
    for index, setting in enumerate(settings):
        name = ",".join(f"{titles[key]}={_safe(value)}" for key, value in setting.items())
        usable = name not in names and len(name.encode()) <= _MAX_NAME and (name or len(settings) == 1)
        names[name if usable else f"setting_{index}"] = None
    return list(names)


def _safe(value: str) -> str:
    """A value as part of a directory's name: [64,64] is 64x64, ALE/Pong-v5 is ALE_Pong-v5, ./mine.py:Env is Env."""
    value = re.sub(r"[^,\[]*\.py:", "", value)
    return re.sub(r"[^\w.+=-]", "_", re.sub(r"[\[\](){}\s]", "", value).replace(",", "x"))


@dataclass(frozen=True)
class Slot:
    """The part of the machine that one run at a time uses."""

    index: int
    code: str  # `affinity=` of its runs
    affinity: Affinity


def make_slots(code: str, topology: Topology, n_runs: int, on_gpu: bool = True) -> list[Slot]:
    """The slots of an affinity code.

    Args:
        code: `none` (one slot, not pinned), a code without slt, or `auto`: one slot per GPU with an equal share of the
            cores. Without a GPU, one slot per core, or fewer and larger ones if there are fewer runs than cores. A
            container with a CPU quota below its number of cores gets one slot per CPU of the quota, not pinned.
        on_gpu: whether the runs use GPUs.
    Raises:
        ConfigError: the code does not fit the machine, or names a slot.
    """
    if re.search(r"(^|_)\d+slt(_|$)", code):
        raise ConfigError(f"affinity={code} names one slot, but a study uses all of them; leave out slt")
    n_copies = 1
    if code == "auto":
        code, n_copies = _auto(topology, max(1, n_runs), on_gpu)
    whole = plan(code, topology)
    n_slots = whole.n_slots
    if n_slots == 1:
        return [Slot(index, code, whole) for index in range(n_copies)]
    return [Slot(k, f"{code}_{k}slt", plan(code, topology, slot=k)) for k in range(n_slots)]


def _auto(topology: Topology, n_runs: int, on_gpu: bool) -> tuple[str, int]:
    """An affinity code, and the number of slots that use it unchanged."""
    n_cores = len({(cpu.socket, cpu.core) for cpu in topology.cpus})
    n_gpus = len(topology.gpus)
    if n_gpus and on_gpu:
        return f"{min(n_gpus, n_cores, n_runs)}gpu_1gpr", 1
    if topology.quota < n_cores:
        return "none", max(1, min(int(topology.quota), n_runs))
    return f"{max(1, n_cores // n_runs)}cpr" + ("_0gpu" if n_gpus else ""), 1


def describe_slots(slots: Sequence[Slot]) -> str:
    """One line per slot: its CPUs, GPUs and affinity code."""
    lines = [pluralize(len(slots), "slot") + ":"]
    for slot in slots:
        cpus, gpus = (",".join(map(str, part)) for part in (slot.affinity.cpus, slot.affinity.gpus))
        place = (f"CPU {cpus}" if cpus else "not pinned") + (f", GPU {gpus}" if gpus else "")
        lines.append(f"  slot {slot.index}  {place}  (affinity={slot.code})")
    return "\n".join(lines)


def varied(runs: Sequence[PlannedRun]) -> dict[str, list[str]]:
    """The values of each argument that differs between the runs, `seed` included; empty where a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run.arguments)
    values = {key: list(dict.fromkeys(run.arguments.get(key, "") for run in runs)) for key in keys}
    return {key: each for key, each in values.items() if len(each) > 1}


def number_or_text(word: str) -> int | float | str:
    """A word as a number if it is one."""
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return word
