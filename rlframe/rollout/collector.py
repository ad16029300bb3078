"""The time-step loop: act and step in turn, group by group, over one batch; finished episodes are added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core import spaces
from rlframe.core.struct import leaves, map_tree, write
from rlframe.core.types import Samples, Trajectory
from rlframe.envs import Envs
from rlframe.envs.observations import BoundsCheck
from rlframe.rollout.buffer import Batch, Rows, empty_rows
from rlframe.rollout.env_pool import EnvPool
from rlframe.rollout.inference import Actor, block_of, empty_answers, empty_batch
from rlframe.rollout.stepper import Events, LocalStepper, Stepper, remote_steppers
from rlframe.system.shared import share


class EpisodeTracker:
    """Follows every environment's running episode, a batch at a time; the same in every sampler."""

    def __init__(self, n: int) -> None:
        self.return_ = np.zeros(n)
        self.length = np.zeros(n, np.int64)
        self.partial = np.zeros(n, bool)  # others than the agent have acted in the running episode
        self.finished: list[Trajectory] = []

    def follow(self, rows: Rows, events: Iterable[Events]) -> None:
        """Account for a batch; finished episodes in the order of their end, then of their environment."""
        events = list(events)
        if not np.count_nonzero(rows.ended) and not any(each.cuts for each in events):
            self._go_on(rows)
            return
        diagnostics = {(note.t, note.env): note.means for each in events for note in each.diagnostics}
        cuts = {(cut.t, env) for each in events for cut in each.cuts for env in range(cut.lo, cut.hi)}
        ends = [(int(t), int(env)) for t, env in np.argwhere(rows.ended)]
        start = np.zeros(len(self.length), np.int64)  # rows before are accounted for
        for t, env in sorted({*ends, *cuts}):
            self._add(rows, env, int(start[env]), t + 1)
            start[env] = t + 1
            if (t, env) not in cuts and not self.partial[env]:
                return_, length = float(self.return_[env]), int(self.length[env])
                terminated = bool(rows.terminated[t, env])
                self.finished.append(Trajectory(return_, length, terminated, env, diagnostics.get((t, env), {})))
            self.return_[env], self.length[env], self.partial[env] = 0.0, 0, False
        for env, begin in enumerate(start.tolist()):
            self._add(rows, env, begin, rows.T)

    def _go_on(self, rows: Rows) -> None:
        """All episodes."""
        self.return_ += np.add.reduce(rows.score, axis=0, dtype=np.float64)
        self.length += np.add.reduce(rows.valid, axis=0, dtype=np.int64)

    def _add(self, rows: Rows, env: int, start: int, end: int) -> None:
        self.return_[env] += rows.score[start:end, env].sum(dtype=np.float64)
        self.length[env] += np.count_nonzero(rows.valid[start:end, env])

    def state(self) -> dict[str, Any]:
        """The running episodes."""
        return {"return": self.return_.copy(), "length": self.length.copy(), "partial": self.partial.copy()}

    def load(self, saved: Mapping[str, Any], begun: np.ndarray) -> None:
        """Go on with saved ones, but for the environments whose episodes have just `begun`."""
        for own, name in ((self.return_, "return"), (self.length, "length"), (self.partial, "partial")):
            own[...] = np.where(begun, 0, saved[name])

    def pop(self) -> list[Trajectory]:
        """The finished episodes; forgets them."""
        finished, self.finished = self.finished, []
        return finished


class Collector:
    """Fills a batch, whose memory it is given. While one group of environments steps, it acts for the others."""

    def __init__(
        self, batch: Batch, actors: Sequence[Actor], steppers: Sequence[Stepper], observation_space: Space
    ) -> None:
        self.batch, self.samples = batch, batch.samples()
        self.actors, self.steppers = list(actors), list(steppers)
        self.tracker, self.bounds = EpisodeTracker(batch.rows.B), BoundsCheck(observation_space)
        self.whole = True  # the batch is complete, and every environment stands at its last row
        inputs = batch.inputs()
        self._rows = list(zip(leaves(inputs[0]), leaves(inputs[-1]), strict=True))

    def collect(self) -> Samples:
        """Fill the batch and follow its episodes."""
        self.whole = False
        self.begin()
        self.run(0)
        self.tracker.follow(self.batch.rows, [stepper.events() for stepper in self.steppers])
        self.bounds.check(self.batch.rows.observation)
        self.whole = True
        return self.samples

    def begin(self) -> None:
        """Row T of the last batch becomes row 0 of this one, and the agent's state the one it starts from."""
        for to, row in self._rows:
            to[...] = row
        for actor in self.actors:
            actor.begin()

    def run(self, start: int) -> None:
        """Carry out the steps from `start` on."""
        T, pairs = self.batch.rows.T, list(zip(self.actors, self.steppers, strict=True))
        for actor in self.actors:
            actor.draw()
        for t in range(start, T):
            for actor, stepper in pairs:
                if t > start:
                    stepper.finish(t - 1)
                actor.act(t)
                stepper.begin(t)
        for actor, stepper in pairs:
            if start < T:
                stepper.finish(T - 1)
            actor.end()

    def state(self) -> dict[str, Any]:
        """What `resume` needs, between batches: the last row, the environments at it, their running episodes."""
        envs = [state for stepper in self.steppers for state in stepper.state()]
        return {"envs": envs, **running(self.batch, self.tracker, self.bounds)}

    def resume(self, saved: Mapping[str, Any]) -> list[str]:
        """Go on where another collector was; for each environment why its episode could not, or nothing."""
        self.batch.load_last_row(saved["row"])
        reasons: list[str] = []
        for stepper in self.steppers:
            reasons += stepper.restore(saved["envs"][stepper.lo : stepper.hi])
        for actor in self.actors:
            actor.resume()
        load_running(saved, reasons, self.tracker, self.bounds)
        return reasons

    def restart(self, round_: int = 0) -> None:
        """Begin the episodes of a round everywhere; what was running is forgotten."""
        for stepper in self.steppers:
            stepper.reset(round_)
        self.tracker = EpisodeTracker(self.batch.rows.B)

    def decorrelate(self, n_steps: int, action_space: Space, rngs: Sequence[np.random.Generator]) -> None:
        """Take random steps, each environment by its own generator, so that they do not march in step.

        Episodes that they are part of are not told.
        """
        if not n_steps:
            return
        rows, last = self.batch.rows, self.batch.rows.T - 1
        for _ in range(n_steps):
            drawn = [spaces.random_action(action_space, rng, 1) for rng in rngs]
            write(rows.actions()[last], map_tree(lambda *each: np.concatenate(each), *drawn))
            for stepper in self.steppers:
                stepper.begin(last)
            for stepper in self.steppers:
                stepper.finish(last)
        for stepper in self.steppers:
            stepper.events()
        rows.first[-1] = True  # the agent's own part of the episode begins here
        self.tracker.partial[:] = True


def running(batch: Batch, tracker: EpisodeTracker, bounds: BoundsCheck) -> dict[str, Any]:
    """What runs on from one batch to the next beside the environments."""
    return {"row": batch.last_row(), "episodes": tracker.state(), "bounds": bounds.state()}


def load_running(
    saved: Mapping[str, Any], reasons: Sequence[str], tracker: EpisodeTracker, bounds: BoundsCheck
) -> None:
    """Go on with running episodes, but for those that had to begin anew for some reason."""
    tracker.load(saved["episodes"], np.array([bool(reason) for reason in reasons]))
    bounds.load(saved["bounds"])


def local_collector(
    envs: Envs, agent: Agent, T: int, rngs: Sequence[np.random.Generator], explore: bool = True, first: int = 0
) -> Collector:
    """Environments and agent in this process; `first` is the index of the first environment over all ranks."""
    batch = empty_batch(envs.observation_space, envs.action_space, agent, T, envs.n)
    stepper = LocalStepper(envs, batch.rows, 0, np.zeros(1, np.int64))
    stepper.reset()
    return Collector(
        batch, [Actor(agent, batch, first, rngs, explore, block_of(envs.n))], [stepper], envs.observation_space
    )


def remote_collector(
    workers: EnvPool,
    agent: Agent,
    T: int,
    rngs: Sequence[np.random.Generator],
    explore: bool,
    n_groups: int,
    first: int = 0,
) -> Collector:
    """The agent in this process, its environments in groups of workers, one stepped while the others are acted for.

    `first` is the index of the first environment over all ranks.
    """
    shared = share(empty_rows(workers.observation_space, workers.action_space, T, workers.n), "rows")
    batch = Batch(shared.tree, empty_answers(agent, shared.tree, range(workers.n)))
    steppers = remote_steppers(workers, shared, n_groups)
    actors = [
        Actor(agent, batch.columns(s.lo, s.hi), first + s.lo, rngs[s.lo : s.hi], explore, block_of(workers.n))
        for s in steppers
    ]
    return Collector(batch, actors, steppers, workers.observation_space)
