"""The contents of batches, on debug environments."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.core.struct import leaves, map_tree
from rlframe.core.types import BatchSpec, Samples
from rlframe.envs import debug_envs
from tests.samplers.made import assert_equal, copied, sampler_for


def two_batches(**kwargs: Any) -> tuple[Samples, Samples]:
    sampler, _ = sampler_for(**kwargs)
    return copied(sampler.collect()), copied(sampler.collect())


def test_the_end_of_an_episode_is_a_row() -> None:
    sampler, _ = sampler_for(debug_envs.time_limit, T=9, B=1, length=3, ends="terminated")
    samples = sampler.collect()
    #                                        0, 1, 2, last, 0, 1, 2, last, 0
    assert samples.inputs.observation[:, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert samples.inputs.first[:, 0].int().tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 1, 0]
    assert samples.valid[:, 0].int().tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 1]
    assert samples.terminated[:, 0].int().tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert samples.reward[:, 0].tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 1]
    assert not samples.truncated.any()


@pytest.mark.parametrize("action", ["discrete", "box", "dict"])
def test_previous_action_and_reward_are_the_row_before(action: str) -> None:
    first, second = two_batches(env=debug_envs.identity, T=6, B=2, action=action)
    for samples in (first, second):
        assert_equal(map_tree(lambda x: x[1:], samples.inputs.prev_action), samples.action)
        assert_equal(samples.inputs.prev_reward[1:], samples.reward)
    assert_equal(map_tree(lambda x: x[0], second.inputs.prev_action), map_tree(lambda x: x[-1], first.action))
    assert_equal(second.inputs.prev_reward[0], first.reward[-1])


def test_previous_action_and_reward_share_the_memory_of_action_and_reward() -> None:
    sampler, _ = sampler_for(debug_envs.identity, T=4, B=2)
    samples = sampler.collect()
    assert samples.inputs.prev_action[1:].data_ptr() == samples.action.data_ptr()
    assert samples.inputs.prev_reward[1:].data_ptr() == samples.reward.data_ptr()


@pytest.mark.parametrize("T", [1, 4])
def test_the_last_row_of_inputs_is_the_first_of_the_next_batch(T: int) -> None:
    sampler, _ = sampler_for(debug_envs.memory, T=T, B=2)
    before = copied(sampler.collect())
    for _ in range(8):
        after = copied(sampler.collect())
        assert_equal(before.inputs[-1], after.inputs[0])
        before = after


def test_rows_do_not_depend_on_batch_T() -> None:
    long, _ = sampler_for(debug_envs.memory, T=12, B=2, model_memory="gru")
    short, _ = sampler_for(debug_envs.memory, T=4, B=2, model_memory="gru")
    whole = long.collect()
    pieces = [copied(short.collect()) for _ in range(3)]
    assert_equal(whole.action, torch.cat([piece.action for piece in pieces]))
    assert_equal(whole.inputs.observation[:-1], torch.cat([piece.inputs.observation[:-1] for piece in pieces]))
    assert_equal(whole.final_state, pieces[-1].final_state)


def test_states_are_those_before_row_0_and_before_row_T() -> None:
    first, second = two_batches(env=debug_envs.memory, T=3, B=2, model_memory="lstm")
    assert not any(leaf.any() for leaf in leaves(first.state))
    assert all(leaf.any() for leaf in leaves(first.final_state))
    assert_equal(second.state, first.final_state)


def test_every_batch_uses_the_same_memory() -> None:
    sampler, _ = sampler_for(debug_envs.memory, T=3, B=2, model_memory="lstm")
    pointers = [leaf.data_ptr() for leaf in leaves(sampler.collect())]
    assert [leaf.data_ptr() for leaf in leaves(sampler.collect())] == pointers


def test_shapes_and_types_of_a_batch() -> None:
    sampler, _ = sampler_for(debug_envs.identity, T=5, B=3, action="dict")
    samples = sampler.collect()
    assert sampler.batch_spec == BatchSpec(5, 3)
    assert samples.action["which"].shape == (5, 3)
    assert samples.action["level"].shape == (5, 3, 1)
    assert samples.action["level"].dtype == torch.float32
    assert samples.inputs.first.shape == (6, 3)
    assert samples.reward.dtype == torch.float32
    assert samples.valid.dtype == samples.terminated.dtype == samples.truncated.dtype == torch.bool
    assert samples.state == samples.final_state == ()


def test_box_actions_are_stored_as_sampled_and_clipped_only_for_the_environment() -> None:
    sampler, agent = sampler_for(debug_envs.identity, T=30, B=2, action="box", model_log_std=1.0)
    samples = sampler.collect()
    assert samples.action.abs().max() > 1
    executed = 3 * samples.action.clamp(-1, 1) + 1  # in [-2, 4]
    distance = (executed - samples.observation)[..., 0].abs() / 6
    expected = (1 - 2 * distance).clamp(min=0).where(samples.valid, 0)  # the reward of Identity
    torch.testing.assert_close(samples.reward, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        params = agent(samples.inputs[:-1], ())[0]
    expected = agent.distribution.log_prob(params, samples.action)
    torch.testing.assert_close(samples.info.log_prob, expected, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]


class Pixels(gymnasium.Env):
    """An image whose pixels are the number of the step."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)
        self.action_space = spaces.Discrete(2)
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros((8, 8, 3), np.uint8), {}

    def step(self, action: int) -> Any:
        self.time += 1
        return np.full((8, 8, 3), self.time, np.uint8), 0.0, False, False, {}


def test_pictures_are_stored_as_bytes_once_a_row() -> None:
    sampler, _ = sampler_for(Pixels, T=4, B=2)
    observation = sampler.collect().inputs.observation
    assert observation.dtype == torch.uint8
    assert observation[:, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
