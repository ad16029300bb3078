"""Recorder: writes the episodes of a training run to a dataset, beside learning; `record=NAME`."""

from __future__ import annotations

import json
import logging
import queue
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
from gymnasium import Space

from rlframe.core.errors import ConfigError, RecordError, describe
from rlframe.core.ranks import first_env_of_rank
from rlframe.core.types import Samples
from rlframe.core.version import __version__
from rlframe.data.cutting import Behaviour, EpisodeCutter, as_acted
from rlframe.data.episodes import Episode
from rlframe.data.transform import Transform, transformed, unchanged
from rlframe.data.writing import DatasetWriter, NewDataset, session_of
from rlframe.envs import EnvConfig
from rlframe.record import current_run
from rlframe.runners.callbacks import Callback, Training

_FLUSH_BYTES, _FLUSH_S = 1 << 25, 2.0  # episodes are handed to the writing thread in shares of so much
_MOST_SHARES = 4  # that wait for the thread; then learning waits for the disk

_logger = logging.getLogger("rlframe")


class Recorder(Callback):
    """Follows the batches of a runner, and writes whole episodes in a thread of its own.

    The dataset loads at any moment. A resumed run takes away the episodes since its snapshot, and records on; one that
    has no snapshot begins its own dataset anew. Rewards are those that are learned from, clipped if the run does so.
    """

    def __init__(
        self,
        name: str,
        observation_space: Space,
        action_space: Space,
        facts: Mapping[str, Any] | None = None,
        compression: str = "none",
        transform: Transform = unchanged,
    ) -> None:
        """Args:
        name: id or path of a new dataset.    facts: further entries of its metadata.    compression: none, lz4 or zstd.
        transform: changes each episode before it is written, or leaves it out.
        """
        self._name, self._facts, self._compression = name, dict(facts or {}), compression
        self._spaces, self._transform = (observation_space, action_space), transform
        self._resumed: dict[str, Any] = {}
        self._cutters: dict[int, EpisodeCutter] = {}  # by stream
        self._pending: list[Episode] = []
        self._bytes, self._flushed_s = 0, 0.0
        self._writer: DatasetWriter | None = None  # while this run records
        self._behaviour: Behaviour = as_acted  # of the next batch
        self._of_run = False  # whether this run has a directory

    def on_start(self, runner: Training) -> None:
        self._follow(runner)
        spec = env_spec_json(runner.sampler.env)
        new = NewDataset(self._name, *self._spaces, spec, self._facts, compression=self._compression)
        tokens, starts = current_run().tokens, current_run().starts
        token = self._resumed.get("token") or (tokens[0] if tokens else "")
        self._of_run = bool(tokens)
        if others := self._goes_on_elsewhere(token, tokens, starts):
            self._writer = None
            _logger.warning(f"the dataset {self._name} goes on with {others}; nothing is recorded here")
            return
        self._writer = DatasetWriter(new, self._resumed.get("n_episodes", -1), token, tokens, "".join(starts[-1:]))
        for stream, state in self._resumed.get("streams", {}).items():
            self._cutter(int(stream)).load_state_dict(state)
        self._resumed = {}
        self._shares: queue.Queue[list[Episode] | None] = queue.Queue(_MOST_SHARES)
        self._failure: Exception | None = None
        threading.Thread(target=self._write, args=(self._writer, self._shares), name="recording", daemon=True).start()

    def _goes_on_elsewhere(self, token: str, tokens: Sequence[str], starts: Sequence[str]) -> str:
        """Which other run the dataset belongs to, or went on with since; empty if none."""
        if self._resumed.get("of_run") and token not in tokens:
            return "the run whose state this is"
        since = session_of(self._name) if self._resumed and starts else ""
        return "a copy of this run, which was resumed since" if since and since not in starts else ""

    def _follow(self, runner: Training) -> None:
        """Know how the agent explores in the next batch; one that is collected ahead may be of another level."""
        sampler = runner.sampler
        self._behaviour = runner.agent.behaviour(first_env_of_rank(sampler.batch_spec.B), sampler.collects_ahead)

    def _cutter(self, stream: int) -> EpisodeCutter:
        if stream not in self._cutters:
            config = self.runner.sampler.config
            decorrelated = config is not None and config.decorrelation_steps > 0
            self._cutters[stream] = EpisodeCutter(*self._spaces, decorrelated=decorrelated)
        return self._cutters[stream]

    def on_batch(self, samples: Samples) -> None:
        if self._writer is None:
            return
        cut = self._cutter(samples.stream).add(samples, self._behaviour)
        self._follow(self.runner)
        found = [*transformed((episode for _, episode in cut), self._transform)]
        self._pending += found
        self._bytes += sum(episode.n_bytes for episode in found)
        now = time.monotonic()
        if self._pending and (self._bytes > _FLUSH_BYTES or now > self._flushed_s + _FLUSH_S):
            self._flush()

    def _flush(self) -> None:
        """Hand all episodes to the thread; waits only if that is far behind."""
        if self._pending:
            self._shares.put(self._pending)
        self._pending, self._bytes, self._flushed_s = [], 0, time.monotonic()
        if self._failure is not None:
            raise RecordError(f"the dataset {self._name} cannot be written: {describe(self._failure)}")

    def _write(self, writer: DatasetWriter, shares: queue.Queue[list[Episode] | None]) -> None:
        """Write shares until there is None."""
        for share in iter(shares.get, None):
            try:
                if self._failure is None:
                    writer.add(share)
            except Exception as error:  # of the disk, or of pyarrow; the thread goes on, so that nobody waits for it
                self._failure = error
            finally:
                shares.task_done()
        shares.task_done()

    def on_end(self) -> None:
        if self._writer is None:
            return
        try:
            self._flush_all()
        finally:
            self._shares.put(None)
        self._writer.close()
        dropped = sum(cutter.n_dropped for cutter in self._cutters.values())
        also = f"; {dropped} interrupted ones are not in it" if dropped else ""
        _logger.info(f"recorded {self._writer.n_episodes:,} episodes in {self._writer.path}{also}")

    def _flush_all(self) -> None:
        """Flush, wait for the thread, and see whether it failed."""
        self._flush()
        self._shares.join()
        self._flush()

    def state_dict(self) -> dict[str, Any]:
        if self._writer is None:  # it does not record, or not yet
            return self._resumed
        self._flush_all()
        streams = {str(k): each.state_dict() for k, each in self._cutters.items()}
        written = {"n_episodes": self._writer.n_episodes, "token": self._writer.token, "of_run": self._of_run}
        return {**written, "streams": streams}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._resumed = dict(state)


def env_spec_json(env: EnvConfig | None) -> str:
    """Gymnasium's JSON of an environment that it knows by its id; empty for others."""
    if env is None or not isinstance(env.id, str) or env.id not in gymnasium.registry:
        return ""
    spec = gymnasium.spec(env.id)
    try:
        return replace(spec, kwargs={**spec.kwargs, **env.kwargs}).to_json()
    except (TypeError, ValueError):  # arguments that are not JSON
        return ""


def facts_of(config: Mapping[str, Any], algo: str, seed: int) -> dict[str, Any]:
    """What a dataset says of the run that recorded it."""
    plain = json.loads(json.dumps(dict(config), default=str))
    by = f"rlframe {__version__}, algo={algo}, seed={seed}"
    return {"algorithm_name": algo, "description": f"recorded by {by}", "rlframe": plain}


def named_for(name: str, seed: int, run_ID: int, rank: int) -> str:
    """The name of a run's dataset: {seed} and {run_ID} replaced, and of another rank than 0, -rank1 before any -v0."""
    if set(found := name.replace("{seed}", str(seed)).replace("{run_ID}", str(run_ID))) & set("{}"):
        raise ConfigError(f"record={name:.100} may have {{seed}} and {{run_ID}} in braces, and nothing else")
    return re.sub(r"(-v\d+)?/*$", rf"-rank{rank}\1", found, count=1) if rank else found
