"""When runners evaluate: intervals, another process, a function of the user's; and what is recorded of it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlframe import launch
from rlframe.core.ranks import SingleRank
from rlframe.core.types import Trajectory
from rlframe.evaluation.evaluator import BaseEvaluator, EvaluationStopped, NoEvaluator
from rlframe.evaluation.schedule import EvaluationSchedule
from rlframe.record.snapshot import read_meta, resolve_snapshot
from rlframe.runners import Callback, Runner
from tests.evaluation.killing import kill_evaluations, stop_while_evaluating
from tests.runners.resumed import TRUST, assert_runs_equal, stopped_at, words
from tests.tables import read_csv
from tests.variants import variants

CASE = "env=CartPole-v1 algo=ppo algo.epochs=2 algo.minibatches=2 model.hidden=[8] sampler=serial sampler.batch_T=16 "
CASE += "sampler.batch_B=4 runner.n_steps=480 runner.log_interval_steps=120 "
CASE += "eval.n_episodes=2 eval.n_envs=2 eval.n_workers=0"
HERE = "tests.evaluation.test_schedule"


def trained(directory: Path, *changed: str) -> Path:
    given = dict(word.split("=", 1) for word in [*CASE.split(), *changed])
    assert launch.main(words(" ".join(f"{key}={value}" for key, value in given.items()), directory)) == 0
    return directory / "run_0"


def rows(run: Path) -> list[dict[str, str]]:
    return read_csv(run / "progress.csv")[1]


def scores(run: Path) -> dict[int, str]:
    """Scores by env_steps; each env_steps has one."""
    found = [(int(row["env_steps"]), row["eval/return_mean"]) for row in rows(run) if row["eval/return_mean"]]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.slow
def test_evaluation_has_an_interval_of_its_own(tmp_path: Path) -> None:
    each = scores(trained(tmp_path / "each"))
    rare = scores(trained(tmp_path / "rare", "eval.interval_steps=240"))
    often = trained(tmp_path / "often", "eval.interval_steps=60")
    last = scores(trained(tmp_path / "last", "eval.interval_steps=inf"))
    assert len(each) == 5
    assert [n // 240 for n in rare] == [0, 1, 2]
    assert list(last) == [max(each)]
    assert len(scores(often)) == len(rows(often)) > 7, "an evaluation makes a row"
    assert set(rare.items()) <= set(scores(often).items())
    assert set(last.items()) <= set(each.items()) <= set(scores(often).items()), "the same scores whatever the interval"


@pytest.mark.parametrize("runner", variants(("minibatch_rl_eval", "async_rl", "sync_rl"), ("async_rl",)))
def test_scores_of_another_process_are_those_of_this_one(runner: str, tmp_path: Path) -> None:
    changed = [f"runner={runner}", *(["runner.sampler_waits=true"] if runner == "async_rl" else [])]
    run = trained(tmp_path / "there", *changed, "eval.asynchronous=true")
    assert len(scores(run)) >= 2
    assert max(scores(run)) == max(int(row["env_steps"]) for row in rows(run)), "the last one is waited for"
    late = [row for row in rows(run) if row["eval/return_mean"]]
    assert all(not row["updates"] for row in late), "they are rows of their own"
    made = {row["env_steps"]: row["updates"] for row in rows(run) if row["updates"]}
    assert all(row["eval/updates"] == made[row["env_steps"]] for row in late), "of these parameters"
    if runner != "async_rl":  # which learns from other samples in each run
        assert scores(run).items() <= scores(trained(tmp_path / "here", *changed)).items()


@pytest.mark.slow
def test_a_run_with_asynchronous_evaluation_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scores(trained(tmp_path / "whole"))
    stopped_at(200, f"{CASE} eval.asynchronous=true", tmp_path / "stopped", monkeypatch)
    resumed = scores(tmp_path / "stopped/run_0")
    assert resumed.items() <= whole.items(), "those that are there are the same"
    assert max(resumed) == max(whole)


def test_the_process_of_evaluation_is_killed_three_times_and_the_run_goes_on_without_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = kill_evaluations(3, monkeypatch)
    run = trained(tmp_path / "killed", "eval.asynchronous=true")
    monkeypatch.undo()
    whole = trained(tmp_path / "whole")
    assert killed == [0] * 3
    assert 0 not in scores(run)
    assert scores(run).items() <= scores(whole).items()
    assert max(scores(run)) == max(scores(whole))
    assert [row["env_steps"] for row in rows(run) if row["updates"]] == [row["env_steps"] for row in rows(whole)]


def test_a_result_that_came_before_a_stop_is_logged_by_the_resumed_run() -> None:
    class Slow(BaseEvaluator):
        """Has a result, and then an evaluation that does not end."""

        interval_steps, results, busy = 0.0, [(100, {"eval/return_mean": 5.0})], False

        def evaluate(self, number: int, stop: Any = None) -> dict[str, float]:
            self.busy = True  # type: ignore[misc]
            return {}

        def finished(self, wait: bool, stop: Any = None) -> list[Any]:
            found, self.results = self.results, []
            return found

        def close(self) -> None: ...

    evaluations = EvaluationSchedule(Slow(), SingleRank(), 100)
    evaluations._started_updates, evaluations.updates = 7, 9
    with pytest.raises(EvaluationStopped):
        evaluations.make(200, 200, True, lambda: evaluations._evaluator.evaluate(200), lambda: True)  # type: ignore[union-attr]
    resumed = EvaluationSchedule(Slow(), SingleRank(), 100)
    resumed._evaluator.results = []  # type: ignore[union-attr]
    resumed.load_state_dict(evaluations.state_dict())
    assert resumed.make(150, 150, False, dict, lambda: False)[1] == [
        (100, {"eval/return_mean": 5.0, "eval/updates": 7})
    ]


def test_a_resumed_run_that_evaluates_here_has_the_result_of_the_evaluation_that_was_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_while_evaluating(patch)
        case = f"{CASE} eval.asynchronous=true eval.interval_steps=inf"
        assert launch.main(words(case, tmp_path)) == 128 + signal.SIGTERM
    assert "eval/return_mean" not in rows(tmp_path / "run_0")[-1]
    assert launch.main([f"resume={tmp_path / 'run_0'}", "eval.asynchronous=false"]) == 0
    whole = trained(tmp_path / "whole", "eval.interval_steps=inf")
    assert scores(tmp_path / "run_0") == scores(whole) != {}
    assert result_of(tmp_path / "run_0")["final_score"] == result_of(whole)["final_score"]


def test_the_best_snapshot_is_that_of_the_best_score_also_if_it_came_late(tmp_path: Path) -> None:
    run = trained(tmp_path, "eval.asynchronous=true", "snapshot_mode=best", "snapshot_keep=9")
    best = max(scores(run).items(), key=lambda found: float(found[1]))
    meta = read_meta(resolve_snapshot(run / "snapshot/best"))
    assert (meta["env_steps"], meta["score"]) == (best[0], float(best[1]))


N_CALLS = itertools.count()  # of `one_less` in the process that evaluates


def one_less(policy: Any, make_env: Any) -> dict[str, float]:
    time.sleep(1.0)  # several rows of the log
    return {"return_mean": -float(next(N_CALLS))}


def test_the_snapshot_of_an_evaluation_that_takes_several_rows_is_kept(tmp_path: Path) -> None:
    changed = ["eval.asynchronous=true", "snapshot_mode=best", "snapshot_keep=1", "sampler.batch_B=8"]
    run = trained(tmp_path, f"eval.function={HERE}:one_less", *changed)
    assert read_meta(resolve_snapshot(run / "snapshot/best"))["env_steps"] == min(scores(run))
    assert len([*run.glob("snapshot/step_*")]) == 2, "that one, and the last"


def length_of_a_game(policy: Any, make_env: Any) -> dict[str, float]:
    env = make_env()
    observation, _ = env.reset(seed=0)
    n, ended = 0, False
    while not ended:
        observation, _, terminated, truncated, _ = env.step(policy.act(observation))
        n, ended = n + 1, terminated or truncated
    env.close()
    return {"return_mean": n, "twice": 2 * n}


@pytest.mark.parametrize("aside", variants(("false", "true"), ("true",)))
def test_a_function_of_the_users_evaluates(aside: str, tmp_path: Path) -> None:
    run = trained(tmp_path, f"eval.function={HERE}:length_of_a_game", f"eval.asynchronous={aside}")
    found = [row for row in rows(run) if row["eval/return_mean"]]
    assert [float(row["eval/twice"]) for row in found] == [2 * float(row["eval/return_mean"]) for row in found]
    assert "eval/length_mean" not in found[0]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("eval.env=Acrobot-v1", "eval.env=Acrobot-v1 has the observation space"),
        ("eval.function=nowhere:f", "No module named 'nowhere'"),
        (f"eval.function={HERE}:nothing", "has no nothing"),
        ("eval.function=os:getpid", "must be a function of (policy, make_env)"),
        ("eval.interval_steps=-1", "must be at least 0"),
    ],
)
def test_what_cannot_evaluate_is_refused_before_the_start(
    word: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(words(f"{CASE} {word}", tmp_path / "runs")) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_another_environment_is_evaluated_in(tmp_path: Path) -> None:
    without_limit = "eval.env=gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    run = trained(tmp_path, without_limit, "eval.env_kwargs.sutton_barto_reward=true", "eval.max_length=20")
    assert all(float(score) in (0.0, -0.5, -1.0) for score in scores(run).values()), "its rewards are -1 at a fall"


def result_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def test_a_stop_rule_ends_the_run_and_a_resumed_run_knows_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(tmp_path, "stop='updates>=20'".replace("'", ""))
    steps = result_of(run)["env_steps"]
    assert result_of(run)["reason"] == "stop='updates>=20' holds"
    assert 120 <= steps < 480
    assert launch.main([f"resume={run}"]) == 0
    assert "nothing is left to train: stop='updates>=20' holds" in caplog.text
    assert launch.main([f"resume={run}", "stop="]) == 0
    assert result_of(run)["env_steps"] >= 480


ENDS = {
    "runner.n_steps=120": "completed: env_steps",
    "runner.target_return=1": "completed: is at least runner.target_return=1",
    "stop=eval/since_best>=1": "completed: holds",
    "runner.n_steps=1_000_000 runner.max_time_s=1": "out_of_time: the time is over",
    "callbacks=[tests.runners.own_callbacks:Stopper]": "stopped: by a callback",
}


@pytest.mark.parametrize("changed", ENDS)
def test_the_result_says_how_and_why_a_run_ended(changed: str, tmp_path: Path) -> None:
    run = trained(tmp_path, *changed.split())
    result, last = result_of(run), rows(run)[-1]
    ended, reason = ENDS[changed].split(": ")
    assert result["ended"] == ended
    assert reason in result["reason"]
    assert result["score"] == "eval/return_mean"
    assert result["final_score"] == float(last["eval/return_mean"])
    best = max(float(row["eval/return_mean"]) for row in rows(run))
    assert result["best_score"] == best
    assert str(result["best_env_steps"]) in {r["env_steps"] for r in rows(run) if float(r["eval/return_mean"]) == best}


def test_the_result_of_a_run_that_was_resumed_without_evaluation_has_no_scores_of_evaluations(tmp_path: Path) -> None:
    run = trained(tmp_path, "runner.n_steps=120")
    assert launch.main([f"resume={run}", "eval.n_episodes=0", "runner.n_steps=240"]) == 0
    result = result_of(run)
    assert (result["score"], result["best_score"]) == ("episode/return_mean", None)
    assert result["final_env_steps"] == result["env_steps"] >= 240


@pytest.mark.slow
def test_the_result_of_a_failed_and_of_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = f"{CASE} callbacks=[{HERE}:Failing]"
    assert launch.main(words(case, tmp_path / "failed")) == 1
    result = result_of(tmp_path / "failed/run_0")
    assert (result["ended"], result["env_steps"] > 0) == ("failed", True)
    assert "the sky fell" in result["reason"]

    def stop(runner: Runner) -> list[Trajectory]:
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "record_episodes", stop)
        assert launch.main(words(CASE, tmp_path / "stopped")) == 128 + signal.SIGTERM
    run = tmp_path / "stopped/run_0"
    assert result_of(run)["ended"] == "interrupted"
    assert launch.main([f"resume={run}", TRUST]) == 0
    assert result_of(run)["ended"] == "completed"
    assert_runs_equal(run, trained(tmp_path / "whole"))


class Failing(Callback):
    def on_batch(self, samples: Any) -> None:
        raise ArithmeticError("the sky fell")


def test_the_window_of_recent_episodes_can_be_chosen(tmp_path: Path) -> None:
    run = trained(tmp_path, "runner.window=3")
    _, episodes = read_csv(run / "episodes.csv")
    last = rows(run)[-1]
    assert len(episodes) == int(last["episode/count"])
    assert float(last["episode/return_mean"]) == pytest.approx(sum(float(e["return"]) for e in episodes[-3:]) / 3)


class OtherRank(SingleRank):
    """Rank 0's evaluation was stopped, and this rank has none."""

    def broadcast(self, value: Any) -> Any:
        return None


def test_a_stopped_evaluation_of_rank_0_stops_the_ranks_that_wait_for_it() -> None:
    sent: list[Any] = []

    class Rank0(SingleRank):
        def broadcast(self, value: Any) -> Any:
            sent.append(value)
            return value

    def stopped() -> dict[str, float]:
        raise EvaluationStopped

    for ranks, evaluate in ((Rank0(), stopped), (OtherRank(), dict)):
        schedule = EvaluationSchedule(NoEvaluator(10), ranks, 10)
        with pytest.raises(EvaluationStopped):
            schedule.make(10, 10, ending=False, evaluate=evaluate, stop=lambda: False)
    assert None in sent, "the others would wait for ever"
