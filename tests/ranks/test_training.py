"""Two ranks learn the same as one rank with twice the environments, and agree on everything they share."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.system.distributed import launch_ranks
from tests.fork_server import run_python
from tests.processes import DEADLINE_S
from tests.ranks import jobs
from tests.ranks.forked import forking_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of jobs.everything, of each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    with forking_ranks():
        launch_ranks(partial(jobs.everything, folder=folder), 2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_is_done_waits_for_the_others(tmp_path: Path) -> None:
    assert launch_ranks(partial(jobs.leaving, worked=tmp_path / "worked"), 2)


@pytest.mark.parametrize("name", jobs.ON_POLICY)
def test_two_ranks_of_4_environments_learn_what_one_rank_of_8_does(results: list[dict[str, Any]], name: str) -> None:
    config, n_updates, model = jobs.ON_POLICY[name]
    alone = jobs.on_policy(config, 8, n_updates, model)
    of_ranks = [of_rank["on policy"][name] for of_rank in results]
    assert of_ranks[0]["n_valid"] != of_ranks[1]["n_valid"]  # so a mean of the ranks' means would not do
    assert alone["n_valid"] == [a + b for a, b in zip(*(each["n_valid"] for each in of_ranks), strict=True)]
    for each in of_ranks:
        assert each["env_steps"] == alone["env_steps"]
        for parameter, value in alone["parameters"].items():
            torch.testing.assert_close(each["parameters"][parameter], value, rtol=0.0, atol=1e-5)


def test_two_ranks_normalize_rewards_as_one_with_all_environments_does(results: list[dict[str, Any]]) -> None:
    one, two = (of_rank["normalized"] for of_rank in results)
    alone = jobs.normalized(4)
    assert one["statistics"] == two["statistics"] == pytest.approx(alone["statistics"], rel=1e-12)
    torch.testing.assert_close(torch.cat([one["reward"], two["reward"]], 1), alone["reward"], rtol=1e-6, atol=0.0)


def test_two_ranks_learn_the_bonus_that_one_with_all_environments_does(results: list[dict[str, Any]]) -> None:
    one, two = (of_rank["curious"] for of_rank in results)
    for name, value in jobs.curious(4).items():
        assert torch.equal(one[name], two[name]), name
        torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", jobs.ALGOS)
def test_replay_algorithms_make_the_same_updates_on_every_rank(results: list[dict[str, Any]], name: str) -> None:
    one, two = (of_rank["off policy"][name] for of_rank in results)
    assert one["due"] == two["due"]
    assert one["updates"] == two["updates"] == sum(one["due"]) > 10
    assert one["env_steps"] == two["env_steps"] == one["n_valid"] + two["n_valid"]
    batch = jobs.ALGOS[name][2]
    rows = 2 * batch["batch_size"] * batch.get("learn_T", 1)  # of an update, on both ranks
    owed = jobs.RATIO * (one["env_steps"] - jobs.LEARN_FROM)
    assert owed - rows < one["updates"] * rows <= owed
    assert one["ratio"] == two["ratio"] == one["updates"] * rows / (one["env_steps"] - jobs.LEARN_FROM)


@pytest.mark.parametrize("name", jobs.ALGOS)
def test_each_rank_keeps_its_own_rows_and_learns_with_all_networks(results: list[dict[str, Any]], name: str) -> None:
    for of_rank in results:
        found = of_rank["off policy"][name]
        assert found["rows"] == found["n_valid"]
        assert found["n_learned"] == {"dqn": 8, "r2d1": 14, "ddpg": 8, "td3": 8, "sac": 9}[name]


@pytest.mark.parametrize("name", ["dqn", "r2d1"])
def test_the_epsilon_ladder_goes_over_the_environments_of_all_ranks(results: list[dict[str, Any]], name: str) -> None:
    assert [of_rank["off policy"][name]["envs"] for of_rank in results] == [[0, 1], [2, 3]]
    assert [of_rank["off policy"][name]["last_env"] for of_rank in results] == [3, 3]


@pytest.mark.parametrize("name", ["uneven", "with noise"])
def test_ranks_share_out_the_evaluation_that_one_rank_would_play(results: list[dict[str, Any]], name: str) -> None:
    alone = jobs.evaluated(jobs.EVALS[name])
    assert results[0]["evaluated"][name] == results[1]["evaluated"][name] == alone


def test_the_log_is_over_all_ranks(results: list[dict[str, Any]]) -> None:
    one, two = (of_rank["trained"] for of_rank in results)
    assert one["row"] == two["row"]
    assert one["row"]["env_steps"] >= 200
    assert one["row"]["eval/n_episodes"] == 2
    assert one["row"]["episode/count"] == one["n_episodes"] + two["n_episodes"]


def test_a_callback_of_one_rank_stops_all(results: list[dict[str, Any]]) -> None:
    one, two = (of_rank["stopped"] for of_rank in results)
    assert one["env_steps"] == two["env_steps"] <= 2 * 8 * 4
    assert one["row"]["env_steps"] == 0, "the last row is from before training"
    assert "eval/return_mean" not in one["row"]


def test_a_difference_on_one_rank_is_named(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        error = of_rank["trained"]["error"]
        assert "agent.model.actor.encoder" in error
        assert "on rank 1 differs from rank 0 (1 of" in error


@pytest.mark.parametrize("name", jobs.SKIPPED)
def test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_all(results: list[dict[str, Any]], name: str) -> None:
    of_ranks = [each["skipped"][name] for each in results]
    assert of_ranks[0]["skipped"] == of_ranks[1]["skipped"] >= 1
    assert of_ranks[0]["kept"] == of_ranks[1]["kept"]
    assert name == "sac" or all(of_ranks[0]["kept"]), "SAC's actor learns from the critics as they were"
    spread = "advantage" if name == "ppo" else "none of the batch's values"  # which PPO normalises over all ranks
    assert f"NaN or Inf in {spread}" in of_ranks[0]["told"]
    assert "reward" in of_ranks[1]["told"] or "return_" in of_ranks[1]["told"]


def test_every_kind_of_exchange(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        found = of_rank["exchanged"]
        assert found["sum"] == 1 + 2
        assert found["largest"] == -1
        assert found["total"].tolist() == [1 + 2, 0.5 + 0.5]
        assert found["stack"].tolist() == [[1], [2]]
        assert found["average"][0].tolist() == [[(1 * 1 + 3 * 2) / 4] * 2] * 2
        assert found["average"][1].tolist() == [(1 * 10 + 3 * 20) / 4]
        assert found["none"][0].tolist() == [0, 0, 0]
        assert found["gather"] == [{"rank": 0}, {"rank": 1}]
        assert found["broadcast"] == "of 0"
        assert found["every"] == (True, False)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        pytest.param("kill", "rank 1 (process ", marks=pytest.mark.slow),
        pytest.param("raise", "ValueError: bad luck", marks=pytest.mark.slow),
        pytest.param(
            "kill while rank 0 is busy",
            "or out of memory); resume from the last",
            marks=pytest.mark.slow,
        ),
        ("raise while rank 0 is busy", " failed: ValueError: bad luck; resume from the last snapshot"),
    ],
)
def test_a_rank_that_fails_ends_the_others_with_its_cause(how: str, says: str) -> None:
    start = time.monotonic()
    done = run_python(
        [sys.executable, "-m", "tests.ranks.jobs", how],
        cwd=ROOT,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert says in done.stderr
    assert time.monotonic() - start < DEADLINE_S
