"""Batches of a sampler continue each other, and replay stores all their rows."""

from __future__ import annotations

import pytest

from rlframe.core.types import BatchSpec
from rlframe.envs import debug_envs
from rlframe.replay import FixedSequence, InMemory, NStep, make_replay
from tests.samplers.made import sampler_for


@pytest.mark.parametrize("memory", ["feed_forward", "lstm"])
def test_batches_of_a_sampler_are_stored_without_gaps(memory: str) -> None:
    recurrent = {"model_memory": "lstm"} if memory == "lstm" else {}
    sampler, agent = sampler_for(debug_envs.memory, T=8, B=3, decorrelation_steps=2, **recurrent)
    reader = FixedSequence(10) if memory == "lstm" else NStep(0.9, 2)
    env = debug_envs.memory()
    spaces = (env.observation_space, env.action_space)
    state = agent.initial_state(range(3))
    replay = make_replay(InMemory(size=600), *spaces, BatchSpec(8, 3), reader, state=state, previous=True)
    n_valid = 0
    for _ in range(6):
        samples = sampler.collect()
        replay.append(samples)
        n_valid += int(samples.valid.sum())
    assert replay.n_rows == n_valid
    assert replay._storages[0].ring.t == 6 * 8 + 1  # no gap, only one row before the first
    sampler.close()
