"""Datasets on disk: Minari's formats (HDF5, Arrow, Parquet), read column by column with every size checked first.

Nothing in a dataset is executed: spaces are read as JSON, and the environment's entry point is never imported.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Discrete, MultiDiscrete

from rlframe.core.errors import ConfigError, one_line, prefixed, printable
from rlframe.core.files import json_object, read_json
from rlframe.core.spaces import action_parts
from rlframe.core.struct import leaves, map_tree
from rlframe.data.episodes import SAMPLED_ACTION, Episode, sampled_numbers, shifted
from rlframe.data.spaces import difference, read_space

DATA, METADATA = "data", "metadata.json"
SCORE_KEYS = ("ref_min_score", "ref_max_score")  # in the metadata, as in Minari
_ID = re.compile(r"(?:[-\w][-\w/]*/)?[-\w]+-v\d+")
_WORD = re.compile(r"[\w-]{1,40}")  # no path, and no module:function
_DAMAGES = (OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError, OverflowError, MemoryError)
_FORMATS = ("arrow", "hdf5", "parquet")


class Columns(Protocol):
    """The arrays of a dataset's episodes, in one format."""

    def read(self, i: int) -> dict[str, Any]:
        """Those of episode i: observations, actions, rewards, terminations, truncations and infos.

        Raises ConfigError, OSError, ValueError, KeyError or TypeError if they cannot be read.
        """

    def close(self) -> None:
        """Close its files."""


def datasets_root() -> Path:
    """Where datasets are kept by id: MINARI_DATASETS_PATH, or ~/.minari/datasets."""
    return Path(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets").expanduser().absolute()


def locate(name: str) -> Path:
    """The directory of a dataset by its path (/..., ./..., ~/...) or its id (namespace/name-v0).

    Raises:
        ConfigError: the name is neither.
    """
    if name.startswith(("/", ".", "~")):
        path = Path(name).expanduser().absolute()
        return path.parent if path.name == DATA else path
    if not _ID.fullmatch(name):
        raise ConfigError(f"{printable(name[:200])!r} is no dataset; give an id such as name-v0, or a path (./name-v0)")
    return datasets_root() / name


@dataclass(frozen=True)
class Dataset:
    """A dataset of episodes, opened by `open_dataset`."""

    path: Path  # its directory
    observation_space: Space
    action_space: Space
    n_episodes: int
    n_steps: int
    format: str  # arrow, hdf5 or parquet
    jpeg: bool  # whether its images are compressed with loss
    metadata: Mapping[str, Any] = field(repr=False)  # the content of its metadata.json

    @property
    def name(self) -> str:
        """Its id."""
        return printable(str(self.metadata.get("dataset_id", self.path.name)))[:200]

    @property
    def reference(self) -> ReferenceScores | None:
        """The returns that scores are normalized by; None if it names none."""
        return reference_scores(self.metadata)

    @property
    def env_id(self) -> str:
        """The Gymnasium id of the environment it is from; empty if it is not known."""
        return printable(str(self._env_spec.get("id", "")))[:200]

    @property
    def env_kwargs(self) -> dict[str, Any] | None:
        """The arguments of that environment; None if there are others than numbers and plain words."""
        found = self._env_spec.get("kwargs", {})
        if not isinstance(found, dict):
            return None
        words = [x for x in found.values() if not isinstance(x, bool | int | float)]
        plain = all(isinstance(x, str) and _WORD.fullmatch(x) for x in words) and all(map(str.isidentifier, found))
        return found if plain else None

    @property
    def _env_spec(self) -> dict[str, Any]:
        return json_object(str(self.metadata.get("env_spec", "{}")).encode())

    def episodes(self, start: int = 0) -> Iterator[Episode]:
        """Its episodes in order, one at a time in memory.

        Raises:
            ConfigError: an episode is damaged, has a NaN or Inf, or does not fit the spaces; the message names it.
                Or, of all episodes, their steps are not as many as it claims.
        """
        columns, n_steps = self._columns(), 0
        try:
            for i in range(start, self.n_episodes):
                try:
                    found = self._checked(columns.read(i))
                    n_steps += len(found)
                    yield found
                except _DAMAGES as error:
                    reason = printable(one_line(error))
                    raise ConfigError(f"episode {i} of the dataset {self.path} is damaged: {reason}") from None
                except ConfigError as error:
                    raise ConfigError(f"episode {i} of the dataset {self.path}: {error}") from None
            if not start and n_steps != self.n_steps:
                raise ConfigError(f"the dataset {self.path} claims {self.n_steps:,} steps and has {n_steps:,}")
        finally:
            columns.close()

    def _columns(self) -> Columns:
        try:
            if self.format == "hdf5":
                from rlframe.data.hdf5 import HDF5Columns

                return HDF5Columns(self.path / DATA, self.observation_space, self.action_space, self.jpeg)
            from rlframe.data.arrow import ArrowColumns

            return ArrowColumns(self.path / DATA, self.observation_space, self.action_space, self.jpeg, self.format)
        except ImportError as error:
            raise ConfigError(f'the dataset {self.path} needs {error.name}: pip install "rlframe[data]"') from None
        except _DAMAGES as error:
            raise ConfigError(f"the dataset {self.path} is damaged: {printable(one_line(error))}") from None

    def _checked(self, found: Mapping[str, Any]) -> Episode:
        """The episode of these arrays; raises ValueError if they do not belong together."""
        reward = np.asarray(found["rewards"])
        n = len(reward)
        if not n or reward.ndim != 1 or reward.dtype.kind not in "fiu":
            raise ValueError(f"rewards are {reward.dtype}{list(reward.shape)}, not one number a step")
        ends = [np.asarray(found[key]) for key in ("terminations", "truncations")]
        if any(x.shape != (n,) or x.dtype.kind not in "biu" for x in ends):
            raise ValueError(f"terminations and truncations need {n} booleans each")
        given = fitted(self.observation_space, found["observations"], n + 1, "observation")
        observation = shifted(self.observation_space, given, -1)
        action = fitted(self.action_space, found["actions"], n, "action")
        info = {}
        for key, x in found["infos"].items():
            if x.dtype.kind in "fiub" and x.ndim and len(x) in (n, n + 1):
                info[str(key)] = x[len(x) - n :].copy()  # Minari has those of the reset first
        if SAMPLED_ACTION in info and (numbers := sampled_numbers(self.action_space, action)) is not None:
            _check_sampled(info[SAMPLED_ACTION], numbers.shape)
        rewards = reward.astype(np.float32)
        if not np.isfinite(rewards).all():
            raise ValueError("rewards have NaN or Inf")
        terminated, truncated = (x.astype(np.bool_) for x in ends)
        return Episode(observation, action, rewards, terminated, truncated & ~terminated, info)


def _check_sampled(sampled: np.ndarray, shape: tuple[int, ...]) -> None:
    if sampled.shape != shape or not np.isfinite(sampled).all():
        raise ValueError(f"{SAMPLED_ACTION} has the shape {list(sampled.shape)}, not {list(shape)}, or NaN or Inf")


def fitted(space: Space, values: Any, n: int, name: str) -> Any:
    """Values [n, ...] that fit a space, in its dtypes; raises ValueError if they do not."""
    if (n_arrays := len(leaves(values))) != len(action_parts(space)):
        raise ValueError(f"{name} has {n_arrays} arrays, and {space} is of {len(action_parts(space))}")
    parts = iter(action_parts(space, name))

    def fitting(x: Any) -> np.ndarray:
        part_name, part = next(parts)
        x, shape = np.asarray(x), tuple(part.shape or ())
        dtype = np.dtype(np.float32 if part.dtype == np.float64 else part.dtype)
        if x.shape != (n, *shape):
            raise ValueError(f"{part_name} has the shape {list(x.shape)}, not {[n, *shape]}")
        if x.dtype.kind not in "fiub" or (x.dtype.kind == "f" and dtype.kind != "f"):
            raise ValueError(f"{part_name} is {x.dtype}, not {dtype}")
        if isinstance(part, Discrete | MultiDiscrete):
            end = part.start + np.asarray(part.n if isinstance(part, Discrete) else part.nvec)
            if ((x < part.start) | (x >= end)).any():
                raise ValueError(f"{part_name} goes from {x.min()} to {x.max()}, and {part} does not")
        with np.errstate(over="ignore"):
            given, x = x, x.astype(dtype, copy=False)
        if dtype.kind == "f" and not np.isfinite(x).all():
            raise ValueError(f"{part_name} has NaN or Inf")
        if dtype.kind != "f" and x is not given and not np.array_equal(x, given):
            raise ValueError(f"{part_name} goes from {given.min()} to {given.max()}, which {dtype} does not hold")
        return x if x.flags.writeable else x.copy()  # of a mapped file

    return map_tree(fitting, values)


def check_episode(episode: Episode, spaces: tuple[Space, Space] | None) -> None:
    """Raise ValueError, TypeError or KeyError unless an episode's arrays belong together, and fit spaces if given."""
    T = len(episode)
    wanted = {
        "observation": (episode.observation, T + 1),
        **{name: (getattr(episode, name), T) for name in ("action", "reward", "terminated", "truncated")},
        **{f"info[{key!r}]": (x, T) for key, x in episode.info.items()},
    }
    for name, (tree, n) in wanted.items():
        for x in leaves(tree):
            if not isinstance(x, np.ndarray) or not x.ndim or x.dtype.kind not in "fiub" or len(x) != n:
                what = f"{x.dtype} of {len(x)} rows" if isinstance(x, np.ndarray) and x.ndim else type(x).__name__
                raise ValueError(f"it has {T} rewards and its {name} is {what}; it needs {n} numbers")
            if name in ("terminated", "truncated") and x.dtype != np.bool_:
                raise ValueError(f"its {name} is {x.dtype}, not bool")
            if x.dtype.kind == "f" and not np.isfinite(x).all() and not name.startswith("info"):
                raise ValueError(f"its {name} has NaN or Inf")
    if spaces is not None:
        fitted(spaces[0], shifted(spaces[0], episode.observation, 1), T + 1, "observation")
        fitted(spaces[1], episode.action, T, "action")


def open_dataset(name: str | Path, key: str = "") -> Dataset:
    """A dataset by its path or id; see `locate`.

    Args:
        key: that names it, for messages.
    Raises:
        ConfigError: there is none, or its metadata are damaged or of another form.
    """
    with prefixed(f"{key}={name}" if key else ""):
        return _opened(locate(str(name)))


def _opened(path: Path) -> Dataset:
    if not (path / DATA / METADATA).exists():
        where = f"; datasets are in {path.parent} (python -m rlframe.data list)" if path.parent.is_dir() else ""
        raise ConfigError(f"there is no dataset {path}{where}")
    metadata = read_json(path / DATA / METADATA)
    for key in ("observation_space", "action_space", "total_episodes", "total_steps", "data_format"):
        if key not in metadata:
            raise ConfigError(f"the dataset {path} lacks {key} in its {METADATA}")
    counts = n_episodes, n_steps = metadata["total_episodes"], metadata["total_steps"]
    if any(isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < 1 << 48 for x in counts):
        raise ConfigError(f"the dataset {path} claims {str(counts)[:80]} episodes and steps, which are no counts")
    if (kind := metadata["data_format"]) not in _FORMATS:
        raise ConfigError(f"the dataset {path} has the format {str(kind)[:60]!r}, not one of {', '.join(_FORMATS)}")
    seen, acted = (
        read_space(metadata[f"{x}_space"], f"the dataset {path}: {x}_space") for x in ("observation", "action")
    )
    return Dataset(path, seen, acted, n_episodes, n_steps, kind, bool(metadata.get("jpeg_encoding", True)), metadata)


def check_spaces(dataset: Dataset, observation_space: Space, action_space: Space, of: str) -> None:
    """Raise ConfigError unless a dataset has the spaces of `of`; the message says what differs."""
    pairs = (
        (dataset.observation_space, observation_space, "observation"),
        (dataset.action_space, action_space, "action"),
    )
    for one, other, name in pairs:
        if found := difference(one, other, name):
            raise ConfigError(f"the dataset {dataset.path} does not fit {of}: {found}")


def list_datasets(root: Path) -> list[Path]:
    """The directories of datasets below a folder, sorted."""
    if not root.is_dir():
        return []
    found = []
    for folder, names, _ in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith("."))
        if DATA in names and (Path(folder) / DATA / METADATA).is_file():
            found.append(Path(folder))
            names.clear()
    return sorted(found)


@dataclass(frozen=True)
class ReferenceScores:
    """Mean returns of episodes."""

    random: float  # of a random policy
    expert: float

    def normalized(self, return_: Any) -> Any:
        """100 (G - random) / (expert - random), of returns of any shape: 0 is random, 100 the expert.

        (Fu et al. 2020, D4RL, arXiv 2004.07219, section 5; Minari's get_normalized_score is a hundredth of it)
        """
        return 100 * (return_ - self.random) / (self.expert - self.random)


def reference_scores(metadata: Mapping[str, Any]) -> ReferenceScores | None:
    """Those of a dataset's metadata; None if it has not two different numbers."""
    low, high = (metadata.get(key) for key in SCORE_KEYS)
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e30 for x in (low, high))
    if low is None or high is None or not numbers or not math.isfinite(low + high) or low == high:
        return None
    return ReferenceScores(float(low), float(high))
