"""The command `rlframe`: it runs the commands, with their exit status and their handling of Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlframe.__main__ import _COMMANDS
from tests.fork_server import run_python
from tests.processes import DEADLINE_S

ROOT = Path(__file__).parents[1]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return run_python([sys.executable, "-m", "rlframe", *words], cwd=ROOT, timeout=2 * DEADLINE_S)


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]], ids=str)
def test_it_lists_the_commands(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 0
    assert all(name in done.stdout for name in _COMMANDS)


def test_every_command_is_there_and_has_help() -> None:
    assert {*_COMMANDS} == {"launch", "evaluate", "study", "plot", "results", "data", "export"}
    for name in _COMMANDS:
        done = run(name, "--help")
        assert done.returncode == 0, done.stderr
        assert f"rlframe.{name}" in done.stdout
        assert not done.stderr or name in ("study", "data"), "whose __main__ the server of forks has imported"


def test_help_whose_reader_has_exited_ends_in_silence() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "rlframe.results", "--help"],
            cwd=ROOT, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=2 * DEADLINE_S,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (128 + 13, "")


@pytest.mark.slow
def test_a_run_of_it_is_a_run_of_launch(tmp_path: Path) -> None:
    words = ["env=CartPole-v1", "sampler.batch_T=16", "runner.n_steps=128", "eval.n_episodes=2", "learners=2"]
    done = run("launch", *words, "affinity=none", f"log_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run_0/progress.csv").exists()
    assert run("launch", "algo.lr=1").returncode == 2


@pytest.mark.parametrize(
    ("word", "says"), [("lauch", "did you mean launch?"), ("algo=sac", "did you mean rlframe launch algo=sac?")]
)
def test_a_wrong_word_is_refused_with_the_nearest(word: str, says: str) -> None:
    done = run(word)
    assert done.returncode == 2
    assert says in done.stderr
