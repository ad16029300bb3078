"""CpuSampler's side in a worker process: a copy of the agent acts for the worker's columns of the shared batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlframe.agents import Agent
from rlframe.core.objects import ObjectName
from rlframe.core.seeding import Role, generator, generators, pack_state
from rlframe.core.struct import Tree, as_numpy, map_tree, write
from rlframe.rollout.buffer import BatchBuffer
from rlframe.rollout.collector import Collector
from rlframe.rollout.inference import BatchInference, load_noise
from rlframe.rollout.stepper import BatchEvents, LocalStepper
from rlframe.rollout.worker_pool import WorkerContext
from rlframe.system.machine import retain_freed_memory
from rlframe.system.shared import read_parameters
from rlframe.system.worker_main import PROGRESS

COLLECT, COMPLETE, STATE, LOAD_STATE = range(4)  # commands


def parameters(agent: Agent) -> Tree:
    """An agent's parameters and buffers by name; views if it is on the CPU."""
    return {name: tensor.detach() for name, tensor in (*agent.named_parameters(), *agent.named_buffers())}


class ParameterCopies:
    """An agent's parameters in another process, copied from shared memory when newer ones were posted."""

    def __init__(self, agent: Agent, shared: Any) -> None:
        self.version = -1
        self._shared, self._parameters = shared, parameters(agent)
        self._values = map_tree(lambda x: np.zeros_like(as_numpy(x)), self._parameters)

    def refresh(self) -> bool:
        """Copy the newest parameters into the agent; returns whether they have changed."""
        version = read_parameters(self._shared, self._values, self.version)
        changed = version != self.version
        if changed:
            self.version = version
            with torch.no_grad():
                for name, tensor in self._parameters.items():
                    tensor.copy_(torch.from_numpy(self._values[name]))
        return changed


class CollectHandler:
    """For CpuSampler's workers: handles the commands above. CpuSampler gives the shared memory and the arguments."""

    def __init__(self, context: WorkerContext) -> None:
        torch.set_num_threads(1)
        retain_freed_memory()
        batch_of_all, shared_parameters, noise = context.memory
        agent, seed, decorrelation_steps, block, first_of_rank, name = context.arguments
        n, lo = context.envs.n, context.lo
        first = first_of_rank + lo  # the first environment's index over all ranks
        batch: BatchBuffer = batch_of_all.columns(lo, lo + n)
        self.batch = batch
        _share_parameters(agent, shared_parameters["values"])
        self.noise = noise[lo : lo + n]  # [n, STATE_WORDS]: the generators' states after the last batch
        if context.generation:
            self.rngs = [generator(seed, Role.NOISE, first + env, context.generation) for env in range(n)]
        else:
            self.rngs = generators(seed, Role.NOISE, n, first)
        self.parent, self.progress = context.parent, context.parent.control[PROGRESS:]
        self.stepper = LocalStepper(context.envs, batch.rows, lo, self.progress)
        inference = BatchInference(agent, batch, first, self.rngs, True, block)
        collector = name.value if isinstance(name, ObjectName) else Collector
        self.collector: Collector = collector(batch, [inference], [self.stepper], context.envs.observation_space)
        if not context.is_replacement:
            self.stepper.reset()
            self.collector.decorrelate(decorrelation_steps, seed, first_of_rank)
        self._save_noise()

    def __call__(self, command: int, argument: int) -> Any:
        if command == COLLECT:
            self._start_batch()
            return self._run(0)
        if command == COMPLETE:
            return self._complete(argument)
        if command == STATE:
            return self.stepper.state()
        states, noise = self.parent.receive()  # without states `argument` is a round of new episodes
        # The parent wrote the last row and the agent's state to shared memory.
        load_noise(self.rngs, noise)
        self._save_noise()
        if not states:
            self.collector.reset(argument)
            return []
        self.collector.inferences[0].load_state()
        return self.stepper.restore(states)

    def _run(self, start: int) -> BatchEvents | None:
        """Take the steps from `start` on; returns the events if there are any."""
        self.collector.run_steps(start)
        self._save_noise()
        return self.stepper.pop_events() if self.stepper.n_events else None

    def _save_noise(self) -> None:
        """Write the generators' states to shared memory, where the parent finds them even if this process dies."""
        self.noise[...] = [pack_state(rng) for rng in self.rngs]

    def _start_batch(self) -> None:
        self.collector.start_batch()
        self.progress[0] = 0  # tells the parent that row 0 is written, and row T may change

    def _complete(self, progress: int) -> BatchEvents | None:
        """Complete the batch of a process that died after `progress` steps; -1: row 0 may not be written yet."""
        if progress < 0:
            self._start_batch()
            write(self.batch.outputs.state, self.batch.outputs.final_state)
        t = min(max(progress, 0), self.batch.rows.T - 1)
        self.stepper.restart_episodes(t)
        return self._run(t + 1)


def _share_parameters(agent: Agent, values: Tree) -> None:
    """Make the agent use the parameters in shared memory, which change only between batches."""
    for name, tensor in (*agent.named_parameters(), *agent.named_buffers()):
        tensor.data = torch.from_numpy(values[name])
