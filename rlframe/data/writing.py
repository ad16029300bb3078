"""DatasetWriter: episodes appended to a dataset that loads at any moment, up to the last one that was written."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from gymnasium import Space

from rlframe.core.config import check_one_of
from rlframe.core.errors import ConfigError, prefixed
from rlframe.core.files import check_folder, read_json, replace_file
from rlframe.data.episodes import Episode, shifted
from rlframe.data.reading import DATA, METADATA, locate
from rlframe.data.spaces import space_json

MINARI_VERSION = "0.5.4"  # whose layout this is; newer versions of Minari read it
SHARE_BYTES = 1 << 25  # of episodes that are written together
_TOKEN = "rlframe_token"  # in the metadata: of the writer that may go on with a dataset
_SESSION = "rlframe_session"  # when the run was started that wrote last
COMPRESSIONS = ("none", "lz4", "zstd")


def check_can_write() -> None:
    """Raise ConfigError if pyarrow is missing."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError('writing a dataset needs pyarrow: pip install "rlframe[data]"')


def check_name(name: str, key: str = "") -> Path:
    """Where a dataset of this name is; raises ConfigError if `name`, the value of `key`, is no name of a dataset."""
    with prefixed(key):
        return locate(name)


def check_free(name: str, key: str = "", own: Sequence[str] = ()) -> None:
    """Raise ConfigError if `name` is no name of a dataset, there is one of this name, or none can be made there.

    Args:
        key: whose value it is.    own: tokens of writers that may overwrite it.
    """
    path = check_name(name, key)
    with prefixed(f"{key}={name:.200}" if key else ""):
        if os.path.lexists(path) and _mark_of(path, _TOKEN) not in own:
            raise ConfigError(f"a dataset is there already: {path}; use another name, or remove it")
        try:
            check_folder(next(each for each in path.absolute().parents if each.exists()))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; name another place") from None


def session_of(name: str) -> str:
    """When the run was started that wrote last to a dataset; empty if that is not known."""
    return _mark_of(locate(name), _SESSION)


def _mark_of(path: Path, mark: str) -> str:
    """What a writer has noted in the metadata of the dataset in a directory; empty if nothing is known."""
    with suppress(ConfigError):
        return str(read_json(path / DATA / METADATA).get(mark, ""))
    return ""


@dataclass(frozen=True)
class NewDataset:
    """What a dataset will say of itself."""

    name: str  # id or path, see `locate`
    observation_space: Space
    action_space: Space
    env_spec: str = ""  # JSON of Gymnasium's EnvSpec; empty: unknown
    facts: Mapping[str, Any] = field(default_factory=dict)  # further entries of its metadata: algorithm_name and others
    format: str = "arrow"  # or parquet; of `tools.write`, also hdf5
    compression: str = "none"  # of COMPRESSIONS

    def as_stored(self, episode: Episode) -> Episode:
        """With observations as the environment gives them."""
        return replace(episode, observation=shifted(self.observation_space, episode.observation, 1))


def size_in_mb(folder: Path) -> float:
    """Of all files below it, which Minari shows."""
    size = sum(os.path.getsize(Path(each) / name) for each, _, names in os.walk(folder) for name in names)
    return round(size / 1e6, 1)


def id_of(name: str) -> str:
    """What the dataset of a name, see `locate`, calls itself."""
    return locate(name).name if name.startswith(("/", ".", "~")) else name


def metadata_of(new: NewDataset, n_episodes: int, n_steps: int, size: float = 0.0) -> dict[str, Any]:
    """The content of a metadata.json; `size` in MB, 0 while it grows."""
    return {
        "dataset_id": id_of(new.name),
        "total_episodes": n_episodes,
        "total_steps": n_steps,
        "data_format": new.format,
        "jpeg_encoding": False,
        "observation_space": space_json(new.observation_space),
        "action_space": space_json(new.action_space),
        "minari_version": MINARI_VERSION,
        **({"env_spec": new.env_spec} if new.env_spec else {}),
        **new.facts,
        "dataset_size": size,
    }


class DatasetWriter:
    """Writes episodes in batches, each a step that is complete or did not happen, also under kill -9."""

    def __init__(
        self, new: NewDataset, resumed: int = -1, token: str = "", earlier: Sequence[str] = (), session: str = ""
    ) -> None:
        """Make a dataset, or go on with the one there, of which the first `resumed` episodes are kept.

        Args:
            token: of the writer that made it, or of this one.    earlier: tokens of writers whose dataset, if it is
                there, is overwritten unless this one goes on with its own.    session: of the run, see session_of.
        Raises:
            ConfigError: a dataset is there already, or is not that of the token, pyarrow is missing, or the format is
                neither arrow nor parquet.
            OSError: it cannot be written.
        """
        check_one_of("format", new.format, ("arrow", "parquet"))
        check_can_write()
        from rlframe.data import arrow  # an optional package

        self._write_arrow = arrow.write_arrow
        self.path, self._new = locate(new.name), new
        self._data = self.path / DATA
        self.n_episodes = self.n_steps = 0
        self._share: list[Episode] = []  # that `put` has not written yet
        self._share_bytes = 0
        self._marks = {_TOKEN: token or secrets.token_hex(8), **({_SESSION: session} if session else {})}
        self.token = self._marks[_TOKEN]
        if resumed >= 0:
            self._continue(resumed)
            return
        check_free(new.name, own=earlier)
        if self.path.exists():
            self._keep(0)
        else:
            self._make()

    def _make(self) -> None:
        """It appears with its metadata, by which it is known as this writer's."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{self.path.name}.", dir=self.path.parent) as folder:
            (hidden := Path(folder) / self.path.name / DATA).mkdir(parents=True)
            self._save(hidden)
            os.rename(hidden.parent, self.path)

    def _continue(self, n: int) -> None:
        found = read_json(self._data / METADATA)
        if found.get(_TOKEN) != self.token:
            raise ConfigError(f"the dataset {self.path} was not recorded by this run; bring its own back")
        if not isinstance(there := found.get("total_episodes"), int) or there < n:
            raise ConfigError(f"the dataset {self.path} has {str(there)[:20]} episodes, fewer than the {n} of this run")
        self._keep(n)

    def _keep(self, n: int) -> None:
        """Take away all episodes but the first n."""
        self.n_episodes = n
        for i in range(n):
            self.n_steps += int(read_json(self._data / str(i) / METADATA)["total_steps"])
        self._save(self._data)
        for folder in self._data.iterdir():
            if folder.name.isdigit() and int(folder.name) >= n:
                shutil.rmtree(folder, ignore_errors=True)

    def add(self, episodes: Sequence[Episode]) -> None:
        """Append episodes; raises OSError if they cannot be written, and the dataset is as before."""
        if not episodes:
            return
        new = self._new
        self._write_arrow(self._data, self.n_episodes, [*map(new.as_stored, episodes)], new.format, new.compression)
        self.n_episodes += len(episodes)
        self.n_steps += sum(map(len, episodes))
        self._save(self._data)

    def put(self, episode: Episode) -> None:
        """Append an episode together with others, once they have SHARE_BYTES or at `close`; raises OSError as `add`."""
        self._share.append(episode)
        self._share_bytes += episode.n_bytes
        if self._share_bytes > SHARE_BYTES:
            self._add_share()

    def _add_share(self) -> None:
        share, self._share, self._share_bytes = self._share, [], 0
        self.add(share)

    def _save(self, folder: Path, size: float = 0.0) -> None:
        content = {**metadata_of(self._new, self.n_episodes, self.n_steps, size), **self._marks}
        replace_file(folder / METADATA, json.dumps(content))

    def close(self) -> None:
        """Write what is left of `put`, and note its size."""
        self._add_share()
        self._save(self._data, size_in_mb(self._data))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
