"""Learners divide one run: what is learned is what one process learns, and nothing else of the run changes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.launch import main
from rlframe.record.snapshot import load_snapshot
from rlframe.system.distributed import launch_ranks
from tests.ranks import learners
from tests.ranks.forked import forking_ranks
from tests.tables import read_csv

SMALL = ["env=CartPole-v1", "env_backend=python", "sampler=serial", "model.hidden=16", "affinity=none"]
SMALL += ["sampler.batch_T=16", "runner.n_steps=384", "runner.log_interval_steps=128", "eval.n_episodes=2"]
PPO = ["algo=ppo", "algo.minibatches=1", "algo.epochs=2", *SMALL]
DQN = [
    "algo=dqn",
    "algo.learning_starts=64",
    "algo.batch_size=32",
    "algo.replay_ratio=8",
    "algo.replay.size=2000",
    *SMALL,
]

GROUPS = ["sampler=gpu", "sampler.n_workers=2", "sampler.n_groups=2"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `learners.job` found on each of two learners."""
    folder = tmp_path_factory.mktemp("learners")
    with forking_ranks():
        launch_ranks(partial(learners.job, folder=folder), 2, n_samplers=1)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", learners.SAME)
def test_two_learners_with_half_of_the_rows_each_learn_what_one_does(results: list[dict[str, Any]], name: str) -> None:
    alone = learners.trained(name)
    for of_rank in results:
        found = of_rank["trained"][name]
        assert found["counts"] == alone["counts"]
        assert found["counts"]["updates"] > 10
        torch.testing.assert_close(found["learned"], alone["learned"], rtol=0.0, atol=2e-5)
    assert results[0]["trained"][name]["counters"] == alone["counters"]


@pytest.mark.parametrize("name", [*learners.SAME, *learners.NOISY])
def test_learners_continue_exactly_from_a_state_between_two_updates(results: list[dict[str, Any]], name: str) -> None:
    for of_rank in results:
        found, uninterrupted = of_rank["resumed"][name], of_rank["trained"][name]
        assert found["counts"] == uninterrupted["counts"]
        torch.testing.assert_close(found["learned"], uninterrupted["learned"], rtol=0.0, atol=0.0)


@pytest.mark.usefixtures("forked_ranks")
def test_learners_of_batches_are_ranks_that_share_the_environments(tmp_path: Path) -> None:
    assert main([*PPO, "learners=2", "sampler.batch_B=8", f"log_dir={tmp_path / 'learners'}"]) == 0
    assert main([*PPO, "world_size=2", "sampler.batch_B=4", f"log_dir={tmp_path / 'ranks'}"]) == 0
    agents = [load_snapshot(tmp_path / name / "run_0")[0]["agent"] for name in ("learners", "ranks")]
    assert all((agents[0][name] == value).all() for name, value in agents[1].items())
    config = json.loads((tmp_path / "learners/run_0/params.json").read_text())["config"]
    assert [config[key] for key in ("learners", "world_size", "sampler.batch_B")] == [2, 1, 8]


@pytest.mark.usefixtures("forked_ranks")
def test_a_run_of_learners_is_one_run_with_its_files_and_is_resumed(tmp_path: Path) -> None:
    words = [*DQN, "learners=2", "sampler.batch_B=2", "env.normalize_reward=true", f"log_dir={tmp_path}"]
    assert main(words) == 0
    run = tmp_path / "run_0"
    rows = [row for row in read_csv(run / "progress.csv")[1] if row["env_steps"]]
    assert float(rows[-1]["replay/rows"]) == float(rows[-1]["env_steps"]) >= 384
    assert float(rows[-1]["replay/ratio"]) == pytest.approx(8.0, rel=0.1)
    assert main([f"resume={run}", "runner.n_steps=500"]) == 0
    assert float(read_csv(run / "progress.csv")[1][-1]["env_steps"]) >= 500


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*PPO, "learners=3", "sampler.batch_B=8", "eval.n_episodes=3"], "learners=3 must divide sampler.batch_B=8"),
        ([*DQN, "learners=2", "algo.batch_size=31"], "learners=2 must divide algo.batch_size=31"),
        ([*PPO, "learners=2", "world_size=2"], "learners=2 needs world_size=1, not 2"),
        ([*PPO, "learners=3"], "eval.n_episodes=2 must be at least learners=3"),
        ([*DQN, "learners=2", "runner=evolution"], "runner=evolution is for algo=es or ars"),
        ([*PPO, "learners=2", "affinity=1cpu"], "1 cores are too few for 2 ranks on this machine"),
        ([*PPO, "learners=0"], "learners=0 must be at least 1"),
        ([*PPO, "learners=2", "sampler=cpu", "sampler.n_workers=3"], "learners=2 must divide sampler.n_workers=3"),
        ([*PPO, *GROUPS, "learners=2"], "leave one for each of sampler.n_groups=2"),
        ([*PPO, "learners=auto", "sweep.seed=0,1"], "give a study learners=N"),
        ([*DQN, "learners=3", "sweep.seed=0,1", "eval.n_episodes=3"], "learners=3 must divide algo.batch_size=32"),
    ],
    ids=lambda words: words[-1] if isinstance(words, list) else "",
)
def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    given = {word.partition("=")[0]: word for word in [*words, f"log_dir={tmp_path}"]}
    assert main([*given.values()]) == 2
    assert says in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
