"""Runners and algorithms of the user's own, from the docs: they train, and are recorded and resumed exactly."""

import json
import threading
from collections import Counter, deque
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rlframe import launch
from rlframe.algos.base import Frozen
from rlframe.algos.saved import UnsavedState, check_attributes, content
from rlframe.core.errors import ConfigError
from rlframe.core.struct import Struct, plain
from rlframe.experiment.keys import list_parts
from rlframe.experiment.trust import foreign
from rlframe.record.codec import decode, encode
from rlframe.record.snapshot import load_snapshot, resolve_snapshot
from rlframe.runners.report import describe_resumed
from rlframe.runners.standstill import Idle, Standstill
from rlframe.updates.compiled import Compiled
from tests.algos.test_cuda_graph import batches, learned, made
from tests.blocks import saved_block
from tests.runners.resumed import assert_resumed_exactly, words

RUN = (
    "algo=dqn env=CartPole-v1 sampler=serial sampler.batch_T=4 sampler.batch_B=2 model.hidden=[8] eval.n_episodes=1 "
    "algo.learning_starts=40 algo.batch_size=8 algo.replay_ratio=2 algo.replay.size=400 "
    "runner.n_steps=120 runner.log_interval_steps=60"
)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the runner of the docs, under a name of its own for each test."""
    return saved_block("my_runner", "guides/extend", tmp_path, monkeypatch)


def test_a_runner_of_your_own_is_named_by_key_and_resumed_exactly(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = f"runner={mine}:CollectFirstConfig runner.n_batches=3"
    run = assert_resumed_exactly(f"{RUN} {given}", tmp_path, monkeypatch)
    config = json.loads((run / "params.json").read_text())["config"]
    assert config["runner"].endswith(":CollectFirstConfig")
    assert config["runner.n_batches"] == 3
    assert any(key.startswith("runner=") for key in foreign(config)), "a config with it needs trust=true"


def test_tensors_and_numbers_of_your_own_algorithm_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved_block("scaled_ppo", "tutorials/own_loss", tmp_path, monkeypatch)
    counted = {
        '"size")': '"size", "n", "seen")',
        "self.size =": "self.n = 0; self.seen = None; self.size =",
        "with torch": "self.n += 1; self.seen = [loss.detach()]; with torch",
    }
    kept = "self.seen = [loss.detach()]; self.batches = [*self.batches[-2:], batch.map(lambda x: x.detach().clone())]"
    counted |= {
        '"seen")': '"seen", "batches")',
        "self.seen = None": "self.seen = None; self.batches = []",
        "self.seen = [loss.detach()]": kept,
    }
    for before, after in counted.items():
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after.replace("; ", "\n        ")))
    case = (
        f"algo={file} env=CartPole-v1 sampler=serial sampler.batch_T=16 sampler.batch_B=2 model.hidden=[8] "
        "eval.n_episodes=1 algo.epochs=1 algo.minibatches=2 runner.n_steps=224 runner.log_interval_steps=96"
    )
    run = assert_resumed_exactly(case, tmp_path, monkeypatch)
    algo = load_snapshot(resolve_snapshot(run))[0]["algo"]
    assert algo["n"] == algo["progress"]["updates"] > 10
    assert 0 < algo["size"] != 1
    assert len(algo["seen"]) == 1
    assert len(algo["batches"]) == 3


def test_batches_kept_for_a_later_phase_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved_block("ppg", "tutorials/own_loss", tmp_path, monkeypatch)
    case = (
        f"algo={file} env=CartPole-v1 sampler=serial sampler.batch_T=16 sampler.batch_B=2 model.hidden=[8] "
        "eval.n_episodes=1 algo.epochs=1 algo.minibatches=2 algo.n_batches=3 algo.aux_epochs=1 runner.n_steps=288 "
        "runner.log_interval_steps=96"
    )
    run = assert_resumed_exactly(case, tmp_path, monkeypatch)
    algo = load_snapshot(resolve_snapshot(run))[0]["algo"]
    assert (len(algo["kept"]), algo["progress"]["updates"]) == (1, 10 * 2 + 3 * 3)


class Mine(Frozen):
    """An algorithm with state of its own."""

    saved = ("progress", "mine")


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"mime": 1}, "Mine.saved names 'mine', which Mine does not have; did you mean mime?"),
        ({"mine": threading.Lock()}, "Mine.mine, which `saved` names, is a lock; it may be a tensor, an array"),
        ({"mine": {"a": [torch.Generator()]}}, "Mine.mine, which `saved` names, holds a Generator; it may be"),
        ({"mine": [np.array([None])]}, "Mine.mine, which `saved` names, holds an array of object; use numbers"),
        ({"mine": Counter("ab")}, "Mine.mine, which `saved` names, is a Counter; it may be"),
        ({"mine": [IntEnum("Phase", ["MAIN"])(1)]}, "Mine.mine, which `saved` names, holds a Phase; it may be"),
        ({"mine": NamedTuple("Pair", [("x", int)])(1)}, "Mine.mine, which `saved` names, is a Pair; it may be"),
    ],
)
def test_state_that_cannot_be_saved_is_named_before_it_learns(state: dict[str, Any], says: str) -> None:
    algo = Mine(None)
    vars(algo).update(state)
    for look in (algo.state_dict, lambda: check_attributes(algo)):
        with pytest.raises(ConfigError, match=says):
            look()


class Hiding(Mine):
    """With methods that may be hidden."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(None)
        self.mine = 0
        vars(self).update(attributes)

    def learn(self) -> None:
        """For what the tests below put in its place."""

    def _learn(self) -> None:
        """As the updates of rlframe's algorithms are named."""


def test_an_attribute_that_hides_a_method_is_named() -> None:
    for name, x in (
        ("learn", Compiled(Hiding()._learn, None, [])),  # type: ignore[arg-type]
        ("learn", torch.nn.Linear(1, 1)),
        ("watch", 3),
    ):
        with pytest.raises(ConfigError, match=rf"Hiding\.{name} is both a method, of (Hiding|Algorithm),"):
            check_attributes(Hiding(**{name: x}))
    own = Hiding()
    for chosen in (Compiled(own.learn, None, []), own._learn, lambda: None):  # type: ignore[arg-type]
        own.learn = chosen  # type: ignore[method-assign, assignment]
        check_attributes(own)


def test_what_cannot_be_loaded_again_is_named() -> None:
    algo = Mine(None)
    algo.mine = SimpleNamespace(state_dict=dict)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="is a SimpleNamespace with a state_dict, but no load_state_dict"):
        check_attributes(algo)
    counted = type("Counted", (Frozen,), {"saved": ("progress", "count"), "count": 0})(None)
    with pytest.raises(ConfigError, match=r"'count', which its class has, and not it itself; set self\.count in"):
        check_attributes(counted)


@pytest.mark.parametrize("saved", [("mine",), "progress"])
def test_saved_names_all_that_the_class_above_saves(saved: Any) -> None:
    with pytest.raises(TypeError, match=r"saved leaves out progress of Frozen; write saved|must be a tuple"):
        type("Partial", (Frozen,), {"saved": saved})


def test_a_class_with_two_above_saves_what_both_do() -> None:
    other = type("Other", (Frozen,), {"saved": ("progress", "other")})
    with pytest.raises(TypeError, match=r"Both\.saved leaves out other of Other"):
        type("Both", (Mine, other), {})


def test_state_that_training_changes_and_saved_does_not_name_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    algo = Mine(None)
    vars(algo).update(mine=1, constant=2.0, counted=0, averaged=torch.ones(()), shown=torch.ones(()))
    kept, target = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    algo.agent = kept
    target.register_buffer("seen", None)
    vars(algo).update(target=target, means=[torch.ones(()), kept.bias], online=[kept.weight], fixed=torch.nn.ReLU())
    vars(algo).update(batches=[], names={"a": 1}, alias=[kept.weight.detach()], targets={"q": torch.nn.Linear(1, 1)})
    vars(algo).update(by_name={"n": 0, "x": [1.0]}, last=deque([1, 2], 2), counts=np.zeros((3, 1)), same={3, "a"})
    vars(algo).update(kept_array=np.zeros(4), deep={"a": {"b": {"c": [1]}}}, equal=[1, np.nan])
    vars(algo).update(other_name=algo.kept_array, window=algo.kept_array[1:])
    algo.saved = (*algo.saved, "kept_array")
    algo.state_dict()
    algo.batches = [np.ones(1)]
    algo.by_name["x"][0], algo.counts[1] = 2.0, 5
    algo.last.append(3)
    algo.kept_array += 1
    algo.deep["a"]["b"]["c"][0], algo.equal = 2, [np.float64(1), float("nan")]
    vars(algo).update(mine=2, counted=5, shown=torch.zeros(()))  # the last is another tensor each time
    with torch.no_grad():
        for x in (algo.averaged, algo.means[0], target.weight, kept.weight):
            x.mul_(0.5)
        algo.targets["q"].weight.mul_(0.5)
    with torch.inference_mode():
        algo.seen = target.seen = torch.ones(())  # as a hook keeps it while acting
    for _ in range(3):
        algo.state_dict()
    (told,) = [record.getMessage() for record in caplog.records]
    names = "Mine.averaged, Mine.batches, Mine.by_name, Mine.counted, Mine.counts, Mine.deep, Mine.last, Mine.means"
    names += ", Mine.target, Mine.targets"
    assert f"`saved` does not name {names}: a resumed run begins" in told


def test_what_an_optimizer_learns_and_generators_are_warned_of_at_the_first_snapshot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Learning(Frozen):
        saved = (*Frozen.saved, "kept", "kept_optimizer")

    algo = Learning(None)
    kept, head, frozen = (torch.nn.Linear(2, 1) for _ in range(3))
    vars(algo).update(kept=kept, same=kept, head=head, frozen=frozen, rng=np.random.default_rng(0))
    vars(algo).update(kept_optimizer=torch.optim.SGD(kept.parameters(), 0.1))
    vars(algo).update(head_optimizer=torch.optim.SGD([*head.parameters(), *kept.parameters()], 0.1))
    for algo.counted in range(3):
        algo.state_dict()
    at_first, later = [record.getMessage() for record in caplog.records]
    assert "`saved` does not name Learning.head, Learning.rng, Learning.head_optimizer: a resumed" in at_first
    assert "`saved` does not name Learning.counted: a resumed" in later
    names = ("Learning.counted", "Learning.head", "Learning.head_optimizer", "Learning.rng")
    for _ in range(2):  # a run that is resumed a second time has not found them again
        state, parts, algo = algo.state_dict(), vars(algo), Learning(None)
        vars(algo).update({name: parts[name] for name in ("kept", "kept_optimizer", "head", "head_optimizer", "rng")})
        algo.counted = 0
        algo.load_state_dict(state)
        assert tuple(algo.lost_state()) == names
    says = f"what `saved` names continues; {', '.join(names)} begin anew, which no snapshot restores"
    assert describe_resumed(["", ""], algo.lost_state()) == says


def test_a_name_that_is_added_to_saved_continues_from_the_next_snapshot() -> None:
    before, algo = Frozen(None), Mine(None)
    vars(algo).update(mine=3, lost=3)
    algo.load_state_dict(before.state_dict())
    assert vars(algo)["mine"] == 3
    assert algo.lost_state() == ["Mine.mine"]
    vars(algo).update(lost=4)
    state = algo.state_dict()
    assert state["(unsaved)"] == ["Mine.lost"], "what is saved now is not lost again, and one snapshot tells a change"
    algo.load_state_dict(state)
    assert algo.lost_state() == ["Mine.lost"]


@pytest.mark.parametrize("name", ["rainbow", "cql_learned", "td3", "iql", "ppo_kl", "pqn"])
def test_an_algorithm_as_it_is_saves_all_of_its_state(name: str) -> None:
    algo, state = made(name), UnsavedState()
    state.look(algo, algo.saved)
    assert learned(algo, batches(name))
    state.look(algo, algo.saved)
    assert state.names == []


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            torch.ones(2),
            torch.ones(3),
            r"Mine\.mine was saved as \(2,\) of torch.float32, and is \(3,\) of",
        ),
        (
            np.ones(3),
            np.zeros(3, int),
            r"Mine\.mine was saved as \(3,\) of float64, and is \(3,\) of int",
        ),
    ],
)
def test_state_of_another_shape_or_kind_does_not_fit(before: Any, after: Any, says: str) -> None:
    algo = Mine(None)
    algo.mine = before
    state = algo.state_dict()
    algo.mine = after
    with pytest.raises(ValueError, match=says):
        algo.load_state_dict(state)


@dataclass(frozen=True, eq=False)
class Kept(Struct):
    """A record of a test's own."""

    x: Any
    steps: int = plain(3)


def test_records_are_saved_within_lists_and_one_whose_class_is_gone_is_named() -> None:
    algo, arrays = Mine(None), {}  # type: ignore[var-annotated]
    algo.mine = [{"a": Kept((Kept(np.arange(2)), torch.ones(2)), 5)}]
    tree = encode(algo.state_dict(), arrays)
    algo.mine = []
    algo.load_state_dict(decode(tree, arrays))
    inner, ones = algo.mine[0]["a"].x
    assert (algo.mine[0]["a"].steps, inner.steps, inner.x.tolist(), ones.tolist()) == (5, 3, [0, 1], [1, 1])
    gone = {**Mine(None).progress.state_dict()}
    with pytest.raises(ValueError, match=r"Mine\.mine holds a Struct of the class mine:Keptt, which is not there"):
        algo.load_state_dict({"progress": gone, "mine": {"(class)": "mine:Keptt"}})


def test_a_file_with_a_config_needs_no_name(mine: Path, tmp_path: Path) -> None:
    mine.write_text(mine.read_text().replace("class CollectFirstConfig", "class Config"))
    assert launch.main(words(f"{RUN} runner={mine}", tmp_path / "runs")) == 0


WRONG = {
    "runner=FILE:CollectFirst": "is no class of a Config, made with chz.chz",
    "runner=FILE:Nothing": "has no Nothing",
    "runner=rlframe.runners:RunnerConfig": "RunnerConfig needs runner_class, a subclass of Runner",
    "runner=minibatch": "'minibatch' is not in rlframe.runners (.*); did you mean minibatch_rl",
    "runner=FILE:IdleConfig": "9 iterations in a row had no env step; look at iterate of Idle and collect of Serial",
    "runner=FILE:UnfinishedConfig": "Unfinished, a subclass of Runner, needs iterate",
    "runner=FILE:CollectFirstConfig runner.n_batch=2": "unknown key runner.n_batch; did you mean runner.n_batches",
    "runner=FILE:CollectFirstConfig world_size=2": "world_size=2 needs runner=sync_rl",
}


MORE = """
class Idle(Runner):
    def iterate(self): ...

@chz.chz
class IdleConfig(CollectFirstConfig):
    runner_class = Idle

class Unfinished(Runner): ...

@chz.chz
class UnfinishedConfig(CollectFirstConfig):
    runner_class = Unfinished
"""


@pytest.mark.parametrize("given", WRONG)
def test_what_cannot_be_a_runner_is_refused(
    given: str, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlframe.runners.standstill.MOST_IDLE", 9)
    mine.write_text(mine.read_text() + MORE)
    case = RUN.replace("eval.n_episodes=1", "eval.n_episodes=2")
    assert launch.main(words(f"{case} {given.replace('FILE', str(mine))}", tmp_path / "runs")) == 2 - ("Idle" in given)
    said = capsys.readouterr().err
    for part in WRONG[given].split("(.*)"):
        assert part in said


def test_updates_that_are_owed_are_no_standstill_and_those_from_empty_batches_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlframe.runners.standstill.MOST_IDLE", 3)
    runner, standstill = SimpleNamespace(now=5, updates=0, empty_batch=False, sampler=None), Standstill()
    for runner.updates in range(9):
        standstill.check(runner)
    for runner.updates in (9, 10):
        runner.empty_batch = True
        standstill.check(runner)
    runner.updates, runner.empty_batch = 11, True
    with pytest.raises(Idle, match="3 iterations in a row had no env step"):
        standstill.check(runner)


def test_the_list_of_runners_says_what_each_is() -> None:
    assert "offline_rl         OfflineRl: learn from data alone" in list_parts("runners")


def test_a_value_of_any_size_and_kind_is_looked_at_in_no_time_and_without_an_error() -> None:
    class Broken(dict[str, int]):
        def items(self) -> Any:
            raise RuntimeError("changed by another thread")

    itself: list[Any] = [1]
    itself += [itself] * 30
    assert content(Broken(a=1)) is None
    for value in (itself, [[[1.0] * 1000] * 1000] * 1000, np.zeros((1000, 1000)), {"a": object()}, {(1, 2): 1j}):
        assert hash(content(value)) == hash(content(value))
    assert content([0.0] * 2000) != content([0.0] * 2001)
    assert content(np.array([1, 2])) == content([1.0, 2.0]) != content([2, 1])
