"""What may change from a saved state: numbers that no state depends on, compared in any form; they hold from there."""

import gc
import weakref
from pathlib import Path
from typing import Any

import chz
import pytest

import rlframe
from rlframe.algos import sac
from rlframe.core.config import fraction
from rlframe.core.errors import ConfigError, RecordError
from rlframe.core.field_effects import in_state
from rlframe.experiment.resumable import can_change
from rlframe.experiment.settings import from_flat

SETTINGS: dict[str, Any] = {
    "algo": "sac",
    "env": "Pendulum-v1",
    "n_steps": 64,
    "sampler": "serial",
    "threads": 1,
    "seed": 1,
    "model": {"hidden": (8, 8)},
    "algo.learning_starts": 16,
    "algo.batch_size": 4,
    "algo.replay_ratio": 1,
    "algo.learn_temperature": False,
    "algo.temperature": 0.1,
    "eval.n_episodes": 0,
    "log_level": "WARNING",
    "runner.log_interval_steps": 32,
    "affinity": "none",
    "env_kwargs.g": 9.0,
}


@chz.chz
class OwnConfig(sac.Config):
    """Of a user's own algorithm; states that it inherits from SAC hold here too."""

    IN_STATE = in_state("exponent")

    exponent: float = fraction(0.5, "of something that is stored")
    alpha: float = fraction(0.5, "of nothing that is stored")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of a run at 32 env_steps."""
    folder = tmp_path_factory.mktemp("state") / "saved"
    with rlframe.build(**SETTINGS) as run:
        while next(run)["env_steps"] < 32:
            pass
        run.save(folder)
    return folder


def restored(state: Path, **settings: Any) -> dict[str, float]:
    with rlframe.restore(state, **settings) as run:
        return run.train()


def test_numbers_hold_from_the_restored_state_on(state: Path) -> None:
    row = restored(state, **{**SETTINGS, "algo.learning_rate": "1e-4", "algo.temperature": 0.5, "algo.batch_size": 8})
    assert row["algo/learning_rate"] == pytest.approx(1e-4)
    assert row["algo/temperature"] == pytest.approx(0.5)
    assert row["updates"] < restored(state)["updates"], "larger batches are fewer"


def test_a_state_is_named_from_the_home_directory_too(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(state.parent))
    with rlframe.restore("~/saved") as run, rlframe.build(**SETTINGS, init=Path("~/saved")) as other:
        assert run.runner.env_steps == 32
        assert other.runner.env_steps == 0
        (state.parent / "full").write_text("")
        with pytest.raises(RecordError, match="full"):
            run.save("~/full/saved")


def test_a_run_goes_on_after_an_error_and_a_closed_one_says_so() -> None:
    with rlframe.build(**SETTINGS) as run:
        collect = run.sampler.collect
        run.sampler.collect = lambda: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            run.train()
        run.sampler.collect = collect  # type: ignore[method-assign]
        assert run.train()["env_steps"] >= 64
    with pytest.raises(ConfigError, match="this run is closed; save it before"):
        run.train()
    closed, opened = weakref.ref(run), rlframe.build(**SETTINGS)
    envs = weakref.ref(opened.runner)
    del run, opened, collect
    gc.collect()
    assert (closed(), envs()) == (None, None), "a run that nobody has any more closes itself"


def test_a_rate_set_while_it_trained_stays_unless_another_is_given(tmp_path: Path) -> None:
    with rlframe.build(**SETTINGS) as run:
        next(run)
        run.algo.learning_rate = 1e-5
        run.save(tmp_path / "saved")
    assert restored(tmp_path / "saved")["algo/learning_rate"] == pytest.approx(1e-5)
    for rate in (1e-4, 3e-4):  # the second is that of the config
        row = restored(tmp_path / "saved", **{"algo.learning_rate": rate})
        assert row["algo/learning_rate"] == pytest.approx(rate)


def test_all_settings_may_be_repeated_in_any_form(state: Path) -> None:
    again = {**SETTINGS, "algo.temperature": "0.10", "model": {}, "model.hidden": "[8, 8]", "precision": "auto"}
    assert restored(state, **again)["algo/loss"] == restored(state)["algo/loss"]


@pytest.mark.parametrize(
    ("words", "fixed"),
    [
        ({"algo": "dqn", "algo.prioritized": True}, "algo.alpha"),
        ({"algo": "dqn", "algo.prioritized": True, "algo.unique": True}, "algo.batch_size"),
        ({"algo": "dqn"}, "algo.explore.epsilon_last"),
        ({"algo": "cql", "algo.learn_conservative_weight": True}, "algo.conservative_weight"),
        ({"algo": "td3", "algo.explore": "parameter_noise"}, "algo.explore.sigma"),
        ({"algo": "td3", "algo.explore": "gsde"}, "algo.explore.sigma_last"),
        ({"algo": "dqn", "algo.explore": "boltzmann"}, "algo.explore.temperature_last"),
        ({"algo": "cql"}, "algo.temperature"),
        ({"algo": "ppo", "algo.optimizer": "sgd"}, "algo.optimizer.momentum"),
        ({"algo": "tests.experiment.test_resumable:OwnConfig"}, "algo.exponent"),
    ],
    ids=str,
)
def test_a_number_that_is_in_the_state_cannot_change(words: dict[str, Any], fixed: str) -> None:
    assert not can_change(fixed, from_flat({"env": "CartPole-v1", **words}))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (in_state("exponnt"), "IN_STATE of .*Config names exponnt, which is no field; did you mean exponent"),
        (in_state("exponent", weighted=True), "names weighted, which is no field"),
        (("exponent",), r"is made by idle_while\(...\) or in_state"),
    ],
    ids=str,
)
def test_what_a_config_says_of_its_state_is_checked(said: Any, message: str) -> None:
    config = chz.chz(type("OtherConfig", (OwnConfig,), {"IN_STATE": said, "__module__": __name__}))
    with pytest.raises(ConfigError, match=message):
        can_change("algo.exponent", from_flat({"algo": "sac"}).with_algos(lambda *_: config()))


def test_a_number_that_is_in_the_state_of_others_can_change() -> None:
    config = from_flat({"env": "CartPole-v1", "algo": "cql", "algo.learn_temperature": False})
    assert can_change("algo.temperature", config)
    assert can_change("algo.conservative_weight", config)
    assert can_change("algo.batch_size", config)
    assert can_change("algo.alpha", from_flat({"algo": "tests.experiment.test_resumable:OwnConfig"}))


@pytest.mark.parametrize(
    "changed",
    [{"seed": 2}, {"algo.discount": 0.9}, {"model.hidden": [9, 9]}, {"algo.learn_temperature": True}],
    ids=str,
)
def test_what_a_state_depends_on_cannot_change(changed: dict[str, Any], state: Path) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changed))} cannot change from the state of .*init="):
        rlframe.restore(state, **changed)
