"""device= and init=: what is no device, and a snapshot that holds no weights, are refused in one line."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.core.errors import ConfigError
from rlframe.core.types import BatchSpec
from rlframe.experiment.build import make_agent
from rlframe.experiment.settings import from_flat
from rlframe.experiment.weights import load_optimizers, load_weights
from rlframe.kernels.device import choose_device
from rlframe.launch import main
from rlframe.record.snapshot import save_snapshot
from tests.experiment.test_limits import CHOICE, VECTOR

NAMES = ["meta", "mps", "xpu", "xla", "vulkan", "hip", "hpu", "mtia", "lazy", "opengl", "privateuseone"]


@pytest.mark.parametrize("name", NAMES)
def test_a_device_that_torch_cannot_compute_on_is_refused(name: str) -> None:
    if (name == "mps" and torch.backends.mps.is_available()) or (name == "xpu" and torch.xpu.is_available()):
        pytest.skip("this machine has one")
    with pytest.raises(ConfigError) as error:
        choose_device(name)
    assert f"device={name} cannot be used here (" in str(error.value)
    assert str(error.value).endswith("; use auto, cpu or cuda:0")
    assert len(str(error.value)) < 250


def agent(init: str = "") -> Any:
    experiment = from_flat({"model.hidden": [8], "init": init})
    return make_agent(experiment, VECTOR, CHOICE, torch.device("cpu"))


def saved(folder: Path, state: Any) -> str:
    return str(save_snapshot(folder / "snapshot", {"agent": state}, {"env_steps": 0}))


MALFORMED = {
    "a list": [1, 2],
    "a number": 3,
    "nothing": None,
    "text": "weights",
    "a tensor": torch.zeros(3),
    "numbers": {"model.log_std": 3},
    "lists": {"model.log_std": [1.0]},
    "dicts": {"model": {"log_std": torch.zeros(1)}},
    "complex": {"model.log_std": torch.zeros(1, dtype=torch.complex64)},
}


@pytest.mark.parametrize("state", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_snapshot_without_weights_is_refused_in_one_line(tmp_path: Path, state: Any) -> None:
    source = saved(tmp_path, state)
    with pytest.raises(ConfigError, match=r"holds no weights of a network.*; use another snapshot") as error:
        agent(source)
    assert source in str(error.value)
    with pytest.raises(ConfigError, match="holds no weights of a network"):
        load_weights(agent(), state, source)


@pytest.mark.parametrize("change", ["fewer", "more", "shape", "empty"])
def test_weights_of_another_network_are_refused_in_one_line(tmp_path: Path, change: str) -> None:
    state = dict(agent().state_dict())
    name = next(iter(state))
    match change:
        case "fewer":
            del state[name]
        case "more":
            state["other"] = torch.zeros(1)
        case "shape":
            state[name] = torch.zeros(2, 3, 4)
        case "empty":
            state = {}
    with pytest.raises(ConfigError, match="holds another network"):
        agent(saved(tmp_path, state))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_no_numbers_are_refused_with_the_name(tmp_path: Path, value: float) -> None:
    state = {name: x.clone() for name, x in agent().state_dict().items()}
    name = next(name for name in state if name.endswith("weight"))
    state[name][0] = value
    with pytest.raises(ConfigError, match=f"holds NaN or Inf in {re.escape(name)}; use another snapshot"):
        agent(saved(tmp_path, state))


def test_launch_says_so_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path, [1])
    words = ["env=CartPole-v1", "sampler=serial", f"init={source}", f"log_dir={tmp_path / 'runs'}"]
    assert main(words) == 2
    assert (
        f"error: init={source} holds no weights of a network, but list; use another snapshot" in capsys.readouterr().err
    )
    assert not (tmp_path / "runs").exists()


def test_weights_of_another_network_are_refused_with_what_their_run_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["env=CartPole-v1", "algo=ppo", "sampler=serial", "runner.n_steps=64", "eval.n_episodes=0"]
    words += ["sampler.batch_T=16", "sampler.batch_B=4", "affinity=none"]
    assert main([*words, "model.hidden=[8,4]", f"log_dir={tmp_path}"]) == 0
    assert main([*words, f"init={tmp_path / 'run_0'}", f"log_dir={tmp_path / 'more'}"]) == 2
    assert capsys.readouterr().err.strip().endswith("; its run has model.hidden=[8,4]")


def test_a_study_whose_weights_are_not_there_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["env=CartPole-v1", "repeats=2", f"init={tmp_path / 'gone'}", f"log_dir={tmp_path / 'study'}"]
    assert main(words) == 2
    assert f"init={tmp_path / 'gone'}: there is no such run directory or snapshot" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()
    (tmp_path / "study").mkdir()  # an empty one is no study that has begun
    assert main([*words, "dry_run=true"]) == 2
    assert "there is no such run directory or snapshot" in capsys.readouterr().err


@pytest.mark.parametrize("state", [{}, {"optimizer": 3}, {"optimizer": {}}, {"optimizer": {"optimizer": 3}}], ids=str)
def test_a_malformed_state_of_an_optimizer_is_refused_in_one_line(state: Any) -> None:
    experiment, made = from_flat({"model.hidden": [8]}), agent()
    algo = experiment.algo.make_algorithm(made, BatchSpec(8, 4), 1_000, 0)
    before = [x.clone() for x in made.parameters()]
    with pytest.raises(ConfigError, match="init_with=optimizers: "):
        load_optimizers(algo, state, "there")
    torch.testing.assert_close(list(made.parameters()), before)
