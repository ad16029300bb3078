"""The program of CpuSampler's workers: an agent of their own that acts for their columns of the shared batch."""

from __future__ import annotations

from typing import Any

import torch

from rlframe.agents import Agent
from rlframe.core.seeding import Role, generator, generators
from rlframe.core.struct import Tree, as_numpy, write
from rlframe.envs.stepper import LocalStepper
from rlframe.envs.worker import Site
from rlframe.samplers.actor import Actor
from rlframe.samplers.base import load_noise, noise_state
from rlframe.samplers.batch import Batch
from rlframe.samplers.collector import Collector
from rlframe.system import board
from rlframe.system.child import PROGRESS, Handler
from rlframe.system.memory import keep_freed_memory

COLLECT, GO_ON, NOISE, LOAD_NOISE = range(4)  # commands


def parameters(agent: Agent) -> Tree:
    """All that an agent learns, buffers too, by name; views where it is on the CPU."""
    named = {**dict(agent.named_parameters()), **dict(agent.named_buffers())}
    return {name: tensor.detach() for name, tensor in named.items()}


def collect_batches(site: Site) -> Handler:
    """Act and step on one's own, a batch at a time. What it is handed is said in CpuSampler."""
    worker = _Worker(site)

    def handle(command: int, argument: int) -> Any:
        if command == COLLECT:
            return worker.collect()
        if command == GO_ON:
            return worker.go_on(argument)
        if command == NOISE:
            return noise_state(worker.rngs)
        load_noise(worker.rngs, site.parent.receive())
        return None

    return handle


class _Worker:
    def __init__(self, site: Site) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        whole, self.board = site.memory
        agent, seed, decorrelation_steps, block = site.arguments
        n, lo = site.envs.n, site.lo
        batch: Batch = whole.columns(lo, lo + n)
        self.batch, self.parameters, self.version = batch, _views(agent), -1
        if site.incarnation:
            self.rngs = [generator(seed, Role.NOISE, lo + env, site.incarnation) for env in range(n)]
        else:
            self.rngs = generators(seed, Role.NOISE, n, lo)
        self.stepper = LocalStepper(site.envs, batch.rows, lo, site.parent.words[PROGRESS:])
        actor = Actor(agent, batch, lo, self.rngs, True, block)
        self.collector = Collector(batch, [actor], [self.stepper], site.envs.observation_space)
        if site.incarnation == 0:
            self.stepper.reset()
            moves = generators(seed, Role.DECORRELATION, n, lo)
            self.collector.decorrelate(decorrelation_steps, site.envs.action_space, moves)

    def _refresh(self) -> None:
        self.version = board.read(self.board, self.parameters, self.version)

    def collect(self) -> Any:
        """A batch; what happened in it, if anything did."""
        self._refresh()
        self.collector.begin()
        self.collector.run(0)
        return self.stepper.events() if self.stepper.n_notes else None

    def go_on(self, progress: int) -> Any:
        """Complete a batch that a dead process left after `progress` steps (-1: perhaps not even begun)."""
        self._refresh()
        if progress < 0:
            self.collector.begin()
            write(self.batch.answers.state, self.batch.answers.final_state)
        t = min(max(progress, 0), self.batch.rows.T - 1)
        self.stepper.cut(t)
        self.collector.run(t + 1)
        return self.stepper.events() if self.stepper.n_notes else None


def _views(agent: Agent) -> Tree:
    return {name: as_numpy(tensor) for name, tensor in parameters(agent).items()}
