"""Any sampler continues exactly from the state of any other."""

from __future__ import annotations

import itertools
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from rlframe.algos import dqn
from rlframe.core.seeding import Role, generators
from rlframe.core.struct import leaves
from rlframe.envs import EnvConfig, make_envs
from rlframe.exploration import EpsilonConfig
from rlframe.models import ModelConfig
from rlframe.rollout.inference import BatchInference, block_size, empty_batch
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.samplers import CpuSampler, GpuSampler
from rlframe.system.service import Supervision
from tests.envs import resumable
from tests.envs.test_restore import stored
from tests.samplers.made import B, T, agent_for, assert_batches_equal, assert_equal, copied, sampler_for, split


def batches(sampler: Any, n: int) -> list[Any]:
    return [(copied(sampler.collect()), sampler.trajectories()) for _ in range(n)]


@pytest.mark.same_bits
@pytest.mark.parametrize(("before", "after"), [("serial", "cpu2"), ("cpu2", "alternating2"), ("gpu3", "serial")])
@pytest.mark.parametrize("env", [resumable.Walk, resumable.Opaque], ids=["by state", "by actions"])
def test_a_sampler_continues_from_the_state_of_another(before: str, after: str, env: Any) -> None:
    model = {"memory": "lstm", "memory_size": 4, "feed_back": True}
    first, _ = split(before, env, **model)
    with closing(first):
        batches(first, 3)
        state = stored(first.state_dict())
        one = batches(first, 3)
    second, _ = split(after, env, **model)
    with closing(second):
        assert second.load_state_dict(state) == [""] * B
        other = batches(second, 3)
        assert_batches_equal(one, other)
        assert [batch.start for batch, _ in other] == [batch.start for batch, _ in one] == [3 * T, 4 * T, 5 * T]


@pytest.mark.parametrize("how", ["serial", "cpu1"])
def test_a_numpy_vector_environment_continues_in_the_same_split(how: str) -> None:
    first, _ = split("serial", "CartPole-v1", backend="native")
    batches(first, 3)
    state = stored(first.state_dict())
    second, _ = split(how, "CartPole-v1", backend="native")
    with closing(second):
        assert second.load_state_dict(state) == [""] * B
        assert_batches_equal(batches(first, 6), batches(second, 6))


def test_a_numpy_vector_environment_restarts_in_another_split() -> None:
    first, _ = split("serial", "CartPole-v1", backend="native")
    batches(first, 3)
    second, _ = split("cpu2", "CartPole-v1", backend="native")
    with closing(second):
        assert all("another size" in reason for reason in second.load_state_dict(stored(first.state_dict())))
        assert second.collect().inputs.first[0].all()


@pytest.mark.parametrize("how", ["cpu", "gpu"])
def test_a_state_saved_before_the_first_batch_has_the_initial_state_of_the_agent(how: str) -> None:
    envs = WorkerPool(EnvConfig("CartPole-v1", {}, "python"), 4, list(range(4)), 2, (), Supervision(timeout_s=30))
    config = dqn.Config(explore=EpsilonConfig(epsilon_last=0.1))
    agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(), 0)
    with closing((CpuSampler if how == "cpu" else GpuSampler)(envs, agent, T)) as sampler:
        (env,) = leaves(
            sampler.stream.batch.outputs.final_state if how == "cpu" else sampler.collector.batch.outputs.final_state
        )
        assert env.tolist() == [0, 1, 2, 3], "by which epsilon is graded"


def test_environments_that_waited_to_be_decorrelated_are_restored_by_their_own_actions() -> None:
    samplers = [sampler_for(resumable.Opaque, T=4, B=8, decorrelation_steps=3, length=200)[0] for _ in range(2)]
    batches(samplers[0], 1)
    assert samplers[1].load_state_dict(stored(samplers[0].state_dict())) == [""] * 8
    assert_equal(*(copied(sampler.collect()) for sampler in samplers))


def test_restarted_episodes_are_reported_without_the_earlier_steps() -> None:
    first, _ = sampler_for(resumable.Unrepeatable, T=5, B=2, length=8)
    batches(first, 1)
    second, _ = sampler_for(resumable.Unrepeatable, T=5, B=2, length=8)
    assert all(second.load_state_dict(stored(first.state_dict())))
    found = batches(second, 2)
    assert [t.length for _, trajectories in found for t in trajectories] == [8, 8]
    assert [batch.start for batch, _ in found] == [6, 11], "the first does not continue the batch 0 to 5"


def test_after_an_interrupted_batch_only_the_noise_is_saved() -> None:
    sampler, _ = sampler_for("CartPole-v1", T=4, B=2)
    sampler.collector.complete = False
    state = stored(sampler.state_dict())
    assert list(state) == ["noise"]
    other, _ = sampler_for("CartPole-v1", T=4, B=2)
    assert all("no environments" in reason for reason in other.load_state_dict(state))


def silent(rng: np.random.Generator, lead: tuple[int, ...]) -> np.ndarray:
    return np.zeros((*lead, 2), np.float32)


def starts(how: str) -> list[Any]:
    """The first rows of a run and of two resumes without environments, by an agent that draws no noise."""
    state, found = {}, []
    for _ in range(3):
        sampler, _ = split(how, resumable.Walk, noise=silent)
        with closing(sampler):
            if state:
                assert all("no environments" in reason for reason in sampler.load_state_dict(state))
            found.append(copied(sampler.collect()).inputs[0])
            state = {"noise": stored(sampler.state_dict())["noise"]}
    return found


def test_a_resume_without_environments_plays_new_episodes_each_time_of_all_samplers_the_same() -> None:
    of_serial = starts("serial")
    for one, other in itertools.combinations(of_serial, 2):
        assert not np.isin(one.observation[:, 0], other.observation[:, 0]).any()
        assert other.first.all()
    for how in ("cpu2", "gpu2"):
        assert_equal([each.observation for each in starts(how)], [each.observation for each in of_serial])


def test_a_resume_after_one_row_does_not_continue_it() -> None:
    first, _ = sampler_for("CartPole-v1", T=1, B=2)
    second, _ = sampler_for("CartPole-v1", T=1, B=2)
    one = first.collect()
    second.load_state_dict({"noise": first.state_dict()["noise"]})
    other = second.collect()
    assert other.inputs.first[0].all()
    assert other.start != one.start + 1
    assert other.start + 1 != 0, "where a process begins that replaces this one"


@pytest.mark.parametrize("n", [3, 8])
def test_inference_loads_a_recurrent_state(n: int) -> None:
    envs = make_envs(EnvConfig("CartPole-v1"), n, list(range(n)))
    agent = agent_for(envs.observation_space, envs.action_space, memory="gru", memory_size=4)
    batch = empty_batch(envs.observation_space, envs.action_space, agent, 2, n)
    inference = BatchInference(agent, batch, 0, generators(0, Role.NOISE, n), True, block_size(n))
    for leaf in leaves(batch.outputs.final_state):
        leaf[...] = np.arange(leaf.size, dtype=np.float32).reshape(leaf.shape)
    inference.load_state()
    inference.save_initial_state()
    assert_equal(batch.outputs.state, batch.outputs.final_state)
