"""ShardedReplay: rows in actors of Ray, on this machine or on others; `replay=ray`.

Each actor, a shard, has an ordinary ReplayBuffer of some of the environments, or of some of the streams, so that its
rows follow one another. Batches are drawn from all of them, some updates ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic

import chz
import numpy as np
import torch
from torch import Tensor

from rlframe.core.errors import StateLost
from rlframe.core.seeding import Role, generator
from rlframe.core.struct import as_numpy, leaves, map_tree
from rlframe.core.types import Samples
from rlframe.kernels.transfer import to_device
from rlframe.record.codec import ChunkedArray
from rlframe.replay.base import Replay
from rlframe.replay.buffer import Batch, ReplayBuffer
from rlframe.replay.make import InMemory, ReplayConfig, ReplaySpec, check_not_divided, gigabytes, small_size
from rlframe.replay.n_step import NStep
from rlframe.replay.select import check_priority
from rlframe.replay.shard import PendingBatch, RemoteArray, Reply, map_objects, stored
from rlframe.replay.shards import ShardOptions, Shards
from rlframe.system.actors import CALL_S

_GENERATION = 2**40  # more than the rows of a shard's life
_APPENDS = 8  # batches on their way to a shard, above which the learner waits for it


@chz.chz
class OnRay(ShardOptions):
    """Rows in main memory of actors of Ray, on this machine or on others (extra: rlframe[ray]; keys ray.*)."""

    on_ray = True

    def make(self, spec: ReplaySpec[Batch]) -> Replay[Batch]:
        check_not_divided("ray")
        small = InMemory(size=min(self.size, small_size(spec.batch_spec)), compress=self.compress).make(
            replace(spec, unique=0)  # of which nothing is drawn
        )
        assert isinstance(small, ReplayBuffer)  # every rank has its own
        return ShardedReplay(self, spec, small.row_bytes)

    def for_trial(self, size: int) -> ReplayConfig:
        return InMemory(size=min(self.size, size), compress=self.compress)


class ShardedReplay(Generic[Batch]):
    """A replay (see `StoredReplay`) whose rows are in actors. The `index` of a row names its shard and its life.

    A shard is drawn in proportion to its number of rows, or the sum of its priorities^α, as the last batch knew them;
    weights are those of the probabilities with which rows were drawn in fact. The order of calls decides every draw,
    whatever the actors' speed. The rows of a shard that dies are lost, and the others go on.
    """

    def __init__(self, config: OnRay, spec: ReplaySpec[Batch], row_bytes: int) -> None:
        """`row_bytes`: bytes of a row, for messages. Raises ConfigError as `Shards`."""
        self.config, self._spec = config, spec
        self.shards = Shards(config, spec, row_bytes)
        n, spec_of_batch = config.n_shards, spec.batch_spec
        self._rng = generator(spec.seed, Role.REPLAY)
        self._streams: dict[int, int] = {}  # the place of each
        self._rows = np.zeros((n, spec_of_batch.n_streams), np.int64)  # valid ones, about
        self._mass = np.zeros(n)  # of each shard, as its last reply knew it
        self._highest = 1.0  # priority
        self._appends: list[deque[Any]] = [deque() for _ in range(n)]  # references
        self._queue: deque[PendingBatch] = deque()
        self._last: list[Batch] = []  # the last batch, once there was one
        self._appended: Sequence[int] = ()  # shards that got the last batch
        n_rows = self.shards.L * spec_of_batch.n_envs
        place = f"{n_rows:,} rows of {row_bytes:,} bytes: {gigabytes(n_rows * row_bytes)}"
        self._size = f"{place}, in main memory of {n} actors of Ray"

    def __str__(self) -> str:
        return self._size

    @property
    def n_rows(self) -> int:
        """Number of valid rows stored, about, counted here; 0 while none can be sampled."""
        return int(self._rows.sum()) if self._mass.any() else 0

    def append(self, samples: Samples) -> None:
        """Send each shard its rows. Raises ValueError of more streams than the replay was made for."""
        place = self._place_of(samples.stream)
        alone = not self._mass.any()  # nobody has rows to go on with until the next have started
        self._appended = [i for i in self.shards.division.shards_of(place) if self.shards.is_ready(i) or alone]
        for i, part in zip(self._appended, self._divided(samples), strict=True):
            columns = part.valid.shape[1]
            self._rows[i, place] = min(self._rows[i, place] + part.n_rows, (self.shards.L - 1) * columns)
            self._appends[i].append(self.shards.actors[i].append.remote(part, self._highest))
            while self._appends[i] and (not self._mass[i] or len(self._appends[i]) > _APPENDS):
                self._wait_for_append(i)

    def _place_of(self, stream: int) -> int:
        place, n = self._streams.setdefault(stream, len(self._streams)), self._spec.batch_spec.n_streams
        if place >= n:
            del self._streams[stream]
            raise ValueError(f"a batch of stream {stream}, but this replay was made for {n} streams")
        return place

    def _divided(self, samples: Samples) -> Iterator[Samples]:
        """The parts of the shards that get some, without what no reader looks at."""
        reader = self._spec.reader
        info: Any = samples.info if isinstance(reader, NStep) and reader.td_priorities else ()
        state = samples.state if leaves(self._spec.state) else ()
        whole = replace(samples, info=info, state=(), final_state=()).map(as_numpy)
        state = map_tree(as_numpy, state)
        for i in self._appended:
            lo, hi = self.shards.division.columns(i)
            part = whole.map(lambda x, lo=lo, hi=hi: x[:, lo:hi])
            own = map_tree(lambda x, lo=lo, hi=hi: x[lo:hi], state)
            yield replace(part, state=own, n_env_steps=int(np.count_nonzero(part.valid)), n_valid=-1)

    def _wait_for_append(self, i: int) -> None:
        """Wait for the oldest batch on its way; only its first rows tell a shard's mass, later ones draws tell."""
        reference, none = self._appends[i].popleft(), not self._mass[i]
        found = self._result(i, self.shards.generations[i], reference)
        if none and found:
            self._mass[i] = found[0]

    def _result(self, i: int, generation: int, reference: Any, timeout_s: float = 0.0) -> list[Any]:
        """The value of a call of a shard; none if it died, and then it is replaced, once."""
        try:
            found = [self.shards.get(reference, timeout_s or self.config.timeout_s)]
        except self.shards.deaths as error:
            if generation == self.shards.generations[i]:
                self._mass[i] = self._rows[i] = 0
                self._appends[i].clear()
                self.shards.lose(i, error)
            return []
        if generation == self.shards.generations[i]:
            self.shards.early[i] = 0
        return found

    def sample(self, n: int, beta: float = 0.0) -> Batch:
        """The batch that was asked for `prefetch` calls ago.

        If no shard has rows any more, the last batch again: all of them died at the same time.
        """
        if self._queue and sum(self._queue[0].counts) != n:
            self._queue.clear()
        if not self._queue:
            self._ask_masses()
        while len(self._queue) < max(1, self.config.prefetch):
            self._queue.append(self._ask(n))
        found = self._complete(self._queue.popleft())
        if sum(len(probability) for _, probability in found) == n:
            self._last = [self._joined(found, beta)]
        elif not self._last:
            raise ValueError(f"replay cannot be sampled: all {self.config.n_shards} of its actors died; start again")
        while len(self._queue) < self.config.prefetch and self._mass.any():
            self._queue.append(self._ask(n))
        return self._last[0]

    def _ask_masses(self) -> None:
        masses = {i: actor.mass.remote() for i, actor in enumerate(self.shards.actors) if self.shards.is_ready(i)}
        for i, reference in masses.items():
            for mass in self._result(i, self.shards.generations[i], reference):
                self._mass[i] = mass

    def _ask(self, n: int) -> PendingBatch:
        """Ask all shards for a batch, in proportion to their masses; one with none tells its mass."""
        total = self._mass.sum()
        share = self._mass / total if total else self._mass
        counts = self._rng.multinomial(n, share).tolist() if total else [n] + [0] * (len(share) - 1)
        ready = [self.shards.is_ready(i) or k > 0 for i, k in enumerate(counts)]
        asked = zip(self.shards.actors, counts, ready, strict=True)
        replies = [[actor.draw.remote(k)] if wanted else [] for actor, k, wanted in asked]
        return PendingBatch(counts, share, list(self.shards.generations), replies)

    def _complete(self, asked: PendingBatch) -> list[tuple[Batch, np.ndarray]]:
        """The parts of a batch and their probabilities; rows of shards that died are drawn from the others."""
        found: list[tuple[Batch, np.ndarray]] = []
        missing = 0
        for i, (n, generation) in enumerate(zip(asked.counts, asked.generations, strict=True)):
            replies: list[Reply] = [
                reply for reference in asked.replies[i] for reply in self._result(i, generation, reference)
            ]
            rows = [batch for reply in replies for batch in reply.rows]
            missing += n * (not rows)
            found += [
                (self._named(i, generation, batch), reply.probability * asked.share[i])
                for reply in replies
                for batch in reply.rows
            ]
            for reply in replies:
                if generation == self.shards.generations[i]:
                    self._mass[i] = reply.mass
        return found + self._complete(self._ask(missing)) if missing and self._mass.any() else found

    def _named(self, i: int, generation: int, batch: Any) -> Any:
        """The batch of a shard, whose index names the shard and its life."""
        return replace(batch, index=(batch.index + generation * _GENERATION) * self.config.n_shards + i)

    def _joined(self, found: list[tuple[Batch, np.ndarray]], beta: float) -> Batch:
        """One batch on the learner's device."""
        batch: Any = self._spec.reader.join([part for part, _ in found])  # a copy, which may be pinned
        if self._spec.alpha and beta:
            probability = np.concatenate([each for _, each in found])
            batch = replace(batch, weight=((probability / probability.min()) ** -beta).astype(np.float32))
        return self._sent(batch)

    def _sent(self, batch: Any) -> Any:
        device = self._spec.device
        tensors = replace(batch, index=()).map(lambda x: to_device(torch.from_numpy(x), device))
        return replace(tensors, index=batch.index)

    def update_priorities(self, index: np.ndarray, priority: np.ndarray | Tensor) -> None:
        """Send them to the shards; those of rows that died are ignored. Raises ValueError as ReplayBuffer."""
        values = as_numpy(priority)
        if values.shape != index.shape:
            raise ValueError(f"priorities {list(values.shape)} must have the shape {list(index.shape)} of the index")
        check_priority(values)
        if not self._spec.alpha or not len(values):
            return
        for i, generation, mine, local in self._by_shard(index):
            if generation == self.shards.generations[i]:
                self._highest = max(self._highest, float(values[mine].max()))
                self.shards.actors[i].update_priorities.remote(local, values[mine])

    def _by_shard(self, index: np.ndarray) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """For each life of each shard of an index [n]: both, the places in it, and the shard's own index there."""
        rest, shard = np.divmod(index, self.config.n_shards)
        generation, local = np.divmod(rest, _GENERATION)
        for i, life in sorted({*zip(shard.tolist(), generation.tolist(), strict=True)}):
            mine = np.flatnonzero((shard == i) & (generation == life))
            yield i, life, mine, local[mine]

    def newest(self) -> np.ndarray:
        """The index [n] of the rows that the last `append` made available, grouped by shard."""
        generations = list(self.shards.generations)
        references = {i: self.shards.actors[i].newest.remote() for i in self._appended}
        found = [
            (each + generations[i] * _GENERATION) * self.config.n_shards + i
            for i, reference in references.items()
            for each in self._result(i, generations[i], reference)
        ]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def read(self, index: np.ndarray) -> Batch:
        """The rows of an index [n] of `newest`, with weights of 1; anything for those of a shard that died since."""
        parts: list[Any] = []
        for i, generation, _, local in self._by_shard(index):
            reference = self.shards.actors[i].read.remote(local) if generation == self.shards.generations[i] else None
            found = self._result(i, generation, reference) if reference else []
            while not found:
                found = self._result(i, self.shards.generations[i], self.shards.actors[i].layout.remote(len(local)))
            parts.append(found[0])
        joined: Any = self._spec.reader.join(parts)
        return self._sent(replace(joined, index=index))

    def state_dict(self) -> dict[str, Any]:
        """Rows, priorities, generators, and the batches on their way.

        Large arrays are read from the actors when they are written; raises StateLost then if an actor has died.
        """
        queue = [self._saved(asked) for asked in self._queue]
        shards = [self._state_of(i) for i in range(self.config.n_shards)]
        return {
            "made_for": self._made_for(),
            "rng": self._rng.bit_generator.state,
            "generations": list(self.shards.generations),
            "streams": list(self._streams),
            "rows": self._rows.copy(),
            "mass": self._mass.copy(),
            "highest": self._highest,
            "queue": queue,
            "shards": shards,
        }

    def _made_for(self) -> str:
        return f"{self.config.n_shards} shards of {self._spec.batch_spec}"

    def _saved(self, asked: PendingBatch) -> dict[str, Any]:
        replies = [
            [
                [leaves(reply.rows), reply.probability, reply.mass]
                for reference in references
                for reply in self._result(i, generation, reference)
            ]
            for i, (generation, references) in enumerate(zip(asked.generations, asked.replies, strict=True))
        ]
        return {"counts": asked.counts, "share": asked.share, "generations": asked.generations, "replies": replies}

    def _state_of(self, i: int) -> Any:
        found: list[Any] = []
        while not found:
            generation, actor = self.shards.generations[i], self.shards.actors[i]
            found = self._result(i, generation, actor.state_dict.remote(), CALL_S)  # hashes all rows the first time
        return map_objects(found[0], RemoteArray, lambda array: array.chunked(partial(self._chunk, i, actor, array)))

    def _chunk(self, i: int, actor: Any, array: RemoteArray, k: int) -> np.ndarray:
        """A chunk of the newest state of an actor. Several threads may ask."""
        try:
            found: np.ndarray = self.shards.get(actor.chunk.remote(array.number, k), self.config.timeout_s)
        except self.shards.deaths as error:
            raise StateLost(f"actor {i} of replay=ray died while its rows were saved: {type(error).__name__}") from None
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; raises ValueError if that replay has another layout, size or number of shards."""
        if state["made_for"] != self._made_for():
            raise ValueError(f"the saved replay is {state['made_for']}, not {self._made_for()}; use its config")
        for actor, saved in zip(self.shards.actors, state["shards"], strict=True):
            if error := self.shards.get(actor.load_state_dict.remote(map_objects(saved, ChunkedArray, stored))):
                raise ValueError(error)
        self._rng.bit_generator.state = state["rng"]
        self.shards.generations[:] = state["generations"]
        self._streams = {stream: place for place, stream in enumerate(state["streams"])}
        self._rows[...], self._mass[...], self._highest = state["rows"], state["mass"], state["highest"]
        layout = self.shards.get(self.shards.actors[0].layout.remote(1))
        self._queue = deque(self._loaded(saved, layout) for saved in state["queue"])

    def _loaded(self, saved: Mapping[str, Any], layout: Any) -> PendingBatch:
        replies = []
        for found in saved["replies"]:
            references = []
            for arrays, probability, mass in found:
                rest = iter(arrays)
                rows = (map_tree(lambda _, rest=rest: next(rest), layout),) if arrays else ()
                references.append(self.shards.ray.put(Reply(rows, probability, mass)))
            replies.append(references)
        return PendingBatch(saved["counts"], saved["share"], saved["generations"], replies)
