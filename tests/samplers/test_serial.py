"""SerialSampler: episodes, lives, decorrelation, determinism and resuming."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.core.seeding import Role, env_seeds, generator
from rlframe.core.struct import Tree
from rlframe.core.types import Trajectory
from rlframe.envs import Envs, EnvStep, debug_envs
from rlframe.samplers import SerialSampler
from tests.samplers.made import agent_for, assert_equal, copied, differ, sampler_for


def test_an_episode_is_reported_once_at_its_end() -> None:
    sampler, _ = sampler_for(debug_envs.time_limit, T=4, B=2, length=6, ends="terminated")
    sampler.collect()
    assert sampler.trajectories() == []
    sampler.collect()
    assert sampler.trajectories() == [Trajectory(6.0, 6, True, env, {}, 6.0, 6) for env in range(2)]
    assert sampler.trajectories() == []


def test_episodes_in_a_row_are_scored_apart() -> None:
    sampler, _ = sampler_for(debug_envs.time_limit, T=20, B=1, length=3, ends="truncated")
    sampler.collect()
    assert sampler.trajectories() == [Trajectory(3.0, 3, False, 0, {}, 3.0, 3)] * 5  # 3 steps and the row of the end


class Lives(Envs):
    """Two lives of 2 steps each in a game of score 10 a step, learned from as reward 1."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 9, (1,), np.float32), spaces.Discrete(2)
        self.n, self.backend, self.time = 1, "test", 0

    def reset(self, out: EnvStep, round_: int = 0) -> None:
        self.time = 0
        out.observation[...] = 0
        out.first[...] = True

    def step(self, action: Tree, out: EnvStep) -> None:
        resets = self.time == 4
        self.time = 0 if resets else self.time + 1
        out.observation[...] = self.time
        out.valid[...], out.raw_reward[...], out.reward[...] = not resets, 10.0 * (not resets), 1.0 * (not resets)
        out.terminated[...] = self.time in (2, 4)
        out.ended[...] = self.time == 4
        out.truncated[...] = False
        out.first[...] = resets or self.time == 2

    def pop_diagnostics(self, index: int) -> dict[str, float]:
        return {"bonus": 2.0}

    def frame(self, index: int) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None: ...


def test_a_lost_life_terminates_for_learning_and_the_game_continues() -> None:
    envs = Lives()
    sampler = SerialSampler(envs, agent_for(envs.observation_space, envs.action_space), 6)
    samples = sampler.collect()
    assert samples.inputs.observation[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert samples.inputs.first[:, 0].int().tolist() == [1, 0, 1, 0, 0, 1, 0]
    assert samples.terminated[:, 0].int().tolist() == [0, 1, 0, 1, 0, 0]
    assert samples.valid[:, 0].int().tolist() == [1, 1, 1, 1, 0, 1]
    assert samples.reward[:, 0].tolist() == [1, 1, 1, 1, 0, 1]
    game = Trajectory(40.0, 4, True, 0, {"bonus": 2.0}, 40.0, 4)
    assert sampler.trajectories() == [game], "the whole game, by its own score"


def batches(n: int = 3, **kwargs: Any) -> list[Any]:
    sampler, _ = sampler_for(**kwargs)
    return [copied(sampler.collect()) for _ in range(n)]


@pytest.mark.parametrize("model", [{}, {"model_memory": "lstm", "model_feed_back": True}])
@pytest.mark.parametrize("env", [debug_envs.memory, "Pendulum-v1"])
def test_a_seed_determines_the_samples(env: Any, model: dict[str, Any]) -> None:
    one, same, other = (batches(env=env, seed=seed, **model) for seed in (3, 3, 4))
    for a, b in zip(one, same, strict=True):
        assert_equal(a, b)
    assert differ([s.inputs.observation for s in one][-1], [s.inputs.observation for s in other][-1])
    assert differ(one[-1].action, other[-1].action)


def test_environments_of_a_batch_have_different_noise_and_seeds() -> None:
    samples = batches(1, env="Pendulum-v1", T=4, B=3)[0]
    assert len(set(samples.inputs.observation[0, :, 0].tolist())) == 3
    assert len(set(samples.action[0, :, 0].tolist())) == 3


def test_noise_of_an_environment_does_not_depend_on_the_size_of_the_batch() -> None:
    small, large = (batches(1, env="Pendulum-v1", T=4, B=B)[0] for B in (2, 5))
    torch.testing.assert_close(large.action[:, :2], small.action, rtol=0, atol=1e-6)


def test_noise_comes_from_the_stream_of_its_role_and_environment() -> None:
    sampler, _ = sampler_for(debug_envs.memory, T=3, B=2, seed=11)
    assert [rng.random() for rng in sampler.rngs] == [generator(11, Role.NOISE, env).random() for env in range(2)]
    assert not set(env_seeds(11, Role.ENV, 8)) & set(env_seeds(11, Role.EVAL_ENV, 8))


def test_decorrelation_takes_random_steps_and_sets_first() -> None:
    plain, _ = sampler_for("Pendulum-v1", T=2, B=2)
    moved, _ = sampler_for("Pendulum-v1", T=2, B=2, decorrelation_steps=5)
    samples = moved.collect()
    assert samples.inputs.first[0].all()
    assert not samples.inputs.first[1].any()
    assert differ(samples.inputs.observation[0], plain.collect().inputs.observation[0])


def test_episodes_with_random_steps_are_not_reported() -> None:
    sampler, _ = sampler_for(debug_envs.time_limit, T=4, B=1, decorrelation_steps=9, length=4, ends="truncated")
    assert sampler.collect().truncated.any()
    assert sampler.trajectories() == []


def test_a_sampler_may_be_closed_twice() -> None:
    sampler, _ = sampler_for(debug_envs.memory, T=2, B=1)
    sampler.close()
    sampler.close()
