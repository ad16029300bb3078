"""What can be done with whole datasets: copied to another format, described, merged, split and filtered."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space

from rlframe.analysis.figures import new_figure, save_figure
from rlframe.core.errors import ConfigError, one_line
from rlframe.core.files import replace_file
from rlframe.core.spaces import zeros
from rlframe.core.struct import Tree, map_tree
from rlframe.data.episodes import SAMPLED_ACTION, Episode, sampled_actions, sampled_numbers
from rlframe.data.reading import DATA, METADATA, SCORE_KEYS, Dataset, ReferenceScores, check_spaces, locate
from rlframe.data.writing import DatasetWriter, NewDataset, check_free, id_of, metadata_of, size_in_mb

_KEPT = ("env_spec", "algorithm_name", "author", "author_email", "code_permalink", *SCORE_KEYS)
_BARS, _WIDTH = 10, 40  # of a histogram


def like(dataset: Dataset, name: str, **changes: Any) -> NewDataset:
    """A new dataset of the same spaces, that says where it is from."""
    kept = {key: dataset.metadata[key] for key in _KEPT if key in dataset.metadata}
    spec = str(kept.pop("env_spec", ""))
    facts = {**kept, "combined_datasets": [dataset.name]}
    return replace(NewDataset(name, dataset.observation_space, dataset.action_space, spec, facts), **changes)


def write(new: NewDataset, episodes: Iterable[Episode]) -> tuple[int, int]:
    """Write episodes to a new dataset, which appears when all of them are written; returns their number and steps.

    Raises:
        ConfigError: there is a dataset of this name, or an episode is damaged.
    """
    check_free(new.name)
    to = locate(new.name)
    hidden = to.with_name(f".{to.name}.new")
    new = replace(new, name=str(hidden), facts={**new.facts, "dataset_id": id_of(new.name)})
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        if new.format == "hdf5":
            n, n_steps = _write_hdf5(new, episodes)
        else:
            writer = DatasetWriter(new)
            for episode in episodes:
                writer.put(episode)
            writer.close()  # not after an error: what is left may be what cannot be written
            n, n_steps = writer.n_episodes, writer.n_steps
        os.replace(hidden, to)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return n, n_steps


def _write_hdf5(new: NewDataset, episodes: Iterable[Episode]) -> tuple[int, int]:
    try:
        from rlframe.data.hdf5 import write_hdf5
    except ImportError:
        raise ConfigError('format=hdf5 needs h5py: pip install "rlframe[data]"') from None
    folder = Path(new.name) / DATA
    folder.mkdir(parents=True)
    columns = () if new.compression == "none" else ("observations", "actions", "rewards", "infos")
    n, n_steps = write_hdf5(folder, map(new.as_stored, episodes), dict.fromkeys(columns, "gzip"))
    replace_file(folder / METADATA, json.dumps(metadata_of(new, n, n_steps, size_in_mb(folder))))
    return n, n_steps


def merged(datasets: list[Dataset]) -> Iterator[Episode]:
    """The episodes of several datasets, one after the other. Raises ConfigError unless all have the same spaces."""
    first = datasets[0]
    for other in datasets[1:]:
        check_spaces(other, first.observation_space, first.action_space, f"{first.path}")
    return (_in_order(each, dataset, first) for dataset in datasets for each in dataset.episodes())


def _in_order(episode: Episode, own: Dataset, first: Dataset) -> Episode:
    """An episode with the entries of Dicts in the order of another dataset, which has the same ones."""
    if own is first:
        return episode

    def ordered(space: Space, tree: Tree) -> Tree:
        return map_tree(lambda _, x: x, zeros(space), tree)

    spaces, info = (own.action_space, first.action_space), dict(episode.info)
    if SAMPLED_ACTION in info:
        numbers = sampled_numbers(spaces[1], ordered(spaces[1], sampled_actions(episode, spaces[0])))
        info |= {} if numbers is None else {SAMPLED_ACTION: numbers}
    observation = ordered(first.observation_space, episode.observation)
    return replace(episode, observation=observation, action=ordered(spaces[1], episode.action), info=info)


def split(dataset: Dataset, fraction: float, seed: int) -> tuple[Callable[[], Iterator[Episode]], ...]:
    """Two parts of a dataset, of which the first has this fraction of the episodes, drawn at random."""
    n = round(dataset.n_episodes * fraction) if 0 < fraction < 1 else 0
    if not 0 < n < dataset.n_episodes:
        raise ConfigError(
            f"fraction={fraction:g} of {dataset.n_episodes} episodes leaves one part empty; use one between "
            f"{1 / max(2, dataset.n_episodes):.2g} and {1 - 1 / max(2, dataset.n_episodes):.2g}"
        )
    chosen = np.zeros(dataset.n_episodes, bool)
    chosen[np.random.default_rng(seed).permutation(dataset.n_episodes)[:n]] = True
    return tuple(lambda part=part: compress(dataset.episodes(), part) for part in (chosen, ~chosen))


@dataclass(frozen=True)
class Description:
    """Returns and lengths of all episodes, and what is known of their actions."""

    returns: np.ndarray  # [episodes]
    lengths: np.ndarray  # [episodes] env steps
    n_terminated: int
    n_truncated: int
    n_bytes: int
    infos: tuple[str, ...]
    reference: ReferenceScores | None = None

    def lines(self) -> list[str]:
        """For people, with a histogram of the returns."""
        r, n = self.returns, self.lengths
        text = [
            f"  {len(r):,} episodes, {int(n.sum()):,} steps, {self.n_bytes / 1e6:,.1f} MB in memory",
            f"  return {r.mean():.4g} +- {r.std():.4g}, from {r.min():.4g} to {r.max():.4g}",
            *self._normalized(),
            f"  length {n.mean():.4g} +- {n.std():.4g}, from {n.min()} to {n.max()}",
            f"  {self.n_terminated:,} terminated, {self.n_truncated:,} truncated",
            f"  recorded besides: {', '.join(self.infos) or 'nothing'}",
            "  returns:",
        ]
        counts, edges = np.histogram(r, _BARS)
        for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
            bar = "#" * -(-int(count) * _WIDTH // max(1, int(counts.max())))
            text.append(f"    {low:>10.4g} to {high:<10.4g} {count:>7,} {bar}".rstrip())
        return text

    def _normalized(self) -> list[str]:
        if self.reference is None:
            return []
        scores, at = self.reference.normalized(self.returns), f"0 is {self.reference.random:.6g}"
        return [f"  normalized score {scores.mean():.4g} +- {scores.std():.4g}; {at}, 100 {self.reference.expert:.6g}"]


def describe(dataset: Dataset) -> Description:
    """Read all episodes of a dataset once. Raises ConfigError if it has none, or one is damaged."""
    returns, lengths, infos = [], [], dict[str, None]()
    terminated = truncated = n_bytes = 0
    for episode in dataset.episodes():
        returns.append(episode.return_)
        lengths.append(len(episode))
        terminated += bool(episode.terminated[-1])
        truncated += bool(episode.truncated[-1])
        n_bytes += episode.n_bytes
        infos |= dict.fromkeys(episode.info)
    if not returns:
        raise ConfigError(f"the dataset {dataset.path} has no episodes")
    numbers = np.array(returns), np.array(lengths)
    return Description(*numbers, terminated, truncated, n_bytes, tuple(infos), dataset.reference)


def draw(found: Mapping[str, Description], out: Path) -> None:
    """Histograms of returns and lengths, as an image file. Raises ConfigError, as `new_figure` and `save_figure`."""
    figure = new_figure(9.0, 3.2)
    axes = figure.subplots(1, 2)
    for name, each in found.items():
        for axis, values in zip(axes, (each.returns, each.lengths), strict=True):
            axis.hist(values, bins=30, alpha=0.6, label=name)
    for axis, label in zip(axes, ("return of an episode", "length of an episode (env steps)"), strict=True):
        axis.set_xlabel(label)
        axis.set_ylabel("episodes")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    save_figure(figure, out)


def spaces_of(env: str) -> tuple[Space, Space, str]:
    """Spaces and EnvSpec of a Gymnasium environment; raises ConfigError if it cannot be made."""
    import gymnasium

    try:
        made = gymnasium.make(env)
        found = made.observation_space, made.action_space, made.spec.to_json() if made.spec else ""
        made.close()
        return found
    except Exception as error:  # making an environment runs user code, which may raise anything
        remedy = "; an import takes the id of a registered environment: gymnasium.register yours" if ":" in env else ""
        raise ConfigError(f"env={env:.100} cannot be made: {one_line(error)}{remedy}") from None
