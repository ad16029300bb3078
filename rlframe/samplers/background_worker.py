"""The program of a sampler's own process: it collects batch after batch into the slots of a ring."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.struct import Struct, Tree, as_numpy, map_tree, write
from rlframe.core.types import AgentInputs, Array, BatchSpec, Samples
from rlframe.envs import EnvConfig
from rlframe.models.encoders import has_images
from rlframe.rollout.cpu_worker import parameters
from rlframe.rollout.inference import empty_batch
from rlframe.samplers.base import Sampler
from rlframe.system.machine import keep_freed_memory
from rlframe.system.ring import FILL, filling
from rlframe.system.shared import read_parameters
from rlframe.system.worker_main import PROGRESS, Parent

LOAD_NOISE = 1  # the command beside FILL, before the first of those
_NEWS_S = 1.0  # between messages about the sampler's counters


@dataclass(frozen=True, eq=False)
class Slot(Struct):
    """One batch and what belongs to it. Actions and rewards are those of the inputs, one row later."""

    inputs: AgentInputs  # [T+1, B]
    terminated: Array  # [T, B]
    truncated: Array  # [T, B]
    valid: Array  # [T, B]
    info: Tree  # [T, B]
    state: Tree  # [B]
    final_state: Tree  # [B]
    version: Array  # [1] int64: of the parameters that all of it was sampled with
    news: Array  # [1] bool: whether a message about it was sent

    def samples(self) -> Samples:
        """Torch views."""
        samples = Samples(
            inputs=self.inputs,
            action=map_tree(lambda x: x[1:], self.inputs.prev_action),
            reward=self.inputs.prev_reward[1:],
            terminated=self.terminated,
            truncated=self.truncated,
            valid=self.valid,
            info=self.info,
            state=self.state,
            final_state=self.final_state,
        )
        return samples.torch()


def empty_slot(observation_space: Space, action_space: Space, agent: Agent, spec: BatchSpec) -> Slot:
    """Zeros for batches of this agent."""
    batch = empty_batch(observation_space, action_space, agent, spec.T, spec.B)
    rows, answers = batch.rows, batch.answers
    ends = (rows.terminated, rows.truncated, rows.valid)
    version, news = np.zeros(1, np.int64), np.zeros(1, np.bool_)
    return Slot(batch.inputs(), *ends, answers.info, answers.state, answers.final_state, version, news)


def produce(
    parent: Parent, config: Any, env: EnvConfig, seed: int, worker_cpus: Sequence[Sequence[int]], n_threads: int
) -> None:
    """The process's life. `config` is a sampler's; what it is handed later is said in RemoteSampler."""
    keep_freed_memory()
    signal.signal(signal.SIGUSR2, _leave)
    envs = config.make_envs(env, seed, worker_cpus)
    try:
        torch.set_num_threads(n_threads if has_images(envs.observation_space) else 1)
        parent.send((envs.observation_space, envs.action_space, envs.backend))
        agent, device = parent.receive()
        slots, parameters_board = parent.take().tree, parent.take().tree
        agent.to(torch.device(device))
        sampler: Sampler = config.make_sampler(envs, agent, seed)
        producer = _Producer(parent, sampler, agent, parameters_board)
        parent.send(sampler.backend)
        fill = filling(slots, producer.fill)

        def handle(command: int, argument: int) -> None:
            if command == FILL:
                fill(command, argument)
            else:
                sampler.load_state_dict({"noise": parent.receive()})

        parent.serve(handle)
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        envs.close()


def _leave(signum: int, frame: FrameType | None) -> None:
    """Break off the batch under way, in order: whoever started us no longer wants it."""
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(0)


class _Producer:
    """Fills slots, each with the newest parameters there are when it begins."""

    def __init__(self, parent: Parent, sampler: Sampler, agent: Agent, parameters_board: Any) -> None:
        self.parent, self.sampler, self.agent, self.board = parent, sampler, agent, parameters_board
        self.own = parameters(agent)
        self.read = map_tree(lambda x: np.zeros_like(as_numpy(x)), self.own)  # what the board said, whole
        self.version = -1
        self.life = parent.words[PROGRESS:]  # negative between batches, so that it changes with each
        self.n_batches = 0
        self.told_at = time.monotonic()
        sampler.tell_life(self.life)

    def fill(self, slot: Slot) -> None:
        """Collect one batch."""
        self.n_batches += 1
        self.life[0] = -1 - self.n_batches
        self._refresh()
        samples = self.sampler.collect()
        write(slot.inputs, samples.inputs)
        write((slot.terminated, slot.truncated, slot.valid), (samples.terminated, samples.truncated, samples.valid))
        write((slot.info, slot.state, slot.final_state), (samples.info, samples.state, samples.final_state))
        slot.version[0] = self.version
        slot.news[0] = self._tell()

    def _refresh(self) -> None:
        version = read_parameters(self.board, self.read, self.version)
        if version != self.version:
            self.version = version
            with torch.no_grad():
                for name, tensor in self.own.items():
                    tensor.copy_(torch.from_numpy(self.read[name]))
            self.sampler.refresh(self.agent)

    def _tell(self) -> bool:
        """Send home the episodes that ended, and now and then the counters, if there is anything to tell."""
        trajectories, counters = self.sampler.trajectories(), {}
        if time.monotonic() - self.told_at > _NEWS_S:
            counters, self.told_at = self.sampler.counters(), time.monotonic()
        if trajectories or counters:
            self.parent.send((trajectories, counters))
        return bool(trajectories or counters)
