"""A population's episodes are the same in this process, in workers, after deaths, and after a stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.algos.es import Config
from rlframe.algos.evolution import Generation, population_of
from rlframe.core.struct import as_numpy, leaves
from rlframe.envs import EnvConfig
from rlframe.evaluation.evaluator import EvaluationStopped
from rlframe.evaluation.players import make_players
from rlframe.evaluation.population import PopulationSampler
from rlframe.models import ModelConfig
from rlframe.system.service import Supervision
from tests.envs.deadly import Deadly

D = 6
MODEL = ModelConfig(hidden=(8,), normalize_observation=True)


@contextmanager
def population(n_workers: int, max_length: int = 60, **kwargs: Any) -> Iterator[tuple[PopulationSampler, Generation]]:
    players = make_players(EnvConfig(Deadly, kwargs), 5, n_workers, (), Supervision())
    agent = Config().make_agent(players.observation_space, players.action_space, MODEL, 0)
    sampler = PopulationSampler(players, agent, D, max_length)
    try:
        yield sampler, population_of(agent, np.arange(D), 0.5, 3)
    finally:
        sampler.close()


def played(sampler: PopulationSampler, proposed: Generation) -> tuple[list[np.ndarray], Any]:
    sampler.propose(proposed)
    samples = sampler.collect()
    return [np.copy(as_numpy(x)) for x in leaves(samples)], sampler.trajectories()


def assert_same(one: tuple[list[np.ndarray], Any], other: tuple[list[np.ndarray], Any]) -> None:
    for a, b in zip(one[0], other[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert one[1] == other[1]


@pytest.fixture(scope="module")
def alone() -> tuple[list[np.ndarray], Any]:
    with population(0) as both:
        return played(*both)


def test_an_episode_is_a_row_and_its_pair_plays_the_same_one(alone: tuple[list[np.ndarray], Any]) -> None:
    episodes = alone[1]
    assert [episode.env for episode in episodes] == [*range(2 * D)]
    assert len({episode.return_ for episode in episodes}) > 3, "perturbed policies differ"
    assert all(episode.return_ == episode.length <= 60 and "angle" in episode.diagnostics for episode in episodes)
    assert all(episode.terminated == (episode.length < 60) for episode in episodes)
    with population(0) as (sampler, proposed):
        still = played(sampler, replace(proposed, noise_std=np.zeros(1, np.float32)))[1]
    assert [a.length for a in still[::2]] == [b.length for b in still[1::2]], "without noise a pair is equal"
    assert proposed.seeds.tolist() == [*range(D)]


def test_mirrored_policies_are_the_parameters_plus_and_minus_the_same_noise() -> None:
    with population(0) as (sampler, proposed):
        player, seen = sampler._players._player, []  # type: ignore[attr-defined]
        for column in (4, 5):
            player._perturb(proposed.numpy(), column)
            seen.append(player._policy.copy())
    np.testing.assert_allclose((seen[0] + seen[1]) / 2, as_numpy(proposed.policy), atol=1e-6)
    assert np.abs(seen[0] - seen[1]).mean() > 0.5


def test_workers_play_what_one_process_plays(alone: tuple[list[np.ndarray], Any]) -> None:
    with population(2) as both:
        assert_same(played(*both), alone)


def test_a_killed_worker_costs_its_episode_alone_which_is_played_again(
    alone: tuple[list[np.ndarray], Any], tmp_path: Path
) -> None:
    with population(2, path=str(tmp_path / "deaths"), times=3) as both:
        assert_same(played(*both), alone)
        assert both[0].counters()["sampler/restarts"] == 3


def stop_after(n: int) -> Callable[[], bool]:
    left = iter(range(n))
    return lambda: next(left, None) is None


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_stopped_generation_is_completed_after_a_resume(n_workers: int, alone: tuple[list[np.ndarray], Any]) -> None:
    with population(n_workers) as (sampler, proposed):
        sampler.propose(proposed, stop_after(9 if n_workers == 0 else 0))
        with pytest.raises(EvaluationStopped):
            sampler.collect()
        saved, kept = sampler.state_dict(), dict(sampler._played)
        assert_same(played(sampler, proposed), alone)
        assert all(sampler._played[column] is each for column, each in kept.items()), "none is played again"
    if n_workers == 0:
        assert 0 < len(saved["played"]) < 2 * D
    with population(2 - n_workers) as (sampler, proposed):
        sampler.load_state_dict(saved)
        loaded = dict(sampler._played)
        assert [*loaded] == [*kept]
        assert_same(played(sampler, proposed), alone)
        assert all(sampler._played[column] is each for column, each in loaded.items())


def test_statistics_are_those_of_observations_without_their_action_mask() -> None:
    players = make_players(EnvConfig("rlframe.envs.debug_envs:Masked", {"size": 2}), 5, 0, (), Supervision())
    agent = Config().make_agent(players.observation_space, players.action_space, MODEL, 0)
    sampler = PopulationSampler(players, agent, 1, 3)
    sampler.propose(population_of(agent, np.arange(1), 0.5, 0))
    (moments,) = sampler.collect().info.moments  # type: ignore[attr-defined]
    sampler.close()
    assert moments.shape == (1, 2, 3, 4), "number, mean and variance of the four cells"
    np.testing.assert_allclose(moments[0, :, 1].sum(-1), 1.0, err_msg="the cell is one-hot")
