"""The program of CpuSampler's workers: an agent of their own that acts for their columns of the shared batch."""

from __future__ import annotations

from typing import Any

import torch

from rlframe.agents import Agent
from rlframe.core.seeding import Role, generator, generators, pack_state, unpack_state
from rlframe.core.struct import Tree, write
from rlframe.rollout.buffer import Batch
from rlframe.rollout.collector import Collector
from rlframe.rollout.env_pool import Site
from rlframe.rollout.inference import Actor, load_noise
from rlframe.rollout.stepper import LocalStepper
from rlframe.system.machine import keep_freed_memory
from rlframe.system.worker_main import PROGRESS, Handler

COLLECT, GO_ON, STATE, RESUME = range(4)  # commands


def parameters(agent: Agent) -> Tree:
    """All that an agent learns, buffers too, by name; views where it is on the CPU."""
    return {name: tensor.detach() for name, tensor in _named(agent).items()}


def _named(agent: Agent) -> dict[str, torch.Tensor]:
    return {**dict(agent.named_parameters()), **dict(agent.named_buffers())}


def collect_batches(site: Site) -> Handler:
    """Act and step on one's own, a batch at a time. What it is handed is said in CpuSampler."""
    worker = _Worker(site)

    def handle(command: int, argument: int) -> Any:
        if command == COLLECT:
            return worker.collect()
        if command == GO_ON:
            return worker.go_on(argument)
        if command == STATE:
            return worker.stepper.state()
        return worker.resume(site.parent.receive())

    return handle


class _Worker:
    def __init__(self, site: Site) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        whole, parameters_board, noise = site.memory
        agent, seed, decorrelation_steps, block, first_of_rank = site.arguments
        n, lo = site.envs.n, site.lo
        first = first_of_rank + lo  # index of the first environment here, over all ranks
        batch: Batch = whole.columns(lo, lo + n)
        self.batch = batch
        _adopt(agent, parameters_board["values"])
        self.noise = noise[lo : lo + n]  # [n, STATE_WORDS] of the generators after the last batch
        if site.incarnation:
            self.rngs = [generator(seed, Role.NOISE, first + env, site.incarnation) for env in range(n)]
        else:
            self.rngs = generators(seed, Role.NOISE, n, first)
        self.progress = site.parent.words[PROGRESS:]
        self.stepper = LocalStepper(site.envs, batch.rows, lo, self.progress)
        actor = Actor(agent, batch, first, self.rngs, True, block)
        self.collector = Collector(batch, [actor], [self.stepper], site.envs.observation_space)
        if not site.takes_over:
            self.stepper.reset()
            moves = generators(seed, Role.DECORRELATION, n, first)
            for step in range(decorrelation_steps):
                self.collector.decorrelate(1, site.envs.action_space, moves)
                self.progress[0] = -step  # a sign of life
        self._tell_noise()

    def collect(self) -> Any:
        """A batch; what happened in it, if anything did."""
        self._begin()
        return self._run(0)

    def _run(self, start: int) -> Any:
        self.collector.run(start)
        self._tell_noise()
        return self.stepper.events() if self.stepper.n_notes else None

    def _tell_noise(self) -> None:
        """Where the parent finds it, also when we shall be gone."""
        self.noise[...] = [pack_state(rng) for rng in self.rngs]

    def resume(self, states: list[Any]) -> list[str]:
        """Take on noise, last row and recurrent state, which the parent has written, and the environments' states."""
        load_noise(self.rngs, [unpack_state(words) for words in self.noise])
        self.collector.actors[0].resume()
        return self.stepper.restore(states) if states else []

    def _begin(self) -> None:
        self.collector.begin()
        self.progress[0] = 0  # from now on row T may change, and row 0 stays

    def go_on(self, progress: int) -> Any:
        """Complete a batch that a dead process left after `progress` steps (-1: perhaps not even begun)."""
        if progress < 0:
            self._begin()
            write(self.batch.answers.state, self.batch.answers.final_state)
        t = min(max(progress, 0), self.batch.rows.T - 1)
        self.stepper.cut(t)
        return self._run(t + 1)


def _adopt(agent: Agent, values: Tree) -> None:
    """Let the agent's parameters be those on the board: they change between batches only, while nobody acts."""
    for name, tensor in _named(agent).items():
        tensor.data = torch.from_numpy(values[name])
