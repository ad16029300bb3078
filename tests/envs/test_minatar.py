"""MinAtar, where it is installed: its games by their ids, in every sampler, and resumed exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlframe import launch
from tests.envs.rows import made
from tests.runners.resumed import assert_resumed_exactly, log, words

pytest.importorskip("minatar")

GAMES = {"Breakout": (4, 3), "Freeway": (7, 3), "Asterix": (4, 5), "SpaceInvaders": (6, 4), "Seaquest": (10, 6)}
SMALL = "model.image_hidden=[8] eval.n_envs=1 eval.n_episodes=1 runner.log_interval_steps=80 runner.n_steps=160"
PQN = f"experiment=minatar/pqn_breakout {SMALL} algo.minibatches=2 sampler.batch_T=16 sampler.batch_B=4"
DQN = f"algo=dqn env=MinAtar/Asterix-v1 {SMALL} model.channels=[4] algo.learning_starts=20 algo.replay.size=300"
DQN += " algo.batch_size=8 sampler.batch_T=4 sampler.batch_B=2"


@pytest.mark.parametrize("game", GAMES)
def test_a_game_has_a_channel_for_each_kind_of_object_and_the_actions_that_it_uses(game: str) -> None:
    envs = made(f"MinAtar/{game}-v1", 2)
    n_channels, n_actions = GAMES[game]
    assert envs.observation_space.shape == (10, 10, n_channels)
    assert envs.action_space.n == n_actions  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("case", [PQN, DQN], ids=["pqn", "dqn"])
def test_a_resumed_run_equals_one_that_was_not_stopped(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_resumed_exactly(f"{case} sampler=serial", tmp_path, monkeypatch)


@pytest.mark.slow
def test_every_sampler_samples_the_same(tmp_path: Path) -> None:
    logs = []
    for name in ("serial", "cpu", "gpu"):
        workers = "" if name == "serial" else "sampler.n_workers=2 eval.n_workers=0"
        assert launch.main(words(f"{PQN} sampler={name} {workers}", tmp_path / name)) == 0
        logs.append(
            [{k: v for k, v in row.items() if k != "sampler/restarts"} for row in log(tmp_path / name / "run_0")]
        )
    assert logs[0] == logs[1] == logs[2]
