"""AsyncRl: samplers in processes of their own collect ahead while this process learns; `runner=async_rl`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import chz

from rlframe.agents import Agent
from rlframe.core.config import choice, count, option, positive
from rlframe.core.errors import ConfigError
from rlframe.envs import EnvConfig
from rlframe.kernels.device import choose_device
from rlframe.runners.base import Runner
from rlframe.runners.config import RunnerConfig
from rlframe.samplers.background import BackgroundProcess, BackgroundSampler
from rlframe.samplers.base import Source, SourceAhead
from rlframe.samplers.collectors import CollectorProcesses, Collectors
from rlframe.system.affinity import Affinity
from rlframe.system.process import START_METHODS
from rlframe.system.service import Supervision

_REMEMBERED = 10_000  # versions of parameters, of which the oldest that a batch may have is known


class AsyncRl(Runner):
    """Makes one update at a time; receives batches when no update is due, and between updates as they arrive.

    An algorithm that learns from the batch itself learns from each batch once, in order. One with replay makes as many
    updates as its replay ratio asks for, if there is time. With `sampler_waits` no batch is received while an update is
    due: the sampler's queue of batches fills, and sampling waits. Batches in the queue at the end are not learned from.
    While an evaluation runs, the sampler fills its queue and then waits.
    """

    sampler: SourceAhead

    def prepare(self) -> None:
        """Raises:
        ConfigError: the sampler does not collect ahead, or the options are not those of AsyncRl.
        """
        if not isinstance(self.sampler, SourceAhead):
            raise ConfigError(
                f"AsyncRl needs a sampler that collects ahead, such as BackgroundSampler, which has its own process, "
                f"or a SourceAhead of your own; got {type(self.sampler).__name__}"
            )
        if not isinstance(self.options, AsyncRlConfig):
            raise ConfigError(f"AsyncRl needs the options AsyncRlConfig(...), got {type(self.options).__name__}")
        self.sampler_waits, self.push_interval = self.options.sampler_waits, self.options.push_interval
        self.staleness = 0  # the largest of this interval
        self._posted: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # version of parameters, updates made by then
        self._pushed = 0  # updates that were made when parameters were last posted
        self._received = True  # a batch was received since parameters were last posted

    def iterate(self) -> None:
        self.sampler.check()
        if not self.learners.updates_due():
            self._receive()
        self._learn_and_post()
        for _ in range(self._n_ready()):  # a fast sampler has another by then, which waits for the next update
            if self._receives_while_due():
                self._receive()
        if not self.learners.can_receive():  # a snapshot would not have the batch
            self._learn_and_post()
        while self._at_end and self.learners.updates_due() and not self.stop_requested():
            self._learn_and_post()  # from the last batches too
        self.updates_left = self._at_end and self.learners.updates_due()

    def _receives_while_due(self) -> bool:
        """Whether batches are received although updates are due; none that has yet to be learned from is lost."""
        if self.sampler_waits or self._at_end:
            return False
        return self.learners.updates_due() and self.learners.can_receive()

    @property
    def _at_end(self) -> bool:
        return self.now >= self.n_steps

    def _n_ready(self) -> int:
        """Batches that every rank has; those without environments have any number."""
        return -self.ranks.max(-self.sampler.n_ready)

    def _receive(self) -> None:
        """Receive a batch, unless the run is asked to stop before there is one."""
        n_ready = self.sampler.n_ready
        with self.log.timers("sampling"):
            while not self.ranks.all(self.sampler.wait()):
                if self.stop_requested():
                    return
            batches = self.collect()
        if any(samples.valid.numel() for _, samples in batches):  # none where there are no environments
            staleness = self.updates - self._updates_of(self.sampler.version)
            self.staleness = max(self.staleness, staleness)
            self.log.metrics.add({"async/staleness_mean": staleness, "async/queue_mean": n_ready})
        self._received = True
        self.receive(batches)

    def _updates_of(self, version: int) -> int:
        """The updates made before this version was posted."""
        if not self._posted:
            self._posted.append((0, self.updates))
        known = (updates for posted, updates in reversed(self._posted) if posted <= version)
        return next(known, self._posted[0][1])

    def _learn_and_post(self) -> None:
        """Make an update of each learner that has one due, and post parameters if a batch came or none is due now.

        Posting after every update gains little: a sampler reads parameters at the start of a batch. Those of unchanged
        networks are posted too, for the levels of exploration.
        """
        for learner in self.learners.values():
            if learner.algo.updates_due():
                with self.log.timers("learning"):
                    self.update(learner)
        made = self.updates - self._pushed
        if (self._received or not self.learners.updates_due()) and (made >= self.push_interval or not made):
            self._received, self._pushed = False, self.updates
            self.refresh()
            self._posted.append((self.sampler.posted_version, self.updates))

    def counters(self) -> dict[str, float]:
        staleness, self.staleness = self.staleness, 0
        return {"async/staleness_max": staleness}


@chz.chz
class AsyncRlConfig(RunnerConfig):
    """AsyncRl: samplers in processes of their own collect batches ahead while this process learns."""

    runner_class = AsyncRl
    samples_in_background = True
    trains_in_ranks = True

    n_samplers: int = count(1, "processes that sample, each for a part of the environments; none waits for another")
    n_slots: int = count(2, "batches that each may be ahead, including the one being learned from", high=4096)
    push_interval: int = count(1, "updates between pushes of parameters to the sampler, at least")
    sampler_waits: bool = option(
        False, "true: sampling waits for updates, and replay_ratio is exact; false: replay_ratio is an upper bound"
    )
    learner_cores: int = count(0, "cores of the run for learning; 0: one if it learns on a GPU, else half of them")
    sampler_timeout_s: float = positive(
        120.0, "seconds without progress before the sampler's process is killed and replaced"
    )
    max_restarts: int = count(10, "replacements of the sampler's process within an hour before the run ends", low=0)
    start_method: str = choice("forkserver", START_METHODS, "how the process starts")

    def sampler_count(self) -> int:
        return self.n_samplers

    def batches_held(self) -> int:
        return self.n_slots + 1

    def supervision(self) -> Supervision:
        return Supervision(self.sampler_timeout_s, self.max_restarts, self.start_method, "sampler")

    def make_envs(self, sampler: Any, env: EnvConfig, seed: int, affinity: Affinity) -> Any:
        """The processes that sample, unless this sampler collects ahead by itself."""
        if sampler.collects_ahead:
            return super().make_envs(sampler, env, seed, affinity)
        where = affinity.sampler, affinity.workers, max(1, affinity.sampler_threads), self.supervision()
        if self.n_samplers > 1:
            return CollectorProcesses(sampler, env, seed, self.n_samplers, *where)
        return BackgroundProcess(sampler, env, seed, *where)

    def make_sampler(
        self, sampler: Any, algo: Any, envs: Any, agent: Agent, seed: int, devices: Sequence[str] = ("cpu",)
    ) -> Source:
        if sampler.collects_ahead:
            made: Source = sampler.make_ahead(envs, agent, seed, self.n_slots)
            sampler.follow_episodes(made)
            return made
        if sampler.device:
            devices = [str(choose_device(sampler.device, key="sampler.device"))]
        elif not sampler.acts_on_device:
            devices = ["cpu"]
        if self.n_samplers > 1:
            return Collectors(envs, agent, self.n_slots, devices)
        return BackgroundSampler(envs, agent, self.n_slots, devices[0])
