"""A replay of the user's own by key: it learns, is resumed exactly, and what it lacks is refused in one line."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlframe
from rlframe import launch
from rlframe.core.errors import ConfigError
from rlframe.core.names import made_by
from rlframe.core.types import BatchSpec
from rlframe.experiment.settings import from_flat, to_flat
from rlframe.record.snapshot import load_snapshot
from rlframe.replay import NStep, Uniform, make_replay
from rlframe.replay.arrays import HostMemory
from rlframe.replay.make import OwnReplay
from rlframe.replay.select import Candidates
from tests.blocks import saved_block
from tests.replay.buffers import ACTIONS
from tests.replay.test_transitions import COUNTER, batch
from tests.runners.resumed import assert_resumed_exactly, words

RUN = (
    "algo=dqn env=CartPole-v1 sampler=serial sampler.batch_T=4 sampler.batch_B=2 model.hidden=[8] eval.n_episodes=1 "
    "algo.n_step=1 algo.learning_starts=40 algo.batch_size=8 algo.replay_ratio=2 algo.replay.size=60 "
    "runner.n_steps=120 runner.log_interval_steps=60"
)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the replay of the tutorial, under a name of its own for each test."""
    return saved_block("my_replay", "tutorials/own_replay", tmp_path, monkeypatch)


def test_a_replay_of_40_lines_is_named_by_key_and_resumed_exactly(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(bool(line.strip()) for line in mine.read_text().splitlines()) <= 40
    run = assert_resumed_exactly(f"{RUN} replay={mine}:UniformReplay", tmp_path, monkeypatch)
    state = load_snapshot(run)[0]["algo"]
    assert state["replay"]["n"] >= 120, "each transition was stored"
    assert state["progress"]["updates"] >= 20
    assert f"replay: {mine.stem}:UniformReplay" in (run / "debug.log").read_text(), "of a class without __str__"


def test_one_in_memory_learns_as_the_class_handed_over_does(mine: Path, tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(mine.read_text(), namespace)
    settings = {key: value for key, _, value in (word.partition("=") for word in RUN.split())}
    result = rlframe.train(**settings, replay=namespace["UniformReplay"], affinity="none", log_dir=str(tmp_path / "a"))
    assert launch.main(words(f"{RUN} replay={mine}:UniformReplay", tmp_path / "b")) == 0
    one, other = (load_snapshot(run)[0]["agent"] for run in (result.directory, tmp_path / "b/run_0"))
    assert all((one[name] == other[name]).all() for name in one)


@pytest.fixture
def recent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tutorial's class that chooses rows."""
    file = saved_block("recent", "tutorials/own_replay", tmp_path, monkeypatch)
    more = "class Newest(Uniform):\n    def choose(self, candidates, n): return np.full(n, candidates.hi - 1)\n"
    more += "class Few(Recent):\n    def choose(self, candidates, n): return super().choose(candidates, n - 1)\n"
    more += "class Bad(Uniform):\n    def choose(self, candidates, n): return n / 0\n"
    file.write_text(file.read_text() + more)
    return file


@pytest.mark.parametrize("kind", ["memory", "device"])
def test_a_class_of_the_users_chooses_among_rlframes_rows(
    kind: str, recent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"{RUN} algo.n_step=3 algo.replay.size=400 replay={kind} algo.replay.selector={recent}:Recent(half_life=10)"
    run = " ".join({word.partition("=")[0]: word for word in run.split()}.values())
    state = load_snapshot(assert_resumed_exactly(run, tmp_path, monkeypatch))[0]
    assert state["algo"]["progress"]["updates"] >= 20


def test_newer_rows_are_drawn_more_often(recent: Path) -> None:
    memory = HostMemory(torch.device("cpu"))
    candidates = Candidates(1000, memory)
    candidates.advance(0, 1000, np.arange(1000) % 2 == 0)
    made = made_by(f"{recent}:Recent(half_life=100)", "selector", Uniform, "Uniform", np.random.default_rng(0))
    chosen = np.asarray(made.draw([candidates], 20_000)[0][1])
    assert (chosen % 2 == 0).all()
    counts = [np.count_nonzero((chosen >= lo) & (chosen < lo + 100)) for lo in (900, 800, 700)]
    np.testing.assert_allclose(np.divide(counts[1:], counts[:-1]), 0.5, atol=0.05)


WRONG = {
    "replay=mem": r"'mem' is not in rlframe.replay \(dataset, device, disk, memory, own, ray\); did you mean memory",
    "replay=FILE:np": "is not a class; give the class",
    "replay=FILE:Half": "lacks update_priorities, state_dict, load_state_dict; rlframe.replay.Replay says",
    "replay=FILE:Without": "lacks n_rows; rlframe.replay.Replay says",
    "replay=FILE:Faulty": r"algo.replay=.*:Faulty cannot be made: TypeError: can only concatenate str",
    "replay=FILE:UniformReplay algo.prioritized=true": "AssertionError: transitions of one step, drawn uniformly",
    "repaly=FILE:UniformReplay": "unknown key repaly; did you mean replay",
    "replay=FILE:Counts": r"algo.replay=.*:Counts: n_rows is a method; make it a property",
    "replay=own": "algo.replay=own needs algo.replay.name=module:Class",
    "replay=FILE:UniformReplay algo.replay.kwargs.depth=3": "unexpected keyword argument 'depth'; it is called with a",
    "replay=FILE:UniformReplay algo.prioritized=true algo.initial_priority=td": "replay=memory, device, disk or ray",
    "replay=FILE:UniformReplay learners=2 eval.n_episodes=2": "learners=2 divides a replay of memory",
    "algo.replay.selector=CHOOSER:Newest": r"Newest.choose returns \d+, which is none that `candidates.contains`",
    "algo.replay.selector=CHOOSER:Few": r"Few.choose must return 8 integers, and gives int64\[7\]",
    "algo.replay.selector=CHOOSER:Bad": r"Bad.choose failed: ZeroDivisionError: division by zero$",
    "algo.replay.selector=CHOOSER:np": "np .*Uniform",
    "algo.replay.selector=CHOOSER:Recent algo.prioritized=true": "both decide which rows are drawn; leave it out, or",
    "replay=disk algo.replay.compress=true": "unknown key algo.replay.compress; it is for algo.replay=memory",
    "algo=ppo replay=disk": "unknown key algo.replay; algo=ppo has no such part",
    "algo=r2d1 algo.learning_starts=10 model.memory=gru replay=FILE:Lax": "=true reads back the rows just stored",
}


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("given", WRONG)
def test_what_cannot_be_a_replay_is_refused(
    given: str, mine: Path, recent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "class Half:\n    append = sample = None\nclass Lax(UniformReplay):\n    def __init__(self, spec): ...\n"
    more += "class Counts(UniformReplay):\n    def n_rows(self): return self.n\n"
    more += "class Faulty(UniformReplay):\n    def __init__(self, spec): 'a' + 1\n"
    more += "class Without:\n    def __init__(self, spec): ...\n"
    more += "    append = sample = update_priorities = state_dict = load_state_dict = __init__\n"
    mine.write_text(mine.read_text() + more)
    own = dict.fromkeys(word.partition("=")[0] for word in given.split())
    case = [word for word in RUN.split() if word.partition("=")[0] not in own]
    if "algo" in own:
        case = [word for word in case if not word.startswith("algo.")]
    given_files = given.replace("FILE", str(mine)).replace("CHOOSER", str(recent))
    assert launch.main(words(f"{' '.join(case)} {given_files}", tmp_path / "runs")) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(WRONG[given], said), said


def test_the_number_of_rows_may_be_an_attribute(mine: Path) -> None:
    code = mine.read_text().replace("    @property\n    def n_rows(self):\n        return min(self.n, self.size)\n", "")
    code = code.replace("self.n += len(at)", "self.n += len(at)\n        self.n_rows = min(self.n, self.size)")
    mine.write_text(code.replace("self.n = 0 ", "self.n = self.n_rows = 0 "))
    made = make_replay(OwnReplay(name=f"{mine}:UniformReplay"), COUNTER, ACTIONS, BatchSpec(6, 1), NStep(0.5))
    made.append(batch(6, terminated=(2,)))
    assert made.n_rows == 5


def test_a_kind_is_recorded_by_its_name() -> None:
    experiment = from_flat({"algo": "dqn", "replay": "disk", "replay.size": 70})
    assert to_flat(experiment)["algo.replay"] == "disk"
    assert to_flat(from_flat(to_flat(experiment))) == to_flat(experiment)
    with pytest.raises(ConfigError, match=r"algo\.replay\.size=0 must be at least 1"):
        from_flat({"algo": "dqn", "replay.size": 0})
