"""Replay of recorded datasets, alone or mixed with the run's own experience; `algo.replay=dataset`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import chz
import numpy as np
from torch import Tensor

from rlframe.core.config import choice, fraction, number, option
from rlframe.core.errors import ConfigError, prefixed
from rlframe.core.ranks import current_ranks
from rlframe.core.seeding import Role, generator, seed_int
from rlframe.core.struct import as_numpy, leaves, map_tree
from rlframe.core.types import BatchSpec, Samples
from rlframe.core.yaml import parse_yaml
from rlframe.data.episodes import Episode, as_batches
from rlframe.data.reading import Dataset, check_spaces, locate, open_dataset
from rlframe.data.transform import Transform, load_transform, transformed
from rlframe.replay.base import Replay
from rlframe.replay.buffer import Batch, ReplayBuffer
from rlframe.replay.frames import BrokenStack
from rlframe.replay.make import InMemory, OnDevice, OnDisk, ReplayConfig, ReplaySpec, Stored, TooLarge, check_no_td

_CHUNK = 1024  # rows that are appended at a time, where the reader lets them be any number
_ROOM = 64  # time steps besides those of the data, for frames before the first row


def shares_of(path: str) -> dict[str, float]:
    """The datasets of `algo.replay.path` and their shares, which add up to 1.

    Raises:
        ConfigError: it is neither a dataset nor {dataset: share, ...} with shares above 0.
    """
    if not path.startswith("{"):
        return {path: 1.0}
    try:
        found = parse_yaml(path)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    numbers = isinstance(found, dict) and all(
        isinstance(share, int | float) and not isinstance(share, bool) and 0 < share < 1e9 for share in found.values()
    )
    if not found or not numbers:
        raise ConfigError("it needs the form {name-v0: 0.7, other-v0: 0.3}, with shares above 0")
    total = sum(found.values())
    return {str(name): share / total for name, share in found.items()}


@dataclass
class Digest:
    """What identifies the rows of a dataset: their number, and a checksum."""

    n_steps: int = 0
    crc: int = 0

    def follow(self, episodes: Iterator[Episode]) -> Iterator[Episode]:
        """The same episodes, counted."""
        for episode in episodes:
            self.n_steps += len(episode)
            ends = episode.reward, episode.terminated, episode.truncated
            for x in leaves((episode.observation, episode.action, ends)):
                self.crc = zlib.crc32(np.ascontiguousarray(x).tobytes(), self.crc)
            yield episode


class MixedReplay(Generic[Batch]):
    """A replay (see `Replay`) of several, each of which has a fixed share of every batch, to within a row.

    The rows of datasets are not part of its state: a resumed run reads them again, and checks that they are the same.
    A replay of live experience that has no rows yet leaves its share to the data.
    """

    def __init__(
        self,
        data: Sequence[ReplayBuffer[Batch]],
        digests: Sequence[Digest],
        shares: Sequence[float],
        live: Sequence[ReplayBuffer[Batch]],
        live_share: float,
        rng: np.random.Generator,
        reward_scale: float = 1.0,
    ) -> None:
        """Args:
        live: none, or one, which has `live_share` of a batch; the datasets divide the rest by `shares`.
        reward_scale: which the rewards of the data were multiplied by.
        """
        self._reward_scale = reward_scale
        self._data, self._digests, self._live, self._rng = data, digests, live, rng
        self._parts = [*data, *live]
        of_data = np.array(shares) * (1 - live_share)
        self._shares = {False: np.array(shares), True: np.append(of_data, live_share)}

    def __str__(self) -> str:
        data = ", ".join(f"{digest.n_steps:,} recorded steps" for digest in self._digests)
        if self._reward_scale != 1:
            data += f", rewards times {self._reward_scale:.6g}"
        return "; ".join([data, *(f"{self._shares[True][-1]:.0%} live, of {each}" for each in self._live)])

    @property
    def n_rows(self) -> int:
        return sum(part.n_rows for part in self._parts)

    def append(self, samples: Samples) -> None:
        for replay in self._live:
            replay.append(samples)

    def sample(self, n: int, beta: float = 0.0) -> Batch:
        if len(self._parts) == 1:
            return self._parts[0].sample(n, beta)
        asked = [(i, int(k)) for i, k in enumerate(self._counts(n)) if k]
        if not beta:
            return self._data[0].join([self._numbered(self._parts[i].sample(k), i) for i, k in asked])
        found = [(i, *self._parts[i].sample_with_probability(k)) for i, k in asked]
        batch: Any = self._data[0].join([self._numbered(batch, i) for i, batch, _ in found])
        # Of each part (N P)^-β, which keeps its share; their common maximum is 1 (see Prioritized).
        weight = np.concatenate([self._parts[i].n_choices * probability for i, _, probability in found]) ** -beta
        return replace(batch, weight=batch.weight.new_tensor(weight / weight.max()))

    def _counts(self, n: int) -> np.ndarray:
        """The rows of each part in a batch of n; on average its share, always to within a row."""
        shares = self._shares[any(replay.n_rows for replay in self._live)]
        bounds = np.floor(np.append(0.0, shares.cumsum()) * n + self._rng.random())
        bounds[-1] = bounds[0] + n
        return np.diff(bounds).astype(np.int64)

    def _numbered(self, batch: Any, i: int) -> Any:
        return replace(batch, index=as_numpy(batch.index) * len(self._parts) + i)

    def update_priorities(self, index: np.ndarray, priority: np.ndarray | Tensor) -> None:
        values, index = as_numpy(priority), as_numpy(index)
        for i, part in enumerate(self._parts):
            mine = index % len(self._parts) == i
            part.update_priorities(index[mine] // len(self._parts), values[mine])

    def state_dict(self) -> dict[str, Any]:
        data = [
            {"selector": part.selector.state_dict(), "n_steps": digest.n_steps, "crc": digest.crc}
            for part, digest in zip(self._data, self._digests, strict=True)
        ]
        return {"data": data, "live": [part.state_dict() for part in self._live], "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the data are not those of the saved state."""
        for part, digest, saved in zip(self._data, self._digests, state["data"], strict=True):
            if (saved["n_steps"], saved["crc"]) != (digest.n_steps, digest.crc):
                raise ValueError(
                    f"the run learned from {saved['n_steps']:,} steps of a dataset that has {digest.n_steps:,} others "
                    f"now; bring back the dataset, or begin a new run"
                )
            part.selector.load_state_dict(saved["selector"])
        for replay, saved in zip(self._live, state["live"], strict=True):
            replay.load_state_dict(saved)
        self._rng.bit_generator.state = state["rng"]


def reward_scale(datasets: Sequence[Dataset], transform: Transform, return_range: float) -> float:
    """The factor of rewards by which the returns of all episodes span return_range; 1 if that is 0.

    (Kostrikov et al. 2022, section 5, divide the rewards of locomotion by this span, times 1000)

    Raises:
        ConfigError: there are not two different returns.
    """
    if not return_range:
        return 1.0
    returns = [episode.return_ for each in datasets for episode in transformed(each.episodes(), transform)]
    if not returns or min(returns) == max(returns):
        raise ConfigError(
            f"algo.replay.return_range={return_range:g} divides by the span of returns, and all {len(returns)} "
            f"episodes have the same; leave it out"
        )
    return return_range / (max(returns) - min(returns))


def _filled(
    dataset: Dataset, spec: ReplaySpec[Batch], kind: type[Stored], transform: Transform, scale: float
) -> tuple[ReplayBuffer[Batch], Digest]:
    """A replay with all rows of a dataset, as one stream of one environment, and what identifies them.

    Raises:
        ConfigError: the dataset is damaged, empty, or has not as many steps as it claims.
        ValueError: it does not fit into memory.    BrokenStack: frames cannot be stored once each.
    """
    if not dataset.n_steps:
        raise ConfigError(f"the dataset {dataset.path} has no episodes")
    fixed = spec.reader.data_T(spec.batch_spec.T)
    T = fixed or _CHUNK
    n_absent = spec.reader.n_absent(T)
    n_rows = dataset.n_steps + dataset.n_episodes + n_absent
    state = map_tree(lambda x: x[:1], spec.state)
    config: ReplayConfig = kind(size=-(-n_rows // T) * T + T + _ROOM)
    try:
        buffer: Any = config.make(replace(spec, size=config.size, batch_spec=BatchSpec(T, 1), state=state))
    except TooLarge as error:
        other = "" if isinstance(config, OnDisk) else "use algo.replay.place=disk, or "
        raise ConfigError(
            f"the dataset {dataset.path} of {dataset.n_steps:,} steps needs {error.needs}; {other}take a part of it: "
            f"python -m rlframe.data filter"
        ) from None
    assert isinstance(buffer, ReplayBuffer)
    found, kept = Digest(), Digest()  # before and after the transform
    episodes = kept.follow(transformed(found.follow(dataset.episodes()), transform))
    for batch in as_batches(episodes, dataset.action_space, T, state, fixed > 0, spec.sampled, n_absent):
        if max(found.n_steps, kept.n_steps) > dataset.n_steps:
            break
        buffer.append(replace(batch, reward=batch.reward * np.float32(scale)).torch())
    if found.n_steps > dataset.n_steps:
        raise ConfigError(f"the dataset {dataset.path} claims {dataset.n_steps:,} steps and has more")
    if kept.n_steps > dataset.n_steps:
        raise ConfigError(f"algo.replay.transform adds steps to the {dataset.n_steps:,} of {dataset.path}; it may not")
    if not kept.n_steps:
        raise ConfigError(f"algo.replay.transform leaves no episode of the {dataset.n_episodes:,} of {dataset.path}")
    if not buffer.n_rows:
        raise ConfigError(f"the dataset {dataset.path} has no rows that {spec.reader} can sample")
    return buffer, kept


_PLACES = {"device": OnDevice, "disk": OnDisk, "memory": InMemory}


@chz.chz
class OfDatasets(ReplayConfig):
    """Rows of recorded datasets, and with `live`, of the run's own experience."""

    has_data = True

    path: str = option("", "id or path of a dataset, or {expert-v0: 0.7, medium-v0: 0.3}: their shares of a batch")
    live: float = fraction(0.0, "share of a batch that is the run's own experience, of which `size` rows are stored")
    transform: str = option("", "module:function of an Episode that changes it as it is read, or leaves it out (None)")
    return_range: float = number(0.0, "rewards are scaled so that returns of episodes span this, 1000 in IQL; 0: as is")
    place: str = choice("memory", tuple(_PLACES), "where rows are: disk for more than memory holds")

    @chz.validate
    def _check(self) -> None:
        load_transform(self.transform, "algo.replay.transform")
        with prefixed(f"algo.replay.path={self.path:.200}"):
            for name in shares_of(self.path) if self.path else ():
                locate(name)
        if self.live and self.return_range:
            raise ConfigError(
                f"algo.replay.return_range={self.return_range:g} scales recorded rewards alone, and "
                f"algo.replay.live={self.live:g} mixes them with live ones; use "
                f"env.reward_scale and algo.replay.transform"
            )

    def is_live(self) -> bool:
        return self.live > 0

    def names(self) -> list[str]:
        """Ids or paths of the datasets. Raises ConfigError if there are none."""
        if not self.path:
            raise ConfigError("algo.replay=dataset needs algo.replay.path=NAME, the id or path of a dataset")
        return list(shares_of(self.path))

    def read_through(self) -> str:
        return self.transform

    def make(self, spec: ReplaySpec[Batch]) -> Replay[Batch]:
        names, kind = self.names(), _PLACES[self.place]
        check_no_td(spec, "dataset")
        if (n := current_ranks().world_size) > 1:
            raise ConfigError(f"algo.replay=dataset is for one process that learns, not {n}; use learners=1")
        datasets, data, digests = [open_dataset(name, "algo.replay.path") for name in names], [], []
        for dataset in datasets:
            check_spaces(dataset, spec.observation_space, spec.action_space, "the environment of this run")
        in_spaces = datasets[0].observation_space, datasets[0].action_space
        transform = load_transform(self.transform, "algo.replay.transform", in_spaces)
        scale = reward_scale(datasets, transform, self.return_range)
        for i, dataset in enumerate(datasets):
            own = replace(spec, seed=seed_int(spec.seed, Role.REPLAY, i + 1))
            try:
                buffer, digest = _filled(dataset, own, kind, transform, scale)
            except BrokenStack:  # an episode begins with a stack of earlier frames, as after a lost life
                whole = replace(own, observation_space=dataset.observation_space)  # Boxes, which are not FrameStacks
                buffer, digest = _filled(dataset, whole, kind, transform, scale)
            data.append(buffer)
            digests.append(digest)
        live: list[Any] = [kind(size=self.size).make(spec)] if self.is_live() else []
        shares = list(shares_of(self.path).values())
        return MixedReplay(data, digests, shares, live, self.live, generator(spec.seed, Role.REPLAY, 0), scale)
