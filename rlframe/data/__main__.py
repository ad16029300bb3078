"""python -m rlframe.data VERB ...: list, describe, merge, split, filter, convert and import datasets."""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command: during imports Ctrl-C shows no traceback

import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from gymnasium import spaces

from rlframe.core.command_line import KeyValues, exit_with, run_command, run_verb
from rlframe.core.config import check_one_of
from rlframe.core.errors import ConfigError
from rlframe.core.files import prepare_output
from rlframe.data import tools
from rlframe.data.episodes import Episode
from rlframe.data.reading import SCORE_KEYS, Dataset, datasets_root, list_datasets, open_dataset, reference_scores
from rlframe.data.rllib import read_json_lines
from rlframe.data.tools import like
from rlframe.data.writing import COMPRESSIONS, NewDataset, check_free

_USAGE = """\
usage: python -m rlframe.data VERB [DATASET ...] [key=value ...]

A DATASET is an id such as name-v0, below MINARI_DATASETS_PATH or ~/.minari/datasets, or a path (/..., ./..., ~/...).

  list [FOLDER]                          the datasets in a folder, by default where ids are
  describe DATASET... [out=FILE.png]     episodes, steps, returns and lengths; out= draws them
  merge DATASET... into=NEW              all episodes of several
  split DATASET into=A,B fraction=0.9    the first part has this fraction of the episodes, drawn with seed=0
  filter DATASET into=NEW                min_return= max_return= min_length= max_length=
  convert DATASET into=NEW format=hdf5   or arrow, parquet
  import FILE.json into=NEW env=ID       RLlib's JSON lines; rows that need unpickling are refused;
                                         normalized_actions=true: those of a Box go from -1 to 1 in the file

Where a dataset is written: format=arrow, and compression=none, lz4 or zstd (hdf5: gzip for both). Images are kept as
they are, without loss.
Where datasets are copied (all but import): ref_min_score= and ref_max_score=, the returns of a random policy and of an
expert, by which scores are normalized.

To record: record=NEW in python -m rlframe.launch, dataset=NEW in python -m rlframe.evaluate.
"""
_FORMATS = ("arrow", "parquet", "hdf5")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    return run_command(partial(run_verb, _VERBS), argv, _USAGE)


def _list(names: list[str], words: KeyValues) -> None:
    if words.remaining or len(names) > 1:
        raise ConfigError(f"list takes one folder, or none, and no keys, not {' '.join([*names, *words.remaining])}")
    root = Path(names[0]) if names else datasets_root()
    if not (paths := list_datasets(root)):
        print(f"no datasets in {root}")
    for path in paths:
        try:
            found = open_dataset(str(path.absolute()))
        except ConfigError as error:
            print(f"{path}: {error}")
            continue
        env = f", {found.env_id}" if found.env_id else ""
        print(f"{found.name}: {found.n_episodes:,} episodes, {found.n_steps:,} steps{env}, {found.format}")


def _describe(names: list[str], words: KeyValues) -> None:
    out = words.text("out")
    words.check_unknown()
    datasets = _opened(names, 1)
    if out:
        prepare_output(Path(out))
    found = {}
    for dataset in datasets:
        name = str(dataset.path) if dataset.name in found else dataset.name
        found[name] = tools.describe(dataset)
        env = f" of {dataset.env_id}" if dataset.env_id else ""
        print(f"{dataset.name}{env}, {dataset.format}, in {dataset.path}")
        print(f"  observations {dataset.observation_space}\n  actions {dataset.action_space}")
        print("\n".join(found[name].lines()))
    if out:
        tools.draw(found, Path(out))


def _merge(names: list[str], words: KeyValues) -> None:
    datasets = _opened(names, 2)
    new = _new(datasets[0], words, "")
    facts = {**new.facts, "combined_datasets": [each.name for each in datasets]}
    _write(replace(new, facts=facts), tools.merged(datasets))


def _split(names: list[str], words: KeyValues) -> None:
    (dataset,) = _opened(names, 1, 1)
    fraction, seed = words.number("fraction", 0.9), words.count("seed", 0)
    targets = words.text("into").split(",")
    if len(set(targets)) != 2 or len(targets) != 2:
        raise ConfigError(f"into={','.join(targets):.200} needs two different names, into=A,B")
    parts = tools.split(dataset, fraction, seed)
    check_free(targets[1])
    first = _new(dataset, words, targets[0])
    for name, part in zip(targets, parts, strict=True):
        _write(replace(first, name=name), part())


def _filter(names: list[str], words: KeyValues) -> None:
    (dataset,) = _opened(names, 1, 1)
    low, high = words.number("min_return", -math.inf), words.number("max_return", math.inf)
    shortest, longest = words.count("min_length", 0), words.number("max_length", math.inf)
    episodes = dataset.episodes()
    kept = (x for x in episodes if low <= x.return_ <= high and shortest <= len(x) <= longest)
    if (first := next(kept, None)) is None:
        raise ConfigError(f"{names[0]} has no episode within these limits; python -m rlframe.data describe shows them")
    _write(_new(dataset, words, ""), chain([first], kept))


def _convert(names: list[str], words: KeyValues) -> None:
    (dataset,) = _opened(names, 1, 1)
    _write(_new(dataset, words, ""), dataset.episodes())


def _import(names: list[str], words: KeyValues) -> None:
    if len(names) != 1:
        raise ConfigError(f"give one file of JSON lines, not {len(names)}")
    env = words.text("env")
    if not env:
        raise ConfigError("env=ID says which environment the rows are from; its spaces are checked")
    observation_space, action_space, spec = tools.spaces_of(env)
    normalized = words.flag("normalized_actions")
    if normalized and not (isinstance(action_space, spaces.Box) and action_space.is_bounded()):
        raise ConfigError(f"normalized_actions=true is for a Box with bounds, not {action_space}")
    into, kind, compression = _target(words, "")
    facts = {"description": "imported from RLlib's JSON lines"}
    new = NewDataset(into, observation_space, action_space, spec, facts, kind, compression)
    episodes = read_json_lines(Path(names[0]), observation_space, action_space, normalized)
    if (first := next(episodes, None)) is None:
        raise ConfigError(f"{names[0]} has no whole step: its rows need new_obs, or others after them")
    _write(new, chain([first], episodes))


def _opened(names: list[str], least: int, most: int = sys.maxsize) -> list[Dataset]:
    if not least <= len(names) <= most:
        wanted = f"{least}" if most == least else f"{least} or more"
        raise ConfigError(f"give {wanted} datasets, not {len(names)}; --help shows the forms")
    return [open_dataset(name) for name in names]


def _target(words: KeyValues, into: str) -> tuple[str, str, str]:
    """Name, format and compression of a new dataset; no other key is left."""
    into, kind = into or words.text("into"), words.text("format", "arrow")
    compression = words.text("compression", "none")
    words.check_unknown()
    check_one_of("format", kind, _FORMATS)
    check_one_of("compression", compression, COMPRESSIONS)
    if not into:
        raise ConfigError("into=NEW is missing, the id or path of the new dataset")
    check_free(into)
    return into, kind, compression


def _new(dataset: Dataset, words: KeyValues, into: str) -> NewDataset:
    given = {key: words.number(key, math.nan) for key in SCORE_KEYS}
    into, kind, compression = _target(words, into)
    new = like(dataset, into, format=kind, compression=compression)
    named = {key: value for key, value in given.items() if not math.isnan(value)}
    facts = {**new.facts, **named}
    if named and reference_scores(facts) is None:
        raise ConfigError(f"{' and '.join(SCORE_KEYS)} must be two different numbers, the returns of random and expert")
    return replace(new, facts=facts)


def _write(new: NewDataset, episodes: Iterable[Episode]) -> None:
    n, n_steps = tools.write(new, episodes)
    print(f"{new.name}: {n:,} episodes, {n_steps:,} steps")


_VERBS = {
    "list": _list,
    "describe": _describe,
    "merge": _merge,
    "split": _split,
    "filter": _filter,
    "convert": _convert,
    "import": _import,
}


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
