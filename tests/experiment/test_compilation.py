"""compile=auto: it compiles where a run gains more than that costs, says so, and a resumed run keeps the choice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe import launch
from rlframe.core.files import read_json
from rlframe.experiment import build, compilation
from rlframe.experiment.compilation import choose_compile
from rlframe.experiment.hardware import resolve
from rlframe.experiment.job import read_job
from rlframe.experiment.settings import from_flat
from rlframe.record.snapshot import load_newest
from rlframe.updates import compiled
from tests.algos.test_cuda_graph import made

ROOT = Path(__file__).parents[2]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
WORDS = ["env=CartPole-v1", "sampler=serial", "threads=1", "affinity=none", "eval.n_episodes=0", "loggers=[]"]
DQN = ["algo=dqn", "algo.learning_starts=100", "algo.replay.size=1000", "algo.batch_size=16", "algo.learning_rate=1e-3"]
PPO = ["algo=ppo", "sampler.batch_T=16", "sampler.batch_B=4", "algo.minibatches=4"]
DQN += ["algo.explore.epsilon=0.1", "model.hidden=[8]"]


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    monkeypatch.setenv("CXX", "true")  # a program that is there
    monkeypatch.setattr(compilation, "_cache", lambda: tmp_path / "cache")


def choice(n_steps: int, device: torch.device = CPU, **keys: Any) -> tuple[bool, str]:
    """Of SAC on Pendulum with an update for each two env_steps."""
    experiment = from_flat({"algo": "sac", "env": "Pendulum-v1", "runner.n_steps": n_steps, **keys})
    found, reason = choose_compile(experiment, made("sac"), 8, device, 1)
    return found.compiles, reason


def test_long_runs_are_compiled_and_short_ones_are_not_and_the_reason_has_the_numbers() -> None:
    compiles, reason = choice(1_000_000)
    assert compiles
    assert reason.startswith("auto: compiled, as 2")
    assert "updates would gain about" in reason
    compiles, reason = choice(1_000)
    assert not compiles
    assert reason.endswith("and it takes up to 45 s to compile them")


def test_what_the_cache_has_pays_in_a_shorter_run(tmp_path: Path) -> None:
    n = 60_000  # 15,000 updates
    assert not choice(n)[0]
    experiment = from_flat({"algo": "sac", "env": "Pendulum-v1", "runner.n_steps": n})
    choose_compile(experiment, made("sac"), 8, CPU, 1)[0].mark()
    compiles, reason = choice(n)
    assert compiles
    assert "up to 3 s to load" in reason
    assert not choice(n, **{"algo.batch_size": 32})[0], "another program"
    assert not choice(n, **{"agents.policies.red.model.hidden": [8]})[0], "of one of its policies"


def test_what_is_asked_for_holds_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice(10, compile="true") == (True, "true")
    assert choice(10**9, compile="false") == (False, "false")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert choice(10**9) == (False, "auto: not compiled, as TORCH_COMPILE_DISABLE=1 says")
    assert choice(10, compile="true")[0]
    monkeypatch.setenv("CXX", "no-such-compiler")
    for asked in ("auto", "true"):
        compiles, reason = choice(10**9, compile=asked)
        assert not compiles
        assert reason == f"{asked}, but there is no C++ compiler no-such-compiler; install g++, or name one by CXX"


def test_on_a_gpu_auto_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: object())
    assert "one to two minutes" in choice(10**9, GPU)[1]
    assert choice(10**9, GPU, compile="true") == (True, "true")
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: None)
    assert choice(10**9, GPU, compile="true") == (False, "true, but there is no Triton; pip install triton")


def test_convolutions_of_large_batches_are_not_compiled_by_auto() -> None:
    class Learns:
        progress = type("P", (), {"learned": [torch.zeros(32, 4, 8, 8), torch.zeros(512, 3136)]})

        def __init__(self, rows: int) -> None:
            self.rows, self.learn = rows, made("sac").learn_critics

        def updates_in(self, n_steps: int, batch_size: int) -> int:
            return n_steps

        def rows_of_step(self, batch_size: int) -> int:
            return self.rows

    experiment = from_flat({"runner.n_steps": 10**6})
    for rows, compiles in ((32, True), (256, False)):
        algo: Any = Learns(rows)
        assert choose_compile(experiment, algo, 8, CPU, 1)[0].compiles == compiles


def test_neither_a_nameless_user_nor_a_closed_cache_keeps_a_run_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.undo()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setattr(compilation.getpass, "getuser", nobody)
    assert not choice(10)[0]
    (tmp_path / "file").touch()
    for closed in (tmp_path / "file" / "cache", Path("x" * 5_000)):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(closed))
        assert not choice(10)[0]


def test_a_wrong_value_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert launch.main([*WORDS, "compile=yes", f"log_dir={tmp_path}"]) == 2
    assert "compile" in capsys.readouterr().err


def test_a_run_whose_compiler_failed_goes_on_uncompiled_until_it_is_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise compiled.CompilerFailed("no room")

    monkeypatch.setattr(compiled, "compile_graph", fail)
    monkeypatch.setattr(compilation, "_missing_compiler", lambda device: "")
    words = [*WORDS, "algo=ppo", "runner.n_steps=64", "sampler.batch_T=8", "sampler.batch_B=4", "algo.minibatches=2"]
    assert launch.main([*words, "compile=true", f"log_dir={tmp_path}"]) == 0
    run = str(tmp_path / "run_0")
    assert read_json(tmp_path / "run_0" / "params.json")["chosen"]["compile"] == "false"
    for asked, becomes, says in (
        ({}, "false", "compile=true: false, as before"),
        ({"compile": "auto"}, "false", "compile=auto: false, as before"),
        ({"compile": "true"}, "true", "compile=true: it was false before"),
        ({"compile": "false"}, "false", ""),
    ):
        job = read_job({"resume": run, **asked})
        (note,) = [each for each in job.notes if each.startswith("compile=")] or [""]
        assert job.experiment.compile == becomes
        assert note.startswith(says)
        assert bool(note) == bool(says)


def test_what_can_never_be_compiled_is_tried_again_by_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since what else is compiled goes on so: here a bonus would, beside a policy with memory."""
    monkeypatch.setattr(compilation, "_missing_compiler", lambda device: "")
    words = [*WORDS, "algo=ppo", "model.memory=lstm", "runner.n_steps=64", "sampler.batch_T=8", "sampler.batch_B=4"]
    assert launch.main([*words, "algo.minibatches=2", "compile=true", f"log_dir={tmp_path}"]) == 0
    assert read_json(tmp_path / "run_0" / "params.json")["chosen"]["compile"] == "true"


def test_a_resumed_run_keeps_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*WORDS, "algo=ppo", "runner.n_steps=64", "sampler.batch_T=8", "sampler.batch_B=4", "algo.minibatches=2"]
    assert launch.main([*words, f"log_dir={tmp_path}"]) == 0
    run = tmp_path / "run_0"
    assert read_json(run / "params.json")["chosen"]["compile"] == "false"
    assert read_json(run / "params.json")["config"]["compile"] == "auto", "what was asked"
    monkeypatch.setattr(compilation, "_COLD_S", 0.0)
    assert choice(100)[0]
    asked = {"resume": str(run), "runner.n_steps": "96"}
    assert read_job(asked).experiment.compile == "false"
    assert read_job({**asked, "compile": "auto"}).experiment.compile == "false"
    assert read_job({**asked, "compile": "true"}).experiment.compile == "true"


def test_ranks_that_would_choose_otherwise_choose_what_rank_0_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Second:
        n_samplers = 2

        def broadcast(self, value: Any) -> Any:
            return [False, "as rank 0 says"]

    monkeypatch.setattr(compilation, "current_ranks", Second)
    assert choice(10**9) == (False, "as rank 0 says")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("more", [DQN, PPO])
def test_a_compiled_run_that_is_stopped_and_resumed_is_the_run_that_was_not(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++")
    words = [*WORDS, *more, "compile=true", "runner.log_interval_steps=128", "seed=3"]
    for name, lengths in (("whole", (1024,)), ("parts", (512, 1024))):
        for i, n_steps in enumerate(lengths):
            begin = [*words, f"log_dir={tmp_path / name}"] if not i else [f"resume={tmp_path / name / 'run_0'}"]
            assert launch.main([*begin, f"runner.n_steps={n_steps}"]) == 0
    whole, parts = (load_newest(tmp_path / name / "run_0", key="agent")[1] for name in ("whole", "parts"))
    assert whole
    for name, x in whole.items():
        assert torch.equal(x, parts[name]), name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("ranks", ["world_size=2", "learners=2"])
def test_two_ranks_learn_compiled_what_they_learn_uncompiled(
    ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++")
    words = [*WORDS, *PPO, ranks, "runner=sync_rl", "runner.n_steps=512", "precision=fp32"]
    for compile_ in ("true", "false"):
        assert launch.main([*words, f"compile={compile_}", f"log_dir={tmp_path / compile_}"]) == 0
    one, other = (load_newest(tmp_path / name / "run_0", key="agent")[1] for name in ("true", "false"))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_build_takes_the_choice_into_training() -> None:
    experiment = from_flat({"sampler": "serial", "compile": "true", "threads": 1, "eval.n_episodes": 0})
    resolved = resolve(experiment)
    with build.build(resolved.experiment, resolved.affinity) as built:
        assert built.summary["compile"] == "true"
        assert built.learning_call(compiled._current.get).compiles
    assert not compiled._current.get().compiles


@pytest.mark.slow
def test_a_cache_that_was_filled_for_other_instructions_does_no_harm(tmp_path: Path) -> None:
    test = "tests/algos/test_compiled.py::test_a_saved_algorithm_goes_on_compiled_to_the_bit"
    outside = {name: os.environ[name] for name in ("PATH", "HOME")}  # without what tests set for themselves
    for more in ({}, {"ATEN_CPU_CAPABILITY": "avx2"}):
        variables = {**outside, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **more}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout
