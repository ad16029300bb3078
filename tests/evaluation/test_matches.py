"""Runs and functions play each other: who wins, from which seat, and what is refused."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces

from rlframe import launch
from rlframe.core.errors import ConfigError, PartError
from rlframe.core.multi_agent import PolicyMap
from rlframe.deploy.load import load_policy, load_trained
from rlframe.envs import EnvConfig
from rlframe.evaluate import main
from rlframe.evaluation.evaluator import EvalConfig, EvaluationStopped
from rlframe.evaluation.match_evaluator import MatchEvaluator
from rlframe.evaluation.matches import FunctionPlayer, Pair, PolicyPlayer, Table, ratings
from tests.envs.rock_paper_scissors import RockPaperScissors, always_paper, always_rock
from tests.runners.resumed import words
from tests.runners.resumed_cases import ON_POLICY, PPO, ROUNDS
from tests.tables import read_csv

PAPER, ROCK = (f"tests.envs.rock_paper_scissors:{each.__name__}" for each in (always_paper, always_rock))
ONE_PLY = "rlframe.envs.debug_players:connect_four_one_ply"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two short runs of the same game, and one in which more is seen."""
    folder = tmp_path_factory.mktemp("runs")
    found = []
    for name, changed in (("one", "seed=0"), ("two", "seed=1"), ("other", "env_kwargs.n_seen=6")):
        assert launch.main(words(f"{PPO} {ROUNDS} {ON_POLICY} {changed}", folder / name)) == 0
        found.append(str(folder / name / "run_0"))
    return found


def test_paper_beats_rock_from_every_seat_and_seats_alternate() -> None:
    seats: list[tuple[str, str]] = []

    class Watched(FunctionPlayer):
        def act(self, agent: str, *rest: Any) -> Any:
            seats.append((self.name, agent))
            return super().act(agent, *rest)

    config = EnvConfig("tests.envs.rock_paper_scissors:RockPaperScissors", {"rounds": 1}, policies=PolicyMap())
    with closing(Table(config)) as table:
        pair = table.play(Watched(PAPER), Watched(ROCK), n_games=4, seed=0)
    assert (pair.won, pair.drawn, pair.lost) == (4, 0, 0)
    assert pair.returns == (4.0, -4.0)
    assert [agent for name, agent in seats if name == PAPER] == ["left", "right", "right", "left"]


def test_a_policy_that_sees_which_agent_it_is_plays_as_in_training(tmp_path: Path) -> None:
    assert launch.main(words(f"{PPO} {ROUNDS} {ON_POLICY} agents.agent_id=true", tmp_path)) == 0
    assert main([str(tmp_path / "run_0"), PAPER, "n_episodes=2", "trust=true"]) == 0


def in_turn(agent: str, episode: int) -> str:
    """Red and blue change sides in every episode."""
    return "red" if (agent == "left") == (episode % 2 == 0) else "blue"


def test_policies_of_a_function_alone_play_load_and_start_other_runs(tmp_path: Path) -> None:
    case = f"{PPO} {ROUNDS} {ON_POLICY} agents.map=tests.evaluation.test_matches:in_turn"
    assert launch.main(words(case, tmp_path / "one")) == 0
    run = tmp_path / "one" / "run_0"
    trained = load_trained(run, trust=True)
    player = PolicyPlayer("it", trained.agent, (trained.observation_space, trained.action_space), trained.env.policies)
    for episode, left in enumerate(("red", "blue", "red")):
        player.start(np.random.default_rng(0), episode)
        assert player._policy_of("left") is player._agents[left]
    assert main([str(run), PAPER, "n_episodes=2", "trust=true"]) == 0
    assert load_policy(run, trust=True, name="blue").act(np.zeros(4, np.float32)).shape == ()
    assert launch.main(words(f"{PPO} {ROUNDS} {ON_POLICY} init={run}:blue", tmp_path / "two")) == 0


class Alone(RockPaperScissors):
    """One agent, and nobody to play with."""

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["left"]


def test_a_game_needs_two_agents() -> None:
    with pytest.raises(ConfigError, match=r"at least 2 agents, and .*Alone has left alone"):
        Table(EnvConfig("tests.evaluation.test_matches:Alone", policies=PolicyMap()))


def test_a_game_without_an_end_is_cut_with_a_warning_and_counts_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    config = EnvConfig("tests.envs.rock_paper_scissors:RockPaperScissors", {"rounds": 10**9}, policies=PolicyMap())
    with closing(Table(config, max_length=5)) as table:
        pair = table.play(FunctionPlayer(PAPER), FunctionPlayer(ROCK), n_games=2, seed=0)
    assert (pair.won, pair.returns) == (2, (10.0, -10.0))
    assert "ran 5 steps without an end: it counts as it is; set a time limit" in caplog.text


def test_a_table_of_results_gives_ratings_of_all_players() -> None:
    pairs = [Pair("a", "b", won=3, drawn=0, lost=1), Pair("b", "c", won=2, drawn=4, lost=2)]
    found = ratings(pairs)
    assert list(found) == ["a", "b", "c"] or list(found) == ["a", "c", "b"]
    assert found["a"][0] - found["b"][0] == pytest.approx(400 * np.log10(7 / 3), abs=0.1)
    assert found["b"][0] == pytest.approx(found["c"][0], abs=0.1)
    assert found["b"][1] == (1 + 4) / 12


def test_evaluate_prints_the_table_of_two_runs_and_a_player(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pairs.json"
    assert main([*runs[:2], PAPER, "n_episodes=6", "trust=true", f"out={out}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(k for k, line in enumerate(lines) if line.split()[:3] == ["player", "against", "games"])
    assert [line.split()[:3] for line in lines[head + 1 : head + 4]] == [
        [*runs[:2], "6"],
        [runs[0], PAPER, "6"],
        [runs[1], PAPER, "6"],
    ]
    assert lines[head + 5].split() == ["player", "Elo", "score"]
    assert len(lines) == head + 9
    found = json.loads(out.read_text())
    assert [row["won"] + row["drawn"] + row["lost"] for row in found["pairs"]] == [6, 6, 6]
    assert sum(found["elo"].values()) == pytest.approx(0, abs=1e-6)


def test_matches_are_the_same_again_with_the_same_seed(runs: list[str], tmp_path: Path) -> None:
    for name, seed in (("first", 1), ("same", 1), ("other", 2)):
        words = ["n_episodes=20", f"seed={seed}", "trust=true", f"out={tmp_path / name}.json"]
        assert main([*runs[:2], *words]) == 0
    first, same, other = ((tmp_path / f"{name}.json").read_text() for name in ("first", "same", "other"))
    assert first == same != other


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["{0}", "{2}"], "agent left: policy shared of {2} is for observations"),
        (["{0}", "{1}", "n_envs=4"], "n_envs has no meaning in matches"),
        (["{0}", "{0}"], "given twice"),
        (["{0}", "random", "n_episodes=0"], "n_episodes=0 must be at least 1"),
        (["random", "tests.envs.rock_paper_scissors:always_rock"], "none of"),
        (["{0}", "tests.envs.rock_paper_scissors:nobody"], "has no nobody"),
    ],
)
def test_what_cannot_play_is_refused_in_one_line(
    given: list[str], said: str, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*(word.format(*runs) for word in given), "trust=true"]) == 2
    error = capsys.readouterr().err
    assert said.format(*runs) in error
    assert error.count("\n") == 1


def test_training_logs_how_often_it_wins_against_players(tmp_path: Path) -> None:
    case = f"{PPO} {ROUNDS} {ON_POLICY} eval.opponents=[random,{PAPER}]".replace("n_episodes=1", "n_episodes=2")
    assert launch.main(words(case, tmp_path)) == 0
    rows = read_csv(tmp_path / "run_0" / "progress.csv")[1]
    assert all(float(rows[-1][f"eval/win_rate_{name}"]) in (0, 0.5, 1) for name in ("random", "always_paper"))
    assert float(rows[-1]["eval/n_episodes"]) == 4


def test_the_win_rate_is_the_share_of_games_that_the_agent_wins(runs: list[str]) -> None:
    trained = load_trained(Path(runs[0]), trust=True)
    for policy in trained.agent.agents().values():
        head = policy.model.policy_head  # type: ignore[union-attr]
        head.weight.data.zero_()  # type: ignore[union-attr]
        head.bias.data[:] = torch.tensor([0.0, 9.0, 0.0])  # type: ignore[union-attr]  # paper
    spaces = trained.observation_space, trained.action_space
    config = EvalConfig(opponents=(ROCK, PAPER), n_episodes=2)
    with closing(MatchEvaluator(trained.env, trained.agent, spaces, config)) as evaluator:
        found = evaluator.evaluate(0)
    assert (found["eval/win_rate_always_rock"], found["eval/win_rate_always_paper"]) == (1, 0)
    assert (found["eval/return_mean"], found["eval/n_episodes"]) == (2, 4), "4 a game of 4 rounds against rock"


def test_each_step_of_a_match_shows_progress_and_may_be_the_last(runs: list[str]) -> None:
    trained, heartbeat = load_trained(Path(runs[0]), trust=True), np.zeros(1, np.int64)
    spaces = trained.observation_space, trained.action_space
    config = EvalConfig(opponents=("random", PAPER), n_episodes=2)
    with closing(MatchEvaluator(trained.env, trained.agent, spaces, config)) as evaluator:
        evaluator.set_heartbeat(heartbeat)
        evaluator.evaluate(0)
        n_steps = int(heartbeat[0])
        assert n_steps == 2 * 2 * 4  # rounds
        with pytest.raises(EvaluationStopped):
            evaluator.evaluate(0, stop=lambda: heartbeat[0] > n_steps + 1)
        assert heartbeat[0] == n_steps + 2


def test_one_ply_wins_if_it_can_and_else_blocks() -> None:
    """Of both with three in a row, it completes its own; without them it prevents the other's."""
    from rlframe.envs.debug_players import connect_four_one_ply

    board = np.zeros((6, 7, 2), np.int8)
    board[5, :3, 1] = 1
    rng, mask = np.random.default_rng(0), np.ones(7, np.int8)
    assert connect_four_one_ply({"observation": board, "action_mask": mask}, None, rng) == 3  # type: ignore[arg-type]
    board[3:, 6, 0] = 1
    assert connect_four_one_ply({"observation": board, "action_mask": mask}, None, rng) == 6  # type: ignore[arg-type]
    with closing(Table(EnvConfig("classic/connect_four-v3", policies=PolicyMap()))) as table:
        pair = table.play(FunctionPlayer(ONE_PLY), FunctionPlayer("random"), n_games=10, seed=0)
    assert pair.won >= 9


def sizes_of(space: Any) -> Any:
    return np.array(space.n if isinstance(space, spaces.Discrete) else space.nvec)


def last_of_each(observation: Any, action_space: Space, rng: np.random.Generator) -> Any:
    return action_space.start + sizes_of(action_space) - 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("space", [spaces.Discrete(3, start=5), spaces.MultiDiscrete([2, 3], start=[1, 0])])
def test_an_action_that_the_mask_forbids_ends_the_match_and_names_the_player(space: Space) -> None:
    player = FunctionPlayer(f"{__name__}:last_of_each")
    player.start(np.random.default_rng(0), 0)
    n = int(sizes_of(space).sum())
    seen = spaces.Dict({"x": spaces.Box(0, 1, (1,)), "action_mask": spaces.MultiBinary(n)})
    mask = np.ones((1, n), np.int8)
    row = {"observation": {"x": np.zeros((1, 1)), "action_mask": mask}}
    assert space.contains(player.act("left", row, seen, space)[0])
    mask[0, -1] = 0
    with pytest.raises(PartError, match=r"player .*last_of_each: .* for agent left is forbidden by its action_mask"):
        player.act("left", row, seen, space)
