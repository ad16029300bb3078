"""Self-play in a league: who is drawn, which games count, what stays as it was, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import chz
import pytest
import torch
from torch import nn

from rlframe import launch
from rlframe.core.types import Trajectory
from rlframe.record.snapshot import load_snapshot, resolve_snapshot
from rlframe.runners.league import League, LeagueConfig
from tests.runners.resumed import log, words
from tests.runners.resumed_cases import LEAGUE, ON_POLICY, PPO, ROUNDS

CASE = f"{PPO} {ROUNDS} {LEAGUE} {ON_POLICY}"


def league(n: int = 2, **changed: Any) -> League:
    """A league at its start, of networks with one weight, which is 0."""
    agents: list[Any] = [nn.Linear(1, 1, bias=False) for _ in range(n + 1)]
    nn.init.zeros_(agents[0].weight)
    found = League(agents[0], agents[1:], chz.replace(LeagueConfig(opponents=n), **changed))
    found._runner = cast(Any, SimpleNamespace(env_steps=0))
    found.on_start(cast(Any, found._runner))
    return found


def batch(found: League, T: int, env_steps: int = 0, weight: float | None = None) -> None:
    """The league receives a batch; `weight`: of the learner at that time."""
    cast(Any, found._runner).env_steps = env_steps
    if weight is not None:
        nn.init.constant_(cast(Any, found._learner).weight, weight)
    found.on_batch(cast(Any, SimpleNamespace(reward=torch.zeros(T, 1))))


def game(found: League, slot: int, own: float, other: float, age: int) -> None:
    """The learner's episode against an opponent ends with these returns."""
    returns = {"episode/shared/return": own, f"episode/opponent_{slot}/return": other}
    found.on_episode(Trajectory(own + other, 3, True, 0, diagnostics=returns, age=age))


def opponent_weights(found: League) -> list[float]:
    return [cast(Any, agent).weight.item() for agent in found._opponents]


def test_elo_and_win_rate_follow_the_results() -> None:
    found = league()
    batch(found, T=8)
    game(found, 0, 1, -1, age=8)
    assert found.elo == 8  # 16 (1 - 1/2)
    assert found.past[0].elo == 0, "a past snapshot keeps its rating"
    assert found.past[0].win_rate == 0.75  # as if one drawn game had been before
    game(found, 1, -1, 1, age=2)
    assert found.elo == pytest.approx(8 - 16 / (1 + 10 ** (-8 / 400)))
    assert found.past[0].win_rate == pytest.approx(0.5)
    game(found, 1, 0, 0, age=2)
    assert found.past[0].win_rate == pytest.approx(0.5)
    assert found.n_games == 3


def test_a_game_counts_only_if_its_opponent_was_the_same_from_start_to_end() -> None:
    found = league(n=1, games=1, interval_steps=10, draw="latest")
    batch(found, T=8, env_steps=10, weight=1.0)
    game(found, 0, 1, -1, age=8)
    assert found.n_games == 1
    batch(found, T=8, env_steps=18)  # the opponent has played its game: the newest snapshot comes
    assert opponent_weights(found) == [1.0]
    game(found, 0, 1, -1, age=16)  # of the batch before
    assert found.n_games == 2
    assert found.past[0].n_games == 2
    batch(found, T=8, env_steps=19)
    game(found, 0, 1, -1, age=9)
    assert found.n_games == 2, "it began against another opponent"
    game(found, 0, 1, -1, age=8)
    assert found.past[1].n_games == 1


def test_self_play_is_no_game_of_the_league() -> None:
    found = league()
    batch(found, T=8)
    found.on_episode(Trajectory(0.0, 3, True, 0, diagnostics={"episode/shared/return": 0.0}, age=3))
    assert found.n_games == 0


def test_past_weights_stay_while_the_learner_changes_and_the_oldest_are_dropped() -> None:
    found = league(n=1, interval_steps=10, size=2)
    for k in range(1, 5):
        batch(found, T=1, env_steps=10 * k, weight=float(k))
    assert [past.weights["weight"].item() for past in found.past] == [0.0, 4.0], "the first one plays, and stays"
    assert opponent_weights(found) == [0.0]


@pytest.mark.parametrize(("draw", "drawn"), [("latest", {2}), ("uniform", {0, 1, 2}), ("pfsp", {0, 2})])
def test_opponents_are_drawn_as_the_config_says(draw: str, drawn: set[int]) -> None:
    found = league(n=1, interval_steps=10, draw=draw)
    for k in (1, 2):
        batch(found, T=1, env_steps=10 * k)
    for past, rate in zip(found.past, (0.5, 1.0, 0.5), strict=True):
        past.win_rate = rate
    assert {found._draw().number for _ in range(64)} == drawn


def test_a_run_keeps_past_weights_as_they_were_when_it_goes_on(tmp_path: Path) -> None:
    """The state of a longer run has the same first snapshots, bit for bit, and a learner that has changed since."""
    states = []
    for n_steps in (120, 240):
        case = CASE.replace("runner.n_steps=160", f"runner.n_steps={n_steps}")
        assert launch.main(words(case.replace("size=3", "size=9"), tmp_path / str(n_steps))) == 0
        states.append(load_snapshot(resolve_snapshot(tmp_path / str(n_steps) / "run_0"))[0])
    short, long = (state["callbacks"][0]["state"]["past"] for state in states)
    assert len(long) > len(short) >= 2
    for before, now in zip(short, long, strict=False):
        assert all(torch.equal(weights_of(now)[key], x) for key, x in weights_of(before).items())
    learner = states[1]["agent"]
    assert any(not torch.equal(torch.as_tensor(learner[key]), x) for key, x in weights_of(long[-1]).items())


def weights_of(past: Any) -> dict[str, torch.Tensor]:
    return {key: torch.as_tensor(x) for key, x in past["weights"].items()}


def test_a_state_that_was_saved_before_the_training_began_is_a_new_league_with_its_members() -> None:
    agents: list[Any] = [nn.Linear(1, 1) for _ in range(3)]
    new = League(agents[0], agents[1:], LeagueConfig(opponents=2), members=[agents[0].state_dict()])
    other = League(agents[0], agents[1:], LeagueConfig(opponents=2))  # a resumed run does not read them again
    other.load_state_dict(new.state_dict())
    other.on_start(cast(Any, SimpleNamespace(env_steps=0)))
    assert [past.number for past in other.past] == [-1, 0]
    assert [past.number for past in other.playing] == [0, 0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("env=CartPole-v1", "env=CartPole-v1 has one"),
        ("agents.policies.red.algo=dqn", "remove agents.policies"),
        ("runner=async_rl", "use runner=minibatch_rl_eval"),
        ("agents.league.size=2", "agents.league.size=2 must be above"),
        ("learners=2 eval.n_episodes=2 eval.n_envs=2", "needs world_size=1"),
    ],
)
def test_what_does_not_fit_a_league_is_refused(
    changed: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {word.partition("=")[0] for word in changed.split()}
    case = " ".join([*(word for word in CASE.split() if word.partition("=")[0] not in keys), changed])
    assert launch.main(words(case, tmp_path)) == 2
    assert said in capsys.readouterr().err


def test_a_member_of_other_spaces_is_refused_by_agent_and_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = f"{PPO} {ROUNDS} {ON_POLICY} env_kwargs.n_seen=6"
    assert launch.main(words(other, tmp_path / "other")) == 0
    capsys.readouterr()
    member = f"agents.league.members=[{tmp_path / 'other' / 'run_0'}]"
    assert launch.main(words(f"{CASE} {member}", tmp_path / "own")) == 2
    error = capsys.readouterr().err
    assert "policy opponent_0 of agent right" in error
    assert "another network" in error
    assert len([line for line in error.splitlines() if line.startswith("error:")]) == len(error.splitlines()) == 1
    same = words(f"{PPO} {ROUNDS} {ON_POLICY}", tmp_path / "same")
    assert launch.main(same) == 0
    member = f"agents.league.members=[{tmp_path / 'same' / 'run_0'}]"
    assert launch.main(words(f"{CASE} {member}", tmp_path / "own")) == 0


@pytest.mark.slow
def test_a_league_is_the_same_in_workers(tmp_path: Path) -> None:
    for name, sampler in (("serial", "serial"), ("cpu", "cpu sampler.n_workers=2")):
        assert launch.main(words(CASE.replace("sampler=serial", f"sampler={sampler}"), tmp_path / name)) == 0
    rows = [log(tmp_path / name / "run_0") for name in ("serial", "cpu")]
    for serial, cpu in zip(*rows, strict=True):
        assert {k: v for k, v in serial.items() if k.startswith(("league/", "episode/", "env_steps"))} == {
            k: v for k, v in cpu.items() if k.startswith(("league/", "episode/", "env_steps"))
        }
    assert float(rows[0][-1]["league/games"]) > 5


def rarely_blue(agent: str, episode: int) -> str:
    """A policy that plays one episode of nine, and none of most batches."""
    return "blue" if episode % 9 == 8 else "red"


@pytest.mark.parametrize("algo", ["ppo algo.epochs=2 algo.minibatches=2", "dqn algo.batch_size=4"])
def test_a_policy_survives_batches_in_which_it_has_no_row(algo: str, tmp_path: Path) -> None:
    blue = " ".join(f"agents.policies.blue.{word}" for word in f"algo={algo}".split())
    red = "agents.policies.red.algo=ppo agents.policies.red.algo.epochs=1 agents.policies.red.algo.minibatches=1"
    policies = f"{red} {blue} agents.map=tests.runners.test_league:rarely_blue"
    case = f"{PPO} {ROUNDS} {ON_POLICY} {policies}".replace("batch_T=16", "batch_T=8").replace("batch_B=4", "batch_B=1")
    if algo.startswith("dqn"):
        case += " agents.policies.blue.algo.learning_starts=4 agents.policies.blue.algo.replay.size=100"
    assert launch.main(words(case, tmp_path)) == 0
    state = load_snapshot(resolve_snapshot(tmp_path / "run_0"))[0]
    assert state["algo/blue"]["progress"]["agent_steps"] > 0
    for name in ("red", "blue"):
        assert all(torch.isfinite(torch.as_tensor(x)).all() for x in state[f"agent/{name}"].values())
