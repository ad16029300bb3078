"""Every number of every config refuses what means nothing, by name, before anything starts."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import chz
import pytest
from gymnasium import spaces

from rlframe import launch
from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError
from rlframe.core.parts import GROUPS, Part, known_keys, module_names
from rlframe.core.schedule import Scheduled
from rlframe.experiment.config import Experiment
from rlframe.experiment.settings import from_flat
from rlframe.exploration import POLICY_KINDS, Q_KINDS, SAMPLE_KINDS

BAD = ["nan", "inf", "-1", "1e300", "ten", ""]
ALIKE = ["-nan", "-inf", "-1e-9", "-1e300", "1e999", "0x10", "1,5", "None"]
SIGNED = {  # may be negative
    *("log_std", "least_log_std", "v_min", "v_max", "munchausen_clip"),
    *("target_entropy", "target_gap", "target_return"),
}
INFINITE = {
    "max_grad_norm",
    "rho_clip",
    "c_clip",
    "interval_steps",
    "clip",
    "kl_coef_target",
    "huber_delta",
    "most_weight",
}  # never
WITH_AUTO = {"threads", "learners", "n_workers", "random_steps"}  # -1 is what auto is in params.json


PARTS = {key: x.package for key, x in known_keys(Experiment, {"algo": "dqn"}).items() if isinstance(x, Part)}


def fields(config: type, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Key, type and default of every field, and of those of configs inside."""
    hints = typing.get_type_hints(config)
    for name, field in chz.chz_fields(config).items():
        kind = float if hints.get(name) == Scheduled else hints.get(name)
        if isinstance(kind, type) and chz.is_chz(kind):
            yield from fields(kind, f"{prefix}{GROUPS.get(name, name)}.")
        else:
            yield f"{prefix}{name}", kind, field._default


def algo_of(explore: str) -> str:
    """An algorithm that an exploration fits."""
    kinds = {"dqn": Q_KINDS, "ppo": POLICY_KINDS, "sac": SAMPLE_KINDS}
    return next((algo for algo, its in kinds.items() if explore in its), "td3")


def all_fields() -> list[tuple[dict[str, str], str, Any, Any]]:
    """Every field that the command line takes: what names its part, key, type and default."""
    found: dict[tuple[str, str], tuple[dict[str, str], str, Any, Any]] = {}
    for key, kind, default in fields(Experiment, ""):
        if key not in PARTS:
            found["", key] = {}, key, kind, default
    for part, package in PARTS.items():
        for name in module_names(package):
            algo = {"algo.explore": algo_of(name), "algo.replay": "dqn"}.get(part)
            given = {part: name, **({"algo": algo} if algo else {})}
            for key, kind, default in fields(type(attrgetter(part)(from_flat(given))), f"{part}."):
                found[name, key] = given, key, kind, default
    return list(found.values())


def numbers() -> list[tuple[dict[str, str], str, Any, Any]]:
    """The ints and floats of them."""
    return [each for each in all_fields() if each[2] in (int, float)]


def may_be_meant(key: str, kind: type, default: Any, value: str) -> bool:
    name = key.rpartition(".")[2]
    try:
        number = float(value)
    except ValueError:
        return False
    if kind is int:
        return number == AUTO and name in WITH_AUTO
    if not math.isfinite(number):
        return (
            number == default
            or (number > 0 and name in INFINITE)
            or (math.isnan(number) and isinstance(default, float) and math.isnan(default))
        )
    return number >= 0 or name in SIGNED


@pytest.mark.parametrize("values", [BAD, *(pytest.param([each], marks=pytest.mark.slow) for each in [*BAD, *ALIKE])])
def test_a_number_that_means_nothing_is_refused_with_its_key(values: list[str]) -> None:
    known = numbers()
    assert len(known) > 120
    for i, (part, key, kind, default) in enumerate(known):
        bad = values[i % len(values)]  # each field has one of them
        if may_be_meant(key, kind, default, bad):
            continue
        said = ""
        try:
            from_flat({**part, key: bad})
        except ConfigError as error:
            said = str(error)
        assert key.rpartition(".")[2] in said, f"{part} {key}={bad}: {said or 'accepted'}"
        assert "\n" not in said


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("ppo", "max_grad_norm"),
        ("ppo", "clip"),
        ("appo", "clip"),
        ("dqn", "batch_size"),
        ("sac", "temperature"),
        ("td3", "policy_interval"),
    ],
)
def test_zero_is_refused_where_nothing_would_be_learned(part: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"algo.{key}=0"):
        from_flat({"algo": part, f"algo.{key}": "0"})


WORDS = ["perhaps", "-1", "os:getpid", "[]", "{", ""]
WORDS_ALIKE = ["2", "nan", "\t", "a b", "../x", "None"]
WRITTEN_AS = {"map_function": "agents.map"}
ANY_TEXT = {"name", "log_dir", "record", "snapshot_best", "sync"}  # names that the user chooses
EMPTY = {"init", "callbacks", "statistics", "loggers", "wrappers", "reward_clip", "estimate"}  # none
EMPTY |= {"opponents", "members", "train"}


EACH_WORD = [pytest.param([each], marks=pytest.mark.slow) for each in [*WORDS, *WORDS_ALIKE]]


@pytest.mark.parametrize("words", [WORDS, *EACH_WORD])
def test_a_word_that_a_field_does_not_know_is_refused_with_its_key(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = set()
    for i, (part, key, kind, default) in enumerate(all_fields()):
        name, word = key.rpartition(".")[2], words[i % len(words)]
        if kind in (int, float) or name in ANY_TEXT or (name in EMPTY and not word.strip("[] \t")) or word == default:
            continue
        if kind == tuple[int, ...] and word.strip() in ("2", "[]", ""):
            continue  # a list
        if typing.get_origin(kind) is Mapping and word in ("", "None"):
            continue
        if part.get("sampler") == "ray" and name == "statistics":
            continue  # found in the actors
        if name == "transform" and word == "os:getpid":
            continue  # a function, as it should be
        if name in ("explore", "bonus") and word == "None":
            continue  # none, which may be written so
        seen.add(name)
        given = [f"{k}={v}" for k, v in {"env": "CartPole-v1", **part, key: word}.items()]
        assert launch.main([*given, f"log_dir={tmp_path / 'runs'}"]) == 2, f"{part} {key}={word!r} was accepted"
        said = capsys.readouterr().err
        assert WRITTEN_AS.get(name, name) in said, f"{part} {key}={word!r}: {said}"
        assert len(said.splitlines()) == 1
    assert len(seen) > 20
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("value", ["100", "-30"])
def test_a_deviation_that_overflows_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"model.log_std=.* must be from -20 to 10"):
        from_flat({"model.log_std": value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"seed": 10**18},
            "seed=1000000000000000000 must be at most 9,007,199,254,740,992; larger numbers are not exact",
        ),
        ({"model.hidden": [10**18]}, "model.hidden=[1000000000000000000] must be at most 9,007,199,254,740,992"),
        ({"learners": 10**18}, "learners=1000000000000000000 must be at most 9,007,199,254,740,992"),
        (
            {"algo.clip": "'linear(1,2)'"},
            "algo.clip='linear(1,2)': \"'linear(1,2)'\" is neither a number nor a schedule",
        ),
        ({"algo.clip": 'it\'s\n"x"'}, "is neither a number nor a schedule"),
        ({"sampler.discount": 1.5}, "sampler.discount=1.5 must be from 0 to 1, or nan"),
        ({"algo.max_grad_norm": 1e300}, "algo.max_grad_norm=1e+300 must be from -3.4e+38 to 3.4e+38, the range of fl"),
        ({"model.log_std": -1e300}, "model.log_std=-1e+300 must be from -20 to 10"),
        ({"algo": "dqn", "algo.v_min": -1e300}, "algo.v_min=-1e+300 must be from -3.4e+38 to 3.4e+38, the"),
        ({"algo.clip": "linear(0.1, 1e300)"}, "algo.clip=linear(0.1, 1e300) must be from -3.4e+38 to 3.4e+38, the"),
        ({"seed": [1]}, "seed=[1]: '[1]' is not a number"),
        ({"seed": "1,2,3"}, "seed=1,2,3: '1,2,3' is not a number; values of several runs are written sweep.KEY=1,2,3"),
        ({"algo.clip": "[0.1,0.2]"}, "linear(3e-4,3e-5); values of several runs are written sweep.KEY=1,2,3"),
        ({"model.hidden": [[1]]}, "model.hidden=[[1]]: '[[1]]' is not a list of whole numbers such as [64,64]"),
        (
            {"env_kwargs": "{a: 1}", "env_kwargs.a": 2},
            "env_kwargs.a is set twice, also in env_kwargs={...}; remove one",
        ),
        (
            {"model.encoder": "torch.nn:Identity", "model.encoder.kwargs.a": 2},
            "unknown key model.encoder.kwargs: model.encoder has no keys below it",
        ),
        ({"trust": True}, "trust=True is no setting of a run: it is for the command line"),
        ({"resume": "x"}, "resume=x is no setting of a run: it is for the command line"),
        ({"sweep.seed": [0, 1]}, "sweep.seed=[0, 1] is no setting of a run: it is for a study, with"),
        (
            {"seeds": "outermost"},
            "seeds=outermost is no setting of a run: it is for a study, with sweep.KEY=, search.KEY= or repeats=",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_the_rule_that_it_breaks(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_flat(settings)
    assert message in str(error.value)
    assert "factory" not in str(error.value)


def test_settings_of_two_layers_may_name_one_argument_in_both_ways() -> None:
    assert from_flat({"env_kwargs": {"a": 1, "b": 2}}, {"env_kwargs.a": "3"}).env_kwargs == {"a": 3, "b": 2}


LONG = ["x" * 70_000, "1" * 70_000, "it's " * 20_000, "1," * 30_000 + "x", "{" * 70_000, "y" * 16_000]


@pytest.mark.parametrize("text", LONG, ids=["letters", "digits", "quotes", "list", "brackets", "shorter"])
@pytest.mark.parametrize(
    "key",
    [
        *("algo", "algo.learning_rate", "algo.optimizer", "algo.discount", "seed", "model.hidden", "model.encoder"),
        *("stop", "snapshot_mode", "env_kwargs", "env.reward_clip", "eval.interval_steps", "eval.n_envs"),
    ],
)
def test_an_error_shows_the_beginning_of_a_long_value(key: str, text: str) -> None:
    if key == "model.encoder":
        text = f"{text}:x"
    with pytest.raises(ConfigError) as error:
        build_with(key, text)
    assert key.rpartition(".")[2] in str(error.value)
    assert text[:10] in str(error.value)
    assert len(str(error.value)) < 2_100


def build_with(key: str, text: str) -> None:
    experiment = from_flat({key: text})
    experiment.algo.make_agent(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), experiment.model, 0)


def test_an_error_of_any_length_keeps_its_beginning_and_its_end() -> None:
    error = str(ConfigError(f"init={'x' * 100_000} is no directory; name one"))
    assert error.startswith("init=xxx")
    assert error.endswith("xxx is no directory; name one")
    assert len(error) < 2_100
