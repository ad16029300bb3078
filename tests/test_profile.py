"""The profile: stacks get the names they should, all time is counted, and a real training is taken apart."""

import ast
import json
import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks import profile
from benchmarks.parts.stacks import OTHER, PARTS, Stacks, part_of
from rlframe.core.errors import ConfigError
from tests.fork_server import run_python

ROOT = Path(__file__).parents[1]


def stack(*frames: str) -> list[tuple[str, str]]:
    """Frames written file:function, the innermost first."""
    return [(f"/home/user/{file}", function) for file, function in (frame.split(":") for frame in frames)]


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        (stack("rlframe/replay/storage.py:write", "rlframe/replay/buffer.py:append"), "replay: writing"),
        (stack("rlframe/replay/n_step.py:read", "rlframe/replay/buffer.py:sample"), "replay: sampling"),
        (stack("torch/optim/adam.py:step", "rlframe/algos/ppo.py:update"), "optimizer"),
        (stack("rlframe/models/encoders.py:forward", "rlframe/algos/ppo.py:_loss"), "forward and losses"),
        (stack("rlframe/models/numpy_inference.py:dense", "rlframe/rollout/inference.py:act"), "acting"),
        (
            stack("rlframe/envs/gymnasium_vector.py:step", "rlframe/rollout/collector.py:run_steps"),
            "stepping environments",
        ),
        (stack("rlframe/envs/gymnasium_vector.py:step", "rlframe/evaluation/evaluator.py:evaluate"), "evaluation"),
        (stack("rlframe/record/codec.py:save", "rlframe/runners/report.py:save_snapshot"), "snapshots"),
        (stack("mine.py:main"), OTHER),
    ],
)
def test_a_stack_belongs_to_the_part_it_is_in(frames: list[tuple[str, str]], name: str) -> None:
    assert part_of(frames) == name


@pytest.mark.parametrize("part", [part for part in PARTS if part.file.startswith("rlframe/")], ids=str)
def test_parts_name_files_and_functions_that_there_are(part: object) -> None:
    path = ROOT / part.file  # type: ignore[attr-defined]
    assert path.exists()
    if part.functions:  # type: ignore[attr-defined]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert set(part.functions) <= defined  # type: ignore[attr-defined]


@pytest.mark.timeout(method="thread")  # the alarm is for the looks
def test_all_time_is_counted_also_that_of_long_calls() -> None:
    stacks, begin = Stacks(), time.perf_counter()
    stacks.start()
    deadline = begin + 0.05
    while time.perf_counter() < deadline:
        pass
    sum(range(3_000_000))  # one call into C
    time.sleep(0.02)
    ran = time.perf_counter() - begin
    stacks.stop()
    assert ran - 0.02 < sum(stacks.seconds.values()) < time.perf_counter() - begin
    assert list(stacks.seconds) == [OTHER]


@pytest.mark.timeout(method="thread")  # the alarm is for the looks
def test_a_look_that_takes_longer_than_from_tick_to_tick_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    depths, depth = [], 0

    def slowly(stack: object) -> str:
        nonlocal depth
        depth += 1
        depths.append(depth)
        end = time.perf_counter() + 0.005  # five ticks
        while time.perf_counter() < end:
            pass
        depth -= 1
        return OTHER

    class Forgetful(dict[object, str]):
        def get(self, *_: object) -> None:
            """Every stack is new."""

    monkeypatch.setattr("benchmarks.parts.stacks.part_of", slowly)
    stacks, begin = Stacks(interval_s=1e-3), time.perf_counter()
    monkeypatch.setattr(stacks, "_names", Forgetful())
    stacks.start()
    while time.perf_counter() < begin + 0.1:
        pass
    stacks.stop()
    assert len(depths) > 1
    assert set(depths) == {1}
    assert 0.05 < sum(stacks.seconds.values()) < time.perf_counter() - begin


@pytest.mark.timeout(method="thread")  # the alarm is for the looks
def test_a_late_tick_is_not_counted_and_ends_nothing() -> None:
    stacks = Stacks()
    stacks.start()
    stacks.stop()
    counted = dict(stacks.seconds)
    signal.raise_signal(signal.SIGALRM)
    time.sleep(0)  # Python's instructions, between which the tick is noticed
    assert stacks.seconds == counted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume=somewhere"], "resume= cannot be profiled"),
        (["sweep.seed=0,1"], "cannot be profiled"),
        (["seconds=0"], "seconds=0.0 must be above 0"),
        (["seconds=long"], "seconds= must be a number"),
        (["algo=ppo", "algo.epoch=3"], "did you mean algo.epochs"),
    ],
)
def test_a_wrong_word_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile.run(words)


def test_a_real_training_is_taken_apart(tmp_path: Path) -> None:
    """Starts the command: some seconds."""
    out = tmp_path / "profile.json"
    words = ["env=CartPole-v1", "algo=ppo", "sampler=serial", "runner=minibatch_rl", "seconds=1.5", f"out={out}"]
    done = run_python([sys.executable, "-m", "benchmarks.profile", *words], cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {"backward", "forward and losses", "optimizer", "acting", "stepping environments"} <= set(found["seconds"])
    assert sum(found["seconds"].values()) >= 1.5
    assert found["env_steps"] > 0
    assert "us an env step" in done.stdout
