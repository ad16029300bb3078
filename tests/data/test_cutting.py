"""EpisodeCutter: batches of a sampler become the episodes that were played."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlframe.agents import Agent
from rlframe.algos import ppo, sac
from rlframe.core.spaces import action_decoder
from rlframe.core.struct import leaves
from rlframe.data.cutting import EpisodeCutter
from rlframe.data.episodes import (
    SAMPLED_ACTION,
    Episode,
    as_batches,
    canonical_actions,
    sampled_actions,
    sampled_numbers,
)
from rlframe.envs import EnvConfig, make_envs
from rlframe.models import ModelConfig
from rlframe.samplers import SerialSampler
from tests.data.episodes import CARTPOLE, NESTED, arrays, episodes


def played(env: str, config: ppo.Config | sac.Config, T: int) -> tuple[SerialSampler, Agent]:
    envs = make_envs(EnvConfig(env), 3, [0, 1, 2])
    agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 0)
    return SerialSampler(envs, agent, T), agent


def test_the_episodes_of_batches_are_those_that_were_played() -> None:
    sampler, _ = played("CartPole-v1", ppo.Config(), 16)
    cutter, found, trajectories = EpisodeCutter(*CARTPOLE), [], []
    for _ in range(20):
        found += cutter.add(sampler.collect())
        trajectories += sampler.trajectories()
    sampler.close()
    assert len(found) == len(trajectories) > 10
    for env in range(3):
        own = [episode for b, episode in found if b == env]
        assert [len(each) for each in own] == [t.length for t in trajectories if t.env == env]
        assert all(each.terminated[-1] and not each.terminated[:-1].any() for each in own)
    assert cutter.n_dropped == 0
    (_, episode), *_ = found
    assert episode.observation.shape == (len(episode) + 1, 4)
    step = episode.observation[1:, 0] - episode.observation[:-1, 0]  # position moves by 0.02 times the velocity
    np.testing.assert_allclose(step, 0.02 * episode.observation[:-1, 1], atol=1e-6)


def test_a_cutter_goes_on_from_its_state_and_drops_what_is_interrupted() -> None:
    sampler, _ = played("CartPole-v1", ppo.Config(), 8)
    one, other = EpisodeCutter(*CARTPOLE), EpisodeCutter(*CARTPOLE)
    for _ in range(5):
        one.add(sampler.collect())
    other.load_state_dict(one.state_dict())
    batch = sampler.collect()
    expected, found = one.add(batch), other.add(batch)
    assert len(expected) == len(found)
    for (b, x), (c, y) in zip(expected, found, strict=True):
        assert b == c
        assert all(map(np.array_equal, arrays(x), arrays(y)))
    running = len(one._open)
    sampler.collect()  # a batch is lost
    one.add(sampler.collect())
    assert one.n_dropped == running > 0
    sampler.close()


def test_an_episode_that_began_before_the_recording_is_left_out() -> None:
    sampler, _ = played("CartPole-v1", ppo.Config(), 6)
    sampler.collect()
    cutter, found = EpisodeCutter(*CARTPOLE), []
    for _ in range(30):
        found += cutter.add(sampler.collect())
    sampler.close()
    assert len(found) > 10
    assert cutter.n_dropped == 3
    assert all(np.abs(episode.observation[0]).max() <= 0.05 for _, episode in found), "as CartPole begins"


def test_random_steps_before_the_first_batch_are_in_no_episode() -> None:
    envs = make_envs(EnvConfig("CartPole-v1"), 3, [0, 1, 2])
    agent = ppo.Config().make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 0)
    sampler = SerialSampler(envs, agent, 6, decorrelation_steps=8)
    cutter, found, trajectories = EpisodeCutter(*CARTPOLE, decorrelated=True), [], []
    for _ in range(30):
        found += cutter.add(sampler.collect())
        trajectories += sampler.trajectories()
        state = cutter.state_dict()
        (cutter := EpisodeCutter(*CARTPOLE, decorrelated=True)).load_state_dict(state)
    sampler.close()
    assert sorted(len(episode) for _, episode in found) == sorted(each.length for each in trajectories)
    assert len(found) > 10
    assert cutter.n_dropped == 3
    assert all(np.abs(episode.observation[0]).max() <= 0.05 for _, episode in found), "as CartPole begins"


def test_actions_are_those_of_the_environment_and_come_back_canonical() -> None:
    sampler, _ = played("Pendulum-v1", sac.Config(), 201)
    box = spaces.Box(-2, 2, (1,))
    ((_, episode), *_) = EpisodeCutter(spaces.Box(-8, 8, (3,)), box).add(batch := sampler.collect())
    sampler.close()
    sampled = batch.action[:200, 0].numpy()
    assert np.array_equal(episode.action, action_decoder(box)(sampled))
    assert np.abs(episode.action).max() > 1
    assert np.array_equal(episode.info[SAMPLED_ACTION], sampled)
    np.testing.assert_allclose(canonical_actions(box, episode.action), sampled, atol=1e-7)
    assert episode.truncated[-1]
    assert not episode.terminated.any()


@pytest.mark.parametrize("kind", [spaces.Dict, spaces.Tuple])
def test_boxes_within_actions_come_back_as_they_were_drawn(kind: Any) -> None:
    parts = spaces.Box(-2, 2, (2, 1)), spaces.Discrete(3, start=1), spaces.Box(0, 1, (), np.float64)
    space = kind(dict(zip("abc", parts, strict=True)) if kind is spaces.Dict else parts)
    rng = np.random.default_rng(0)
    drawn = [
        rng.normal(0, 3, (5, 2, 1)).astype(np.float32),
        rng.integers(0, 3, 5),
        rng.normal(size=5).astype(np.float32),
    ]
    action = dict(zip("abc", drawn, strict=True)) if kind is spaces.Dict else tuple(drawn)
    numbers = sampled_numbers(space, action)
    assert numbers is not None
    assert numbers.shape == (5, 3)
    flags = np.zeros(5, np.bool_)
    executed = action_decoder(space)(action)
    episode = Episode(np.zeros((6, 1)), executed, np.zeros(5, np.float32), flags, flags, {SAMPLED_ACTION: numbers})
    for x, y in zip(leaves(sampled_actions(episode, space)), drawn, strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.allclose(leaves(canonical_actions(space, executed))[0], drawn[0]), "it was clipped"


def test_batches_of_episodes_have_their_rows_and_the_last_observation_as_a_row() -> None:
    given = episodes([3, 5, 2], NESTED, spaces.Discrete(3))
    batches = list(as_batches(iter(given), spaces.Discrete(3), T=4, whole=True))
    assert [batch.start for batch in batches] == [0, 4, 8, 12]
    assert sum(batch.n_env_steps for batch in batches) == 10
    valid = np.concatenate([batch.valid[:, 0] for batch in batches])
    assert "".join("x" if x else "." for x in valid) == "xxx.xxxxx.xx...."
    first = np.concatenate([batch.inputs.first[:4, 0] for batch in batches])
    assert np.flatnonzero(first).tolist() == [0, 4, 10]
    a = np.concatenate([batch.inputs.observation["a"][:4, 0] for batch in batches])
    assert np.array_equal(a[:13], np.concatenate([each.observation["a"] for each in given]))
    for batch, after in pairwise(batches):
        assert np.array_equal(batch.inputs.observation["a"][4], after.inputs.observation["a"][0])
    reward = np.concatenate([batch.reward[:, 0] for batch in batches])
    assert np.array_equal(reward[valid], np.concatenate([each.reward for each in given]))
