"""A sampler of the user's own by key, from docs/guides/extend.md: it learns, and is resumed exactly."""

import json
from pathlib import Path
from typing import Any

import pytest

import rlframe
from rlframe import launch
from rlframe.algos.defaults import Kind
from rlframe.experiment import defaults
from rlframe.experiment.trust import foreign
from rlframe.rollout.collector import Collector
from tests.blocks import saved_block
from tests.runners.resumed import assert_resumed_exactly, log, words

RUN = (
    "algo=ppo sampler.batch_T=16 sampler.batch_B=4 model.hidden=[8] algo.minibatches=2 algo.epochs=2 eval.n_episodes=1 "
    "eval.n_envs=1 "
    "runner.n_steps=160 runner.log_interval_steps=80"
)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The words that name the sampler of the docs, from a file of its own for each test."""
    monkeypatch.setattr(defaults, "_seen", lambda pickled, here: Kind.VECTORS)
    file = saved_block("my_sampler", "guides/extend", tmp_path, monkeypatch)
    return f"sampler={file}:LineConfig env={file.stem}:Line"


def test_a_sampler_of_your_own_is_named_by_key_and_resumed_exactly(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = assert_resumed_exactly(f"{RUN} {mine}", tmp_path, monkeypatch)
    config = json.loads((run / "params.json").read_text())["config"]
    assert config["sampler"].endswith(":LineConfig")
    assert any(key.startswith("sampler=") for key in foreign(config)), "a config with it needs trust=true"


@pytest.mark.slow
def test_it_gives_what_a_sampler_of_rlframe_gives(mine: str, tmp_path: Path) -> None:
    options = "algo.learning_rate=1e-2 runner.n_steps=3_000 runner.log_interval_steps=1_000"
    case = RUN.replace("runner.n_steps=160 runner.log_interval_steps=80", options)
    rows = {}
    for name, given in {"own": mine, "serial": mine.replace(mine.split()[0], "sampler=serial")}.items():
        assert launch.main(words(f"{case} {given}", tmp_path / name)) == 0
        rows[name] = log(tmp_path / name / "run_0")[-1]
        assert float(rows[name]["eval/return_mean"]) == 1
    assert float(rows["own"]["episode/length_mean"]) == pytest.approx(float(rows["serial"]["episode/length_mean"]), 0.3)


def test_an_unknown_key_of_it_is_refused_by_name(mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words(f"{RUN} {mine} sampler.n_groups=2", tmp_path)) == 2
    assert "unknown key sampler.n_groups" in capsys.readouterr().err


WRONG = {
    "collect(self):\n        return super().collect()": "",
    "collect(self):\n        return None": "collect of the sampler gave a NoneType",
    "collect(self):\n        found = super().collect()\n"
    "        return replace(found, n_env_steps=found.valid.sum())": "n_env_steps is a Tensor; make it an int",
}


@pytest.mark.parametrize("collect", WRONG)
def test_what_it_collects_is_checked_in_one_line(
    collect: str, mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(mine.split(":")[0].removeprefix("sampler="))
    code = file.read_text().replace("return LineSampler(", "return Changed(")
    file.write_text(f"{code}\n\nfrom dataclasses import replace\n\n\nclass Changed(LineSampler):\n    def {collect}\n")
    status = launch.main(words(f"{RUN} {mine}", tmp_path / "runs"))
    assert status == (2 if WRONG[collect] else 0)
    assert WRONG[collect] in capsys.readouterr().err


SOURCE = """

@chz.chz
class NoMake(SamplerConfig): ...


@chz.chz
class Forgot(LineConfig):
    def make_sampler(self, envs, agent, seed): ...


@chz.chz
class Partial(LineConfig):
    def make_sampler(self, envs, agent, seed):
        made = super().make_sampler(envs, agent, seed)
        del LineSampler.backend
        return made
"""
FAULTS = {
    "NoMake": "NoMake needs make_sampler(envs, agent, seed), which returns the sampler",
    "Forgot": "make_sampler of Forgot gave a NoneType; return the sampler, a rlframe.samplers.Source",
    "Partial": "make_sampler of Partial gave a LineSampler without backend; set it in __init__",
    "Absent": "has no Absent",
}


@pytest.mark.parametrize(("name", "more"), [*((name, "") for name in FAULTS), ("Forgot", " runner=async_rl")])
def test_what_makes_no_sampler_is_refused_in_one_line(
    name: str, more: str, mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(mine.split(":")[0].removeprefix("sampler="))
    file.write_text(file.read_text() + SOURCE)
    assert launch.main(words(f"{RUN} {mine.replace('LineConfig', name)}{more}", tmp_path / "runs")) == 2
    said = capsys.readouterr().err
    assert FAULTS[name] in said
    assert said.count(f"sampler={file}") <= 1
    assert "Traceback" not in said


def test_a_config_of_another_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words("algo=ppo sampler=rlframe.runners.offline_rl:OfflineRlConfig", tmp_path)) == 2
    assert "must be a name such as auto, or a Config of rlframe.samplers" in capsys.readouterr().err


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the collector of the docs."""
    return saved_block("my_collector", "guides/extend", tmp_path, monkeypatch)


def test_a_collector_of_your_own_fills_batches_as_ours_does_and_is_resumed_exactly(
    collector: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "_seen", lambda pickled, here: Kind.VECTORS)
    mine = f"env=CartPole-v1 sampler=serial sampler.collector={collector}:Timed"
    run = assert_resumed_exactly(f"{RUN} {mine}", tmp_path / "mine", monkeypatch)
    ours = assert_resumed_exactly(f"{RUN} env=CartPole-v1 sampler=serial", tmp_path / "ours", monkeypatch)
    assert log(run) == log(ours)
    assert any(
        key.startswith("sampler.collector=") for key in foreign(json.loads((run / "params.json").read_text())["config"])
    )


class Marking(Collector):
    """Leaves a mark in every row."""

    def run_steps(self, start: int) -> None:
        super().run_steps(start)
        info: Any = self.batch.outputs.info
        info.value[...] = 7


WORKERS = {"sampler.n_workers": 2}


@pytest.mark.parametrize(
    ("kind", "more"),
    [("serial", {}), ("cpu", WORKERS), ("gpu", WORKERS), ("gpu", {**WORKERS, "sampler.n_groups": 2})],
)
def test_every_sampler_takes_a_collector(kind: str, more: dict[str, Any]) -> None:
    settings = {"sampler": kind, "sampler.batch_T": 8, "sampler.batch_B": 4, "algo.minibatches": 2, **more}
    with rlframe.build("ppo", "CartPole-v1", n_steps=99, **settings, **{"sampler.collector": Marking}) as run:
        samples = run.runner.sampler.collect()
        assert bool((samples.info.value == 7).all())
        assert run.runner.sampler.config.collector.endswith(":Marking")


@pytest.mark.parametrize("wrong", ["math:sqrt", "my_absent_module:Timed", "rlframe.rollout:WorkerPool"])
def test_a_collector_that_is_none_is_an_error_before_anything_starts(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*RUN.split(), "env=CartPole-v1", "sampler=cpu", f"sampler.collector={wrong}", f"log_dir={tmp_path}"]
    for more in ("dry_run=true", "dry_run=false"):
        assert launch.main([*words, more]) == 2
        assert f"sampler.collector={wrong}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
