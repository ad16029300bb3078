"""What a run chose for settings that are auto stays when it is resumed: another choice would round otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlframe import launch
from rlframe.core.config import AUTO
from rlframe.experiment import hardware
from rlframe.experiment.config import Experiment
from rlframe.experiment.job import read_job
from rlframe.experiment.train import _restarted
from rlframe.experiment.tuning import Way
from rlframe.samplers import auto, cpu, serial
from rlframe.system.distributed import RankInfo
from tests.experiment.hostile import WORDS

KEYS = dict(word.split("=", 1) for word in WORDS) | {"affinity": "none"}


def words(**changes: str) -> list[str]:
    return [f"{key.replace('__', '.')}={value}" for key, value in {**KEYS, **changes}.items()]


def choose(monkeypatch: pytest.MonkeyPatch, sampler: Any, threads: int) -> list[str]:
    """Let measurements come out so; returns what is measured."""
    measured: list[str] = []

    def of_samplers(experiment: Experiment, *_: Any) -> auto.SamplerChoice:
        measured.append("sampler")
        return auto.SamplerChoice(sampler, "measured")

    def of_threads(*_: Any) -> tuple[Way, str]:
        measured.append("threads")
        return Way(1, threads), "measured"

    monkeypatch.setattr(hardware, "_choice_for", of_samplers)
    monkeypatch.setattr(hardware, "fastest", of_threads)
    monkeypatch.setattr(hardware, "ways_to_learn", lambda *_: [])
    return measured


def params(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "params.json").read_text())
    return found


def test_a_resumed_run_keeps_the_sampler_and_the_threads_that_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = hardware.affinity_of
    monkeypatch.setattr(hardware, "affinity_of", lambda *where: replace(whole(*where), threads=2))
    measured = choose(monkeypatch, serial.Config(batch_T=8, batch_B=4), 2)
    assert launch.main([*words(sampler="auto", threads="auto"), f"log_dir={tmp_path}"]) == 0
    run = tmp_path / "run_0"
    assert measured == ["sampler", "threads"]
    precision = params(run)["config"]["precision"]  # that this machine is fast in
    assert params(run)["chosen"] == {"sampler": "serial", "threads": 2, "compile": "false", "precision": precision}
    assert params(run)["config"]["threads"] in (AUTO, "auto"), "what was asked"
    measured = choose(monkeypatch, cpu.Config(batch_T=8, batch_B=4, n_workers=2), 1)
    assert launch.main([f"resume={run}", "runner.n_steps=96", "sampler=auto"]) == 0
    assert measured == []
    assert params(run)["chosen"] == {"sampler": "serial", "threads": 2, "compile": "false", "precision": precision}
    said = capsys.readouterr().out
    assert "sampler=auto: serial, as before" in said
    assert "learning: 2 threads, as before" in said
    assert "CPU, 2 torch threads" in said or "cpu, 2 torch threads" in said


def test_a_precision_that_was_asked_for_is_not_the_machines_choice(tmp_path: Path) -> None:
    assert launch.main([*words(precision="fp32"), f"log_dir={tmp_path}"]) == 0
    assert "precision" not in params(tmp_path / "run_0")["chosen"]
    preset = tmp_path / "preset.yaml"
    preset.write_text("config: {precision: fp32}\n")
    assert not read_job({"experiment": str(preset)}).left_to_machine("precision")
    assert read_job({"experiment": str(preset), "precision": "auto"}).left_to_machine("precision")


def test_a_sampler_is_chosen_anew_where_that_is_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "run_0"
    assert launch.main([*words(), f"log_dir={tmp_path}"]) == 0
    asked = {"resume": str(run), "sampler": "auto"}
    assert isinstance(read_job(asked).experiment.sampler, serial.Config)
    assert isinstance(read_job({**asked, "tune_sampler": "true"}).experiment.sampler, auto.Config)
    assert isinstance(read_job({**asked, "sampler": "cpu"}).experiment.sampler, cpu.Config)


@pytest.mark.parametrize("threads", [10**9, -1, 0, "2", 1.5, True, None, [2]])
def test_threads_that_no_run_here_can_have_chosen_are_chosen_anew(
    threads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = choose(monkeypatch, None, 1)
    folder = tmp_path / "run_0"
    folder.mkdir()
    config = {key: value for key, value in KEYS.items() if key != "affinity"}
    config |= {"threads": "auto", "algo": "ppo", "affinity": "none"}
    (folder / "params.json").write_text(json.dumps({"config": config, "chosen": {"threads": threads}}))
    job = read_job({"resume": str(folder)})
    assert hardware.resolve(job.experiment, threads=job.threads).affinity.threads == 1
    assert measured == ["threads"]


def test_ranks_that_torchrun_restarts_keep_what_their_job_chose(tmp_path: Path) -> None:
    auto = {"sampler": "auto", "threads": "auto", "tune_sampler": "true"}
    job, place = read_job({**KEYS, **auto, "log_dir": str(tmp_path)}), RankInfo(job="one")
    assert _restarted(job, place) is job, "it starts"
    assert launch.main([*words(sampler="cpu", sampler__n_workers="2", threads="1"), f"log_dir={tmp_path}"]) == 0
    file = tmp_path / "run_0/params.json"
    content = params(tmp_path / "run_0")
    config = content["config"] | {"precision": job.experiment.precision, "threads": "auto", "log_dir": str(tmp_path)}
    file.write_text(json.dumps({**content, "config": config, "chosen": {"sampler": "cpu", "threads": 1}}))
    again = _restarted(job, place)
    assert isinstance(again.experiment.sampler, cpu.Config)
    assert (again.experiment.sampler.n_workers, again.threads) == (2, 1)
    assert (again.resume, again.tune_sampler) == (str(tmp_path / "run_0"), False), "it is tuned already"
    assert _restarted(job, RankInfo()) is job, "without torchrun"
