"""Parts within parts, and mappings of parts, of a user's own algorithm: from the command line to a resumed run."""

import json
import sys
from pathlib import Path

import pytest

from rlframe import launch

ALGO = '''
"""PPO with parts."""
from collections.abc import Mapping
from typing import Any

import chz

from rlframe.algos import ppo
from rlframe.core.config import number
from rlframe.core.parts import part


@chz.chz
class Plain:
    """Nothing within."""

    scale: float = number(1.0, "a scale", high=9.0)


@chz.chz
class Wrapped:
    """Another within."""

    inner: Any = part("toy_parts", "plain", "what is within")


@chz.chz
class Team:
    """Of one color."""

    part: Any = part("toy_parts", "plain", "part of the team")
    size: float = number(1.0, "its size")


@chz.chz
class Config(ppo.Config):
    part: Any = part("toy_parts", "plain", "a part", of=object)
    teams: Mapping[str, Team] = chz.field(default_factory=dict, doc="teams by color")
'''
KINDS = "from toy_algo import Plain, Wrapped\n\nKINDS = {'plain': Plain, 'wrapped': Wrapped}\n"
RUN = ["env=CartPole-v1", "sampler=serial", "eval.n_episodes=1", "runner.n_steps=256", "affinity=none"]
RUN += ["algo.epochs=1", "algo.minibatches=1"]
NESTED = ["algo.part=wrapped", "algo.part.inner=wrapped", "algo.part.inner.inner.scale=3"]
TEAMS = ["algo.teams.red.part=wrapped", "algo.teams.red.part.inner.scale=4", "algo.teams.blue.size=2"]


@pytest.fixture
def algo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "toy_algo.py").write_text(ALGO)
    (tmp_path / "toy_parts.py").write_text(KINDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("toy_algo", "toy_parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return f"algo={tmp_path / 'toy_algo.py'}"


def test_a_run_records_its_nested_parts_and_is_resumed_with_them(algo: str, tmp_path: Path) -> None:
    assert launch.main([algo, *RUN, *NESTED, *TEAMS, f"log_dir={tmp_path}"]) == 0
    config = json.loads((tmp_path / "run_0/params.json").read_text())["config"]
    assert {key: x for key, x in config.items() if key.startswith(("algo.part", "algo.teams"))} == {
        "algo.part": "wrapped",
        "algo.part.inner": "wrapped",
        "algo.part.inner.inner": "plain",
        "algo.part.inner.inner.scale": 3.0,
        "algo.teams.red.part": "wrapped",
        "algo.teams.red.part.inner": "plain",
        "algo.teams.red.part.inner.scale": 4.0,
        "algo.teams.red.size": 1.0,
        "algo.teams.blue.part": "plain",
        "algo.teams.blue.part.scale": 1.0,
        "algo.teams.blue.size": 2.0,
    }
    assert launch.main([f"resume={tmp_path / 'run_0'}", "trust=true", "runner.n_steps=512"]) == 0
    assert json.loads((tmp_path / "run_0/result.json").read_text())["env_steps"] >= 512


def test_help_and_show_have_them(algo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--help", algo, *NESTED]) == 0
    text = capsys.readouterr().out
    assert "algo.part.inner=wrapped: Another within." in text
    assert "algo.part.inner.inner.scale=3" in text
    assert launch.main(["--show", algo, *NESTED, *TEAMS]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["algo.teams.red.part.inner.scale=4"] == ["command", "line"]
    assert lines["algo.teams.blue.part=plain"] == ["default"]


WRONG = {
    "algo.part.inner.inner.scal=3": "unknown key algo.part.inner.inner.scal; did you mean algo.part.inner.inner.scale?",
    "algo.teams.red.part.iner=plain": "unknown key algo.teams.red.part.iner; did you mean algo.teams.red.part.inner?",
    "algo.teams.red.part.inner=wraped": "part.inner=wraped: 'wraped' is not in toy_parts (plain, wrapped)",
    "algo.teams.green=plain": "algo.teams.green=plain: it takes no value, but has the keys algo.teams.green",
    "algo.part.inner.inner.scale=10": "scale=10.0 must be from 0 to 9",
}


@pytest.mark.parametrize(("word", "message"), WRONG.items())
def test_what_is_wrong_is_named_with_what_is_near(
    word: str, message: str, algo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = word.partition("=")[0]
    others = [each for each in [*NESTED, *TEAMS] if each.partition("=")[0] != key]
    assert launch.main([algo, *RUN, *others, word]) == 2
    assert message in capsys.readouterr().err


def test_keys_below_another_kind_are_left_out(algo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    below = "\n".join(word.replace("=", ": ", 1) for word in [algo, *NESTED])
    (tmp_path / "mine.yaml").write_text(below)
    assert launch.main(["--show", f"experiment={tmp_path}/mine.yaml", "algo.part=plain"]) == 0
    assert "algo.part.inner" not in capsys.readouterr().out


def test_a_strangers_nested_part_needs_trust(algo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"algo": "ppo", "algo.optimizer": "evil:Optimizer", "algo.teams.red": "os:system"}
    (tmp_path / "params.json").write_text(json.dumps({"config": config}))
    assert launch.main([f"experiment={tmp_path}/params.json"]) == 2
    text = capsys.readouterr().err
    assert "algo.optimizer=evil:Optimizer" in text
    assert "algo.teams.red=os:system" in text
