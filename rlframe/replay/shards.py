"""Shards: the actors that keep a replay together, which part of the rows each has, and their options."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import chz
import torch

from rlframe.core.config import count, number, option, positive
from rlframe.core.errors import ConfigError, pluralize
from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import as_numpy, map_tree
from rlframe.core.types import BatchSpec
from rlframe.replay.make import InMemory, ReplayConfig, ReplaySpec, gigabytes
from rlframe.replay.shard import Shard
from rlframe.system.actors import CALL_S, Actors
from rlframe.system.cluster import check_room
from rlframe.system.service import RestartBudget


@chz.chz
class ShardOptions(ReplayConfig):
    """Base class of OnRay: its options."""

    n_shards: int = count(2, "actors, each with the rows of a part of the environments")
    prefetch: int = count(2, "batches drawn ahead, by priorities so many updates older; 0: none", low=0, high=1_000)
    compress: bool = option(False, "lossless lz4 compression of frames: a tenth of the bytes, slower")
    cpus: float = number(0.0, "CPUs of the cluster for each actor; 0: actors go anywhere", low=0)
    timeout_s: float = positive(120.0, "seconds for a batch after which an actor is killed and replaced")
    max_restarts: int = count(100, "actors that may be replaced within an hour before the run fails", low=0)


class Division(NamedTuple):
    """How streams or environments are divided among shards, as evenly as possible."""

    batch_spec: BatchSpec
    n_shards: int

    def check(self) -> None:
        """Raise ConfigError if there are more shards than streams, and than environments of a stream."""
        _, B, n_streams = self.batch_spec
        if self.n_shards > (most := max(B, n_streams)):
            raise ConfigError(
                f"algo.replay.n_shards={self.n_shards} actors cannot divide {pluralize(most, 'environment')}, whose "
                f"rows stay together; use {most} or less, or raise sampler.batch_B"
            )

    @property
    def by_stream(self) -> bool:
        return self.batch_spec.n_streams >= self.n_shards

    def spec_of(self, shard: int) -> BatchSpec:
        """The batches that a shard gets."""
        T, B, n_streams = self.batch_spec
        if self.by_stream:
            return BatchSpec(T, B, len(range(shard, n_streams, self.n_shards)))
        return BatchSpec(T, len(range(*self.columns(shard))), n_streams)

    def columns(self, shard: int) -> tuple[int, int]:
        """The environments lo to hi - 1 of each stream that a shard has."""
        B, n = self.batch_spec.B, self.n_shards
        return (0, B) if self.by_stream else (shard * B // n, (shard + 1) * B // n)

    def shards_of(self, place: int) -> Sequence[int]:
        """The shards that have rows of the stream at this place, in the order in which streams appeared."""
        return [place % self.n_shards] if self.by_stream else range(self.n_shards)


class Shards(Actors):
    """The actors, of which one that is replaced starts without rows."""

    def __init__(self, config: ShardOptions, spec: ReplaySpec[Any], row_bytes: int) -> None:
        """Start them.

        Raises:
            ConfigError: Ray is missing or not connected, the cluster is too small, or rows do not fit into its memory.
        """
        budget = RestartBudget(config.max_restarts, "algo.replay.max_restarts", "actors", "a single batch")
        super().__init__("replay=ray", budget, "its rows are lost, and another starts")
        n, self._spec, self._compress = config.n_shards, spec, config.compress
        self.division, self.generations = Division(spec.batch_spec, n), [0] * n
        self.L = -(-config.size // spec.batch_spec.n_envs)
        self.division.check()
        check_room(n, config.cpus, f"algo.replay.n_shards={n}")
        self._made = self.ray.remote(num_cpus=config.cpus, max_restarts=0, scheduling_strategy="SPREAD")(Shard)
        self._starting: dict[int, tuple[Any, float]] = {}  # replacements: what to wait for, and until when
        self.early, self.actors = [0] * n, [self._made.remote() for _ in range(n)]
        try:
            self._check_memory(config.size, row_bytes)
            self.get([self._begin(i, actor) for i, actor in enumerate(self.actors)])
        except BaseException:
            self.close()
            raise

    def _check_memory(self, size: int, row_bytes: int) -> None:
        needed: dict[str, int] = {}
        for i, (node, available) in enumerate(self.get([actor.place.remote() for actor in self.actors])):
            needed[node] = needed.get(node, 0) + self.L * self.division.spec_of(i).n_envs * row_bytes
            if needed[node] > available:
                raise ConfigError(
                    f"algo.replay.size={size} needs {gigabytes(needed[node])} of main memory for the actors on one "
                    f"node of the cluster, but only {gigabytes(available)} are available; use "
                    f"algo.replay.size={int(size * available / needed[node])} or less, or more nodes"
                )

    def launch(self, i: int) -> Any:
        actor = self._made.remote()
        self._starting[i] = self._begin(i, actor), time.monotonic() + CALL_S
        return actor

    def lose(self, i: int, error: Exception) -> None:
        """Replace one that died."""
        self.generations[i] += 1
        self.replace(i, error)

    def is_ready(self, i: int) -> bool:
        """Whether one that took another's place has started, which takes seconds; replaces it if it died meanwhile."""
        if i not in self._starting:
            return True
        reference, deadline = self._starting[i]
        deaths: tuple[type[Exception], ...] = (*self.deaths, TimeoutError)
        try:
            if not self.ray.wait([reference], timeout=0.0)[0]:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it did not start within {CALL_S:g} s")
                return False
            self.get(reference)
        except deaths as error:
            self.lose(i, error)
            return False
        del self._starting[i]
        return True

    def _begin(self, i: int, actor: Any) -> Any:
        """Let it make its replay; returns a reference to wait for."""
        spec, (lo, hi) = self.division.spec_of(i), self.division.columns(i)
        own = replace(
            self._spec,
            size=self.L * spec.n_envs,
            batch_spec=spec,
            state=map_tree(lambda x: as_numpy(x)[lo:hi].copy(), self._spec.state),
            device=torch.device("cpu"),
            seed=seed_int(self._spec.seed, Role.REPLAY, 1 + i, self.generations[i]),
        )
        return actor.start.remote(InMemory(size=own.size, compress=self._compress), own)
