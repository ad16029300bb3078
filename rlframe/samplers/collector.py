"""The time-step loop: steps a batch of environments with an agent, writes the rows and follows the episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlframe.agents import Agent
from rlframe.agents.base import NoiseBuffer
from rlframe.core import spaces
from rlframe.core.struct import Struct, Tree, leaves, map_tree, write, zeros_like
from rlframe.core.types import AgentInputs, BatchSpec, Samples, Trajectory
from rlframe.envs import Envs, EnvStep


class EpisodeTracker:
    """Follows every environment's running episode and keeps those that ended."""

    def __init__(self, envs: Envs) -> None:
        self.envs = envs
        self.return_ = np.zeros(envs.n)
        self.length = np.zeros(envs.n, np.int64)
        self.finished: list[Trajectory] = []

    def follow(self, row: EnvStep) -> None:
        """Account for one step of all environments."""
        self.return_ += row.score
        self.length += row.valid
        if row.ended.any():
            for env in np.flatnonzero(row.ended):
                self._close(int(env), bool(row.terminated[env]))

    def _close(self, env: int, terminated: bool) -> None:
        diagnostics = self.envs.pop_diagnostics(env)
        length = int(self.length[env])
        self.finished.append(Trajectory(float(self.return_[env]), length, terminated, env, diagnostics))
        self.return_[env], self.length[env] = 0.0, 0

    def pop(self) -> list[Trajectory]:
        """The finished episodes; forgets them."""
        finished, self.finished = self.finished, []
        return finished


class Collector:
    """One batch of memory, allocated once, and the loop that fills it. The agent acts on its own device."""

    def __init__(
        self, envs: Envs, agent: Agent, T: int, rngs: Sequence[np.random.Generator], explore: bool = True
    ) -> None:
        self.envs, self.agent, self.explore = envs, agent, explore
        self.batch_spec = BatchSpec(T, envs.n)
        self.device = next(agent.parameters()).device
        self.tracker = EpisodeTracker(envs)
        self.noise = NoiseBuffer(agent, T, rngs)
        self.state: Tree = agent.initial_state(range(envs.n))
        self._allocate(T, envs.n)
        self.restart()

    def _allocate(self, T: int, B: int) -> None:
        """Actions and rewards have T+1 rows: row t+1 of the buffer is action[t], and prev_action[t+1]."""
        action = spaces.zeros(self.envs.action_space, (T + 1, B))
        reward = np.zeros((T + 1, B), np.float32)
        inputs = AgentInputs(
            observation=spaces.zeros(self.envs.observation_space, (T + 1, B)),
            prev_action=action,
            prev_reward=reward,
            first=np.zeros((T + 1, B), bool),
        )
        step = self.agent.step(inputs[0].torch().to(self.device), self.state, self._noise_rows()[0])
        info: Struct = map_tree(lambda x: np.zeros((T, *x.shape), x.cpu().numpy().dtype), step.info)
        self.array = Samples(
            inputs=inputs,
            action=map_tree(lambda x: x[1:], action),
            reward=reward[1:],
            terminated=np.zeros((T, B), bool),
            truncated=np.zeros((T, B), bool),
            valid=np.zeros((T, B), bool),
            info=info,
            state=zeros_like(map_tree(lambda x: x.cpu().numpy(), self.state), ()),
            final_state=zeros_like(map_tree(lambda x: x.cpu().numpy(), self.state), ()),
        )
        self.samples = self.array.torch()
        score, ended = np.zeros(B, np.float32), np.zeros(B, bool)
        self.rows = [self._env_row(t, score, ended) for t in range(T)]
        self.inputs = [self.samples.inputs[t] for t in range(T)]
        self.actions = [map_tree(lambda x, t=t: x[t], self.array.action) for t in range(T)]
        self.infos = [info[t] for t in range(T)]
        self.noises = self._noise_rows()
        self.has_state = bool(leaves(self.state))

    def _noise_rows(self) -> list[Tree]:
        noise = map_tree(torch.from_numpy, self.noise.arrays)
        return [map_tree(lambda x, t=t: x[t].to(self.device), noise) for t in range(self.noise.T)]

    def _env_row(self, t: int, score: np.ndarray, ended: np.ndarray) -> EnvStep:
        array = self.array
        return EnvStep(
            observation=map_tree(lambda x: x[t + 1], array.inputs.observation),
            first=array.inputs.first[t + 1],
            reward=array.reward[t],
            terminated=array.terminated[t],
            truncated=array.truncated[t],
            valid=array.valid[t],
            score=score,
            ended=ended,
        )

    def collect(self) -> Samples:
        """Fill the batch: row T of the last one becomes row 0 of this one."""
        self.array.inputs[0] = self.array.inputs[-1]
        if self.explore:
            self.noise.draw()
        if self.has_state:
            write(self.array.state, self.state)
        on_cpu = self.device.type == "cpu"
        noises = self.noises if on_cpu else self._noise_rows()
        for t, row in enumerate(self.rows):
            inputs = self.inputs[t] if on_cpu else self.inputs[t].to(self.device)
            step = self.agent.step(inputs, self.state, noises[t])
            self.state = step.state
            write(self.actions[t], step.action)
            write(self.infos[t], step.info)
            self.envs.step(self.actions[t], row)
            self.tracker.follow(row)
        if self.has_state:
            write(self.array.final_state, self.state)
        return self.samples

    def restart(self) -> None:
        """Begin new episodes everywhere; what was running is forgotten."""
        self.envs.reset(self.rows[-1])
        self.tracker = EpisodeTracker(self.envs)

    def decorrelate(self, n_steps: int, rng: np.random.Generator) -> None:
        """Take random steps, so that the environments do not march in step."""
        row = self.rows[-1]
        for _ in range(n_steps):
            self.envs.step(spaces.random_action(self.envs.action_space, rng, self.envs.n), row)
            self.tracker.follow(row)
        if n_steps:
            row.first[...] = True  # the agent's own part of the episode begins here
            self.tracker.pop()  # episodes that random steps alone have played
