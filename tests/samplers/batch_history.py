"""Checks consecutive batches of `faulty.Coded` row by row against the rules of that environment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rlframe.agents import PolicyAgent
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.core.types import Samples, Trajectory
from tests.samplers.faulty import length_of
from tests.samplers.made import assert_equal

LENGTH = 4  # of an episode, at least


class BatchHistory:
    """The rows of consecutive batches. `interruptions`: the (step, environment) where a process died in an episode.

    Raises:
        AssertionError: a row mixes two episodes or processes, or its flags are wrong.
    """

    def __init__(self, batches: Sequence[Samples]) -> None:
        self.T, self.B = batches[0].valid.shape
        for one, other in pairwise(batches):
            assert_equal(one.inputs[-1], other.inputs[0])
            if leaves(one.state):
                assert_equal(one.final_state, other.state)
        self.observation = _joined([b.inputs.observation for b in batches])  # [N+1, B, 4]
        self.first = _joined([b.inputs.first for b in batches])  # [N+1, B]
        self.action = _stacked([b.action for b in batches])  # [N, B], as all that follow
        self.reward = _stacked([b.reward for b in batches])
        self.terminated = _stacked([b.terminated for b in batches])
        self.truncated = _stacked([b.truncated for b in batches])
        self.valid = _stacked([b.valid for b in batches])
        self.interruptions: list[tuple[int, int]] = []
        self.ended: list[Trajectory] = []  # by themselves; without diagnostics
        self.seeds: list[set[float]] = [set() for _ in range(self.B)]  # of each environment
        for t in range(len(self.valid)):
            for env in range(self.B):
                if self.valid[t, env]:
                    self._check_step(t, env)
                else:
                    self._check_reset(t, env)

    def _check_step(self, t: int, env: int) -> None:
        seed, episode, step, _ = self.observation[t, env]
        self.seeds[env].add(seed)
        np.testing.assert_array_equal(self.observation[t + 1, env], [seed, episode, step + 1, self.action[t, env]])
        assert self.reward[t, env] == step + 1
        assert not self.first[t + 1, env]
        over = step + 1 == length_of(LENGTH, int(episode))
        is_cut = t + 1 < len(self.valid) and (t + 1) % self.T and not self.valid[t + 1, env]
        assert self.terminated[t, env] == (over and episode % 2 == 0)
        assert self.truncated[t, env] == bool((over and episode % 2 == 1) or (is_cut and not over))
        assert t + 1 == len(self.valid) or not (over and self.valid[t + 1, env])
        if over:
            return_ = float(sum(range(int(step) + 2)))
            self.ended.append(Trajectory(return_, int(step) + 1, bool(episode % 2 == 0), env))

    def _check_reset(self, t: int, env: int) -> None:
        seed, episode, step, _ = self.observation[t, env]
        after = self.observation[t + 1, env]
        assert self.first[t + 1, env]
        assert [self.reward[t, env], self.terminated[t, env], self.truncated[t, env]] == [0, False, False]
        if after[0] == seed:
            assert step == length_of(LENGTH, int(episode))
            np.testing.assert_array_equal(after, [seed, episode + 1, 0, -1])
        else:
            np.testing.assert_array_equal(after[1:], [0, 0, -1])
            self.interruptions.append((t, env))


def without_diagnostics(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Copies without diagnostics, which are lost when a process dies."""
    return [Trajectory(each.return_, each.length, each.terminated, each.env) for each in trajectories]


def assert_states_match_rows(agent: PolicyAgent, batches: Sequence[Samples]) -> None:
    """Check that the agent computes the same values from the stored rows, so its memory was reset where they say."""
    for batch in batches:
        _, value, _ = agent(batch.inputs[:-1], batch.state)
        valid = batch.valid.numpy()
        acted: Any = batch.info
        np.testing.assert_allclose(value.detach().numpy()[valid], acted.value.numpy()[valid], atol=1e-5)


def column(batches: Sequence[Samples], lo: int, hi: int) -> Tree:
    """All arrays of environments lo to hi - 1."""
    arrays = [(b.inputs, b.action, b.terminated, b.truncated, b.valid, b.info) for b in batches]
    return tuple(map_tree(lambda x: x[:, lo:hi], each) for each in arrays)


def _stacked(arrays: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.asarray(array) for array in arrays])


def _joined(arrays: Sequence[Any]) -> np.ndarray:
    """Inputs [T+1, B] without the rows that two batches share."""
    return _stacked([*(array[:-1] for array in arrays), arrays[-1][-1:]])
