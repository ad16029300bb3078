"""Callbacks: every hook in every runner, metrics, stop, exact resume, errors, and no cost without callbacks."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe import launch
from rlframe.algos import ppo
from rlframe.core.errors import ConfigError, PartError, SnapshotError
from rlframe.core.types import Trajectory
from rlframe.envs import EnvConfig
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.record.snapshot import load_snapshot, resolve_snapshot
from rlframe.runners import AsyncRl, AsyncRlConfig, Callback, Learner, MinibatchRl, Runner, RunnerConfig, SyncRl
from rlframe.runners.callbacks import Callbacks, load_callbacks
from rlframe.samplers import BackgroundProcess, BackgroundSampler, serial
from tests.runners.own_callbacks import Counter, Failing, Recorder, Stopper
from tests.runners.resumed import TRUST, assert_resumed_exactly, words
from tests.tables import read_csv

ENV = EnvConfig("rlframe.envs.debug_envs:time_limit", {"length": 5})  # then a row that is not valid
SAMPLER = serial.Config(batch_T=8, batch_B=4)
CONFIG = ppo.Config(minibatches=1, epochs=1)
KINDS: dict[str, Any] = {
    "minibatch_rl": (MinibatchRl, RunnerConfig),
    "sync_rl": (SyncRl, RunnerConfig),
    "async_rl": (AsyncRl, AsyncRlConfig),
}
HERE = "tests.runners.own_callbacks"


@contextmanager
def made(kind: str, evaluates: bool, callbacks: Sequence[Callback], n_steps: int = 64) -> Iterator[Runner]:
    """A runner of this kind that trains PPO, and logs every 32 env_steps."""
    process = BackgroundProcess(SAMPLER, ENV) if kind == "async_rl" else None
    source: Any = process or SAMPLER.make_envs(ENV, 0, ())
    agent = CONFIG.make_agent(source.observation_space, source.action_space, ModelConfig(hidden=(8,)), 0)
    sampler: Any = BackgroundSampler(process, agent) if process else SAMPLER.make_sampler(source, agent, 0)
    algo = CONFIG.make_algorithm(agent, sampler.batch_spec, n_steps, 0)
    evaluator = Evaluator(ENV, agent, EvalConfig(n_envs=2, n_episodes=2)) if evaluates else None
    runner, options = KINDS[kind]
    options = options(n_steps=n_steps, log_interval_steps=32)
    with runner(sampler, Learner(agent, algo), options, evaluator, callbacks=callbacks) as made:
        yield made


def expected(evaluates: bool) -> list[str]:
    """The hooks of a training: batches of 28, 28 and 24 valid rows, and rows of the log at 0, 56 and 80."""

    def report(env_steps: int) -> list[str]:
        return [*(["evaluation of 2"] * evaluates), f"log at {env_steps}", f"snapshot at {env_steps}"]

    def batch(n_valid: int, n_episodes: int) -> list[str]:
        return [f"batch of {n_valid}", *[f"episode {env}" for _ in range(n_episodes) for env in range(4)], "update"]

    batches = [*batch(28, 1), *batch(28, 1), *report(56), *batch(24, 2), *report(80)]
    return ["start", *report(0), *batches, "end"]


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_runner_calls_every_hook_in_order(kind: str, evaluates: bool, tmp_path: Path) -> None:
    recorder = Recorder()
    with logger_context(tmp_path, console=False), made(kind, evaluates, [recorder]) as runner:
        runner.train()
        assert runner.return_metric == ("eval/return_mean" if evaluates else "episode/return_mean")
    assert recorder.calls == expected(evaluates)


def test_a_callback_logs_means_of_the_interval_and_adds_to_the_row(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run, made("minibatch_rl", False, [Counter()]) as runner:
        last = runner.train()
    assert (last["counter/batch_mean"], last["counter/updates"]) == (3, 3)
    rows = read_csv(run.directory / "progress.csv")[1]
    assert [row["counter/batch_mean"] for row in rows] == ["", "1.5", "3.0"]
    assert [float(row["counter/updates"]) for row in rows] == [0, 2, 3]


@pytest.mark.parametrize(
    ("name", "says"),
    [("mine", "named group/name"), ("a/b/c", "named group/name"), ("eval/return_mean", "logged by rlframe itself")],
)
def test_a_metric_needs_a_group_and_a_name_of_its_own(name: str, says: str) -> None:
    callback = Callback()
    with (
        made("minibatch_rl", False, [callback]) as runner,
        runner.callbacks.running(runner),
        pytest.raises(ValueError, match=says),
    ):
        callback.log(name, 1.0)


def test_a_callback_has_no_runner_before_training() -> None:
    with pytest.raises(RuntimeError, match="Callback is not training yet"):
        Callback().log("mine/x", 1.0)


@pytest.mark.parametrize("kind", ["minibatch_rl", "async_rl"])
def test_a_callback_stops_the_run_with_a_snapshot_and_its_reason(kind: str, tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run, made(kind, False, [Stopper()], n_steps=10_000) as runner:
        runner.train()
        env_steps = runner.env_steps
    assert env_steps == 56
    assert load_snapshot(resolve_snapshot(run.directory))[1]["env_steps"] == env_steps
    log = (run.directory / "debug.log").read_text()
    assert f"stopped by a callback ({HERE}:Stopper: 2 batches) at env_steps 56 of 10,000, snapshot written" in log


CASE = "algo=ppo algo.epochs=2 algo.minibatches=2 env=CartPole-v1 model.hidden=[8] eval.n_episodes=1 eval.n_envs=1 "
CASE += "runner.log_interval_steps=80 runner.n_steps=240 sampler=serial sampler.batch_T=16 sampler.batch_B=4"


def test_a_resumed_run_has_the_metrics_and_states_of_a_run_that_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = f"{CASE} callbacks={HERE}:Counter"
    assert_resumed_exactly(case, tmp_path, monkeypatch)
    state = load_snapshot(resolve_snapshot(tmp_path / "parts/run_0"))[0]
    assert state["callbacks"] == [{"name": f"{HERE}:Counter", "state": {"n_batches": 4, "n_updates": 4}}]


def test_a_run_that_its_callback_stopped_is_resumed_and_stopped_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine_stops.py").write_text(f"from {HERE} import Stopper as Mine")
    case = f"{CASE} callbacks=./mine_stops.py:Mine"
    run = tmp_path / "runs/run_0"
    assert launch.main(words(case, tmp_path / "runs")) == 0
    assert ":Stopper: 2 batches)" in capsys.readouterr().out
    assert json.loads((run / "params.json").read_text())["config"]["callbacks"] == ["./mine_stops.py:Mine"]
    assert launch.main([f"resume={run}"]) == 2
    assert "./mine_stops.py:Mine" in capsys.readouterr().err
    assert launch.main([f"resume={run}", TRUST, "callbacks="]) == 2
    assert "callbacks cannot change" in capsys.readouterr().err
    assert launch.main([f"resume={run}", TRUST]) == 0
    assert ":Stopper: 4 batches)" in capsys.readouterr().out
    (tmp_path / "moved").mkdir()
    del sys.modules["mine_stops"]
    Path("mine_stops.py").rename("moved/mine_stops.py").write_text(f"from {HERE} import Stopper as Mine  # edited")
    assert launch.main([f"resume={run}", TRUST]) == 2
    assert (
        "mine_stops.py does not exist; hand it over: callbacks=DIR/mine_stops.py:Mine, where" in capsys.readouterr().err
    )
    assert launch.main([f"resume={run}", TRUST, "callbacks=./moved/mine_stops.py:Mine"]) == 0
    assert "moved/mine_stops.py has changed since" in capsys.readouterr().out


def test_another_list_of_callbacks_does_not_fit_a_snapshot(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run, made("minibatch_rl", False, [Counter()]) as runner:
        runner.train()
    state, before = load_snapshot(resolve_snapshot(run.directory))[0], of_record(run.directory)
    with (
        logger_context(run.directory, resume=True, console=False),
        made("minibatch_rl", False, []) as other,
        pytest.raises(
            SnapshotError,
            match=f"saved with callbacks=.{HERE}:Counter., this run has ..; one of rlframe.train takes",
        ),
    ):
        other.resume(state)
    assert of_record(run.directory) == before


def of_record(run: Path) -> dict[str, bytes]:
    """What a run says of itself, without its messages."""
    return {path.name: path.read_bytes() for path in run.iterdir() if path.suffix in (".json", ".csv")}


class Broken(Callback):
    """Fails in one hook."""

    def __init__(self, hook: str, error: BaseException) -> None:
        self.error = error
        setattr(self, hook, self.fail)

    def fail(self, *_: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("hook", "error", "ended"),
    [
        ("on_end", ValueError("broken"), ["first", "last"]),
        ("on_end", KeyboardInterrupt("broken"), ["first", "last"]),
        ("on_start", ValueError("broken"), ["first"]),
    ],
)
def test_all_callbacks_that_started_are_ended_whatever_another_raises(
    hook: str, error: BaseException, ended: list[str]
) -> None:
    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_end(self) -> None:
            found.append(self.name)

    found: list[str] = []
    callbacks = [Named("first"), Broken(hook, error), Named("last")]
    wrong = pytest.raises((PartError, KeyboardInterrupt), match="broken")
    with made("minibatch_rl", False, callbacks) as runner, wrong:
        runner.train()
    assert found == ended


def test_an_error_names_the_callback_and_the_hook_and_a_snapshot_is_written(tmp_path: Path) -> None:
    recorder = Recorder()
    wrong = pytest.raises(PartError, match=r"own_callbacks:Failing failed in on_update: ValueError: three is too")
    with (
        wrong as caught,
        logger_context(tmp_path, console=False) as run,
        made("minibatch_rl", False, [Failing(), recorder]) as runner,
    ):
        runner.train()
    assert isinstance(caught.value.__cause__, ValueError)
    assert load_snapshot(resolve_snapshot(run.directory))[1]["env_steps"] == 80
    assert recorder.calls[-1] == "end"


@pytest.mark.parametrize(
    ("algo", "says", "hook"),
    [
        ("ppo algo.minibatches=2", "is lost", "on_batch"),
        ("dqn algo.learning_starts=32", "exactly", "on_episode"),
        pytest.param("ppo algo.minibatches=2", "is lost", "on_episode", marks=pytest.mark.slow),
        pytest.param("dqn algo.learning_starts=32", "exactly", "on_batch", marks=pytest.mark.slow),
    ],
)
def test_an_error_in_a_hook_loses_no_episode_and_the_resume_says_if_a_batch_is_lost(
    algo: str, says: str, hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = "env=rlframe.envs.debug_envs:time_limit env_kwargs.length=4 eval.n_episodes=0 runner.n_steps=64"
    sampler = "sampler=serial sampler.batch_T=8 sampler.batch_B=2"
    case = f"algo={algo} {env} {sampler} model.hidden=[8] callbacks={HERE}:Counter"
    assert launch.main([*words(case, tmp_path / "whole"), TRUST]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Counter, hook, lambda *_: 1 // 0)
        assert launch.main([*words(case, tmp_path / "parts"), TRUST]) == 1
    assert launch.main([f"resume={tmp_path / 'parts/run_0'}", TRUST]) == 0
    whole, parts = (read_csv(tmp_path / name / "run_0/episodes.csv")[1] for name in ("whole", "parts"))
    assert whole == parts
    assert says in (tmp_path / "parts/run_0/debug.log").read_text()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Counter", "must be written package.module:name or ./file.py:name"),
        (f"{HERE}:Couter", "has no Couter; did you mean Counter"),
        ("tests.no_such_module:Counter", "No module named 'tests.no_such_module'"),
        ("./no_such_file.py:Counter", "does not exist"),
        (f"{HERE}:NotACallback", "is not a subclass of rlframe.runners.Callback"),
    ],
)
def test_a_class_that_cannot_be_a_callback_is_refused(
    name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_callbacks([name])
    for dry_run in ("false", "true"):
        assert launch.main(words(f"{CASE} callbacks={name} dry_run={dry_run}", tmp_path / "runs")) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_mistyped_hook_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Typo\.on_evaluaton is no hook: on_start, .*; did you mean on_evaluation\?"):
        type("Typo", (Callback,), {"on_evaluaton": lambda self, metrics: None})


def test_a_run_that_has_snapshots_is_not_begun_anew(tmp_path: Path) -> None:
    """A script that opens it with resume=True, and forgets runner.resume, would replace its trained weights."""
    with logger_context(tmp_path, console=False) as run, made("minibatch_rl", False, []) as runner:
        runner.train()
    before = of_record(run.directory)
    with (
        logger_context(run.directory, resume=True, console=False),
        made("minibatch_rl", False, []) as other,
        pytest.raises(ConfigError, match=r"would begin anew in a run that has .*runner\.resume\(load_snapshot"),
    ):
        other.train()
    assert of_record(run.directory) == before


def test_several_callbacks_are_named_in_one_list() -> None:
    assert [type(each) for each in load_callbacks([f"{HERE}:Counter", f"{HERE}:Recorder"])] == [Counter, Recorder]
    assert load_callbacks([]) == []


@dataclass(frozen=True)
class Every(Callback):
    n: int = 5

    def on_log(self, row: Mapping[str, float]) -> None:
        self.log("mine/n", self.n)


def test_a_callback_may_be_a_frozen_dataclass() -> None:
    with made("minibatch_rl", False, [Every(7)]) as runner:
        assert runner.train()["mine/n"] == 7


class Tally(Callback):
    """Counts episodes, without a state_dict."""

    def __init__(self, every: int = 5) -> None:
        self.every, self.n, self.best, self.lengths = every, np.int64(0), math.nan, set[int]()

    def on_episode(self, trajectory: Trajectory) -> None:
        self.n += 1
        self.lengths.add(trajectory.length)


def test_a_callback_that_changes_without_a_state_dict_is_told_and_a_resumed_run_is_not_said_to_be_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with logger_context(tmp_path, console=False), made("minibatch_rl", False, [Tally()]) as runner:
        runner.train()
    assert f"callback {__name__}:Tally has no state_dict, and begins anew when the run is resumed: " in caplog.text
    snapshot = load_snapshot(next(tmp_path.glob("**/params.json")).parent)[0]
    assert sorted(snapshot["callbacks"][0]["unsaved"]) == ["lengths", "n"]
    with made("minibatch_rl", False, [Tally()], n_steps=96) as runner, caplog.at_level("INFO", "rlframe"):
        runner.resume(snapshot)
    (said,) = [each.message for each in caplog.records if each.message.startswith("resumed at ")]
    assert re.search(r"Tally\.n, .*Tally\.lengths begin anew, which no snapshot restores", said)
    assert "exactly" not in said


def test_without_callbacks_nothing_is_called_but_one_look_up_a_batch_an_update_and_an_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: Counts[str] = Counts()
    original = Callbacks.call
    monkeypatch.setattr(
        Callbacks, "call", lambda self, hook, *rest: (asked.update([hook]), original(self, hook, *rest))
    )
    with made("minibatch_rl", False, []) as runner:
        runner.train()
        assert runner.state_dict()["callbacks"] == []
    assert asked == {"on_batch": 3, "on_update": 3, "on_log": 3, "on_episode": runner.log.n_episodes}
    assert not any(Callbacks([Callback()])._by_hook.values()), "hooks that are not overridden are not called"


class Halved(Callback):
    """Saves a state that it never loads."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}


def test_a_state_that_is_saved_and_never_loaded_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    Callbacks([Halved(), Counter()]).state_dict()
    assert caplog.text.count("has no load_state_dict, and begins anew when the run is resumed") == 1
    assert "Halved has no load_state_dict" in caplog.text


def test_a_run_whose_callback_does_not_load_its_state_is_not_said_to_continue_exactly() -> None:
    callbacks = Callbacks([Halved(), Counter()])
    callbacks.load_state_dict(callbacks.state_dict())
    assert callbacks.lost == [f"{__name__}:Halved"]
