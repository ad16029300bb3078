"""env_vars.NAME=value: which processes have it and when, what is recorded, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import rlframe
from rlframe import launch
from rlframe.core.errors import ConfigError
from rlframe.experiment.job import read_job
from rlframe.experiment.presets import early_env_vars
from rlframe.experiment.settings import from_flat, to_flat
from rlframe.launch import main
from rlframe.system.env_vars import env_vars_of_worker, env_vars_set
from tests.experiment.seen import Seen

SMALL: dict[str, Any] = {
    "sampler.batch_T": 8,
    "sampler.batch_B": 2,
    "algo.minibatches": 1,
    "algo.epochs": 1,
    "model.hidden": [4],
    "eval.n_episodes": 0,
}


@pytest.mark.parametrize("sampler", ["serial", pytest.param("cpu", marks=pytest.mark.slow)])
def test_environments_see_the_variables_and_this_process_is_as_before(sampler: str, tmp_path: Path) -> None:
    words = {"sampler": sampler, **({"sampler.n_workers": 1} if sampler == "cpu" else {})}
    result = rlframe.train("ppo", Seen, n_steps=64, log_dir=str(tmp_path), env_vars={"RLF_TEST": "7"}, **SMALL, **words)
    assert result.metrics["episode/return_mean"] == 7
    assert "RLF_TEST" not in os.environ
    assert json.loads((result.directory / "params.json").read_text())["config"]["env_vars"] == {"RLF_TEST": "7"}


def test_those_of_workers_are_in_workers_alone(tmp_path: Path) -> None:
    given = {"RLF_TEST": "7", "workers.RLF_TEST": "9"}
    words = {"sampler": "cpu", "sampler.n_workers": 1, "log_dir": str(tmp_path), "n_steps": 64, **SMALL}
    with rlframe.build("ppo", Seen, env_vars=given, **words) as run:
        assert os.environ["RLF_TEST"] == "7"
        assert run.train()["episode/return_mean"] == 9
    assert from_flat({"env_vars.workers.RLF_TEST": "9"}).env_vars == {"workers.RLF_TEST": "9"}
    assert not [name for name in os.environ if name.startswith(("RLF_", "RLFRAME_ENV_VARS"))]
    with env_vars_set({"workers.RLF_TEST": "2", "RLF_TEST": "1", "RLF_OTHER": "3"}):
        assert env_vars_of_worker() == {"RLF_TEST": "2", "RLF_OTHER": "3"}, "of an actor of Ray"


def test_a_live_run_has_them_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLF_TEST", "3")
    with rlframe.build(
        "ppo", Seen, n_steps=64, env_vars={"RLF_TEST": "8", "RLF_OTHER": "x"}, sampler="serial", **SMALL
    ) as run:
        assert os.environ["RLF_OTHER"] == "x"
        assert run.train()["episode/return_mean"] == 8
    assert (os.environ["RLF_TEST"], os.environ.get("RLF_OTHER"), env_vars_of_worker()) == ("3", None, {})


def test_values_are_text_as_it_is_written() -> None:
    given = from_flat({"env_vars": "{A: 1, B: true, C: x}", "env_vars.D": "1e3", "env_vars.E": ""})
    assert given.env_vars == {"A": "1", "B": "true", "C": "x", "D": "1e3", "E": ""}
    assert from_flat(to_flat(given)).env_vars == given.env_vars
    assert from_flat({"env_vars": {"A": "1"}}, {"env_vars.A": "2"}).env_vars == {"A": "2"}


def test_they_are_set_before_torch_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("config: {env: CartPole-v1, env_vars.RLF_A: 2}\n", encoding="utf-8")
    seen: dict[str, str] = {}
    monkeypatch.setattr(launch, "_launch_with", lambda words: seen.update(os.environ) or 0)  # imports torch
    assert main([f"experiment={preset}", "env_vars.RLF_B=1e3"]) == 0
    assert (seen["RLF_A"], seen["RLF_B"]) == ("2", "1e3")
    assert "RLF_A" not in os.environ
    params = tmp_path / "params.json"
    params.write_text(json.dumps({"config": {"env_vars": {"A": "3"}}}), encoding="utf-8")
    foreign = {"resume": str(tmp_path), "env_vars.B": "4"}
    assert early_env_vars(foreign) == {"B": "4"}
    assert early_env_vars({**foreign, "trust": "true"}) == {"A": "3", "B": "4"}


def test_a_run_of_another_person_sets_none_without_trust(tmp_path: Path) -> None:
    config = to_flat(from_flat({"env_vars.SDL_DYNAMIC_API": "./evil.so"}))
    (tmp_path / "params.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    words = {"experiment": f"{tmp_path}/params.json"}
    with pytest.raises(ConfigError, match=r"env_vars=.*evil.*trust=true"):
        read_job(words)
    assert read_job({**words, "trust": "true"}).experiment.env_vars == {"SDL_DYNAMIC_API": "./evil.so"}


REFUSED = {
    "env_vars.LD_PRELOAD=x": "env_vars.LD_PRELOAD cannot be set here: set it in the shell",
    "env_vars.PYTHONPATH=x": "cannot be set here: set it in the shell",
    "env_vars.OMP_NUM_THREADS=4": "cannot be set here: use threads=",
    "env_vars.MKL_CBWR=AUTO": "cannot be set here: rlframe sets it",
    "env_vars.WORLD_SIZE=2": "use world_size= or torchrun",
    "env_vars.a.b=1": "env_vars.a.b: a name of an environment variable has letters, digits and _ alone",
    "env_vars={A: [1]}": "env_vars.A must be text",
    "env_vars=3": "must be a mapping; write env_vars.name=value",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_set_is_one_line_with_the_remedy(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert REFUSED[word] in error
    assert error.count("\n") == 1


def test_an_error_leaves_the_variables_as_they_were() -> None:
    with pytest.raises(ZeroDivisionError), env_vars_set({"RLF_TEST": "1"}):
        raise ZeroDivisionError
    assert "RLF_TEST" not in os.environ
    assert not env_vars_of_worker()
