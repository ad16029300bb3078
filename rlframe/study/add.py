"""Adding runs to a study, or a trial to a search, while its queue runs or before it is continued."""

import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path

from rlframe.analysis.curves import N_STEPS
from rlframe.core.config import nearest, split_values
from rlframe.core.errors import ConfigError, printable
from rlframe.experiment.job import check_words
from rlframe.experiment.study_keys import SEARCH
from rlframe.experiment.trust import foreign
from rlframe.study.added import Added, append_added
from rlframe.study.overview import StudyOverview, read_study
from rlframe.study.plan import read_grid, setting_names
from rlframe.study.record import is_occupied
from rlframe.study.search import PBT, SearchPlan
from rlframe.study.sweep import base_words, check_addable, new_words, recorded_experiments

_MAX_DIGITS = 15  # of a seed


def add_runs(directory: Path, experiment: str, given: Mapping[str, str], trust: bool) -> str:
    """Add the run of each seed of these words, or the trial, to a study; returns a line that says who starts it.

    Args:
        experiment: which of the study's experiments it is of; empty if there is only one, without a name.
        given: the values of the keys that the study varies, the seed or seeds, and any other key of a run.
    Raises:
        ConfigError: a key or value is wrong, or a run is in the study already; nothing was written.
    """
    check_addable(given)
    overview = read_study(directory)
    experiments = recorded_experiments(directory, {}, trust)[1]
    if experiment not in experiments:
        known = ", ".join(filter(None, experiments))
        what = f"name one of {known}: add NAME KEY=VALUE" if known else "the study has one without a name; leave it out"
        raise ConfigError(f"no experiment {experiment!r:.60}: {what}{nearest(experiment, experiments)}")
    words = experiments[experiment]
    if not given:
        raise ConfigError("add needs words of the new run, such as seed=3; see python -m rlframe.study --help")
    is_search = any(name.startswith(SEARCH) for name in words)
    seeds = [] if is_search else split_values(given.get("seed", base_words(words).get("seed", "0")))
    added = [_run(overview, experiment, words, {**given, "seed": seed}) for seed in seeds] or [_trial(words, given)]
    if len({each.name for each in added}) < len(added):
        raise ConfigError(f"seed={given['seed']:.60} has a seed twice; remove one")
    for each in added:
        append_added(directory, each)
    name = "a trial" if is_search else ", ".join(each.name for each in added)
    resume, it = shlex.quote(f"resume={directory}") + " trust=true" * trust, "them" if len(added) > 1 else "it"
    if overview.queue:
        return printable(f"added {name}: the queue, {overview.queue_name}, starts {it} when a slot is free")
    return printable(f"added {name}: no queue runs here, so python -m rlframe.launch {resume} starts {it}")


def _trial(words: Mapping[str, str], given: Mapping[str, str]) -> Added:
    """A trial with these values; the searcher chooses those that are not given."""
    search = SearchPlan.read(words, [0])
    if search.searcher == PBT:
        raise ConfigError(f"a population (searcher={PBT}) has the members that it began with; begin a new study")
    if "seed" in given:
        raise ConfigError("seed= is not for a trial, which has a run for each seed of the search; remove it")
    search.values(given)
    check_words({**base_words(words), **{key: each.examples()[0] for key, each in search.space.items()}, **given})
    return Added("", 0, dict(given))


def _run(overview: StudyOverview, experiment: str, words: Mapping[str, str], given: Mapping[str, str]) -> Added:
    base, grid = base_words(words), read_grid(words)
    if new := foreign(new_words(overview.planned, Added("", 0, given))):
        raise ConfigError(f"a run that is added cannot bring code, {new[0]}; repeat the study's command with it")
    seed = given["seed"]
    if not seed.isdecimal() or len(seed) > _MAX_DIGITS:
        raise ConfigError(f"seed={seed:.60} is not a whole number of at most {_MAX_DIGITS} digits")
    columns = {**grid.swept, **grid.zipped}
    check_words({**base, **{key: values[0] for key, values in columns.items()}, **given})  # unknown keys come first
    for key, values in columns.items():
        if key not in given and key != "seed":
            raise ConfigError(f"the study varies {key}: give the new run {key}=VALUE too, such as {key}={values[0]}")
    keys = [key for key in dict.fromkeys([*columns, *given]) if key != "seed"]
    setting = {key: given[key] for key in keys}
    arguments = {**base, **setting, "seed": seed}
    added = Added(_folder(overview, experiment, setting, arguments), int(seed), arguments, N_STEPS in given)
    if status := overview.statuses.get(added.name):
        raise ConfigError(f"{added.name} is in the study already, {status.state}; give another seed= or setting")
    if is_occupied(folder := overview.directory / added.name):
        raise ConfigError(f"{folder} is not empty and not a run of this study; move it away, or give another seed=")
    return added


def _folder(overview: StudyOverview, experiment: str, setting: Mapping[str, str], arguments: Mapping[str, str]) -> str:
    """The folder of the setting: that of its other seeds if there are some, else a new one."""
    for run in overview.planned:
        if {**run.arguments, "seed": ""} == {**arguments, "seed": ""}:
            return run.setting
    taken = {run.setting for run in overview.planned}
    names = itertools.chain(setting_names([setting]), map("added_{}".format, itertools.count()))
    folders = (f"{experiment}/{name}" if experiment and name else experiment or name for name in names)
    return next(folder for folder in folders if folder not in taken)
