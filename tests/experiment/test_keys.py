"""What --help, --show and --list say of keys and parts."""

import json
from pathlib import Path

import chz
import pytest

from rlframe.core.field_effects import declared_in
from rlframe.core.parts import ROOTS, Part, module_names
from rlframe.experiment.job import read_job
from rlframe.experiment.keys import KINDS, idle_keys, keys_of
from rlframe.experiment.presets import preset_names
from rlframe.experiment.settings import from_flat, to_flat
from rlframe.launch import main
from rlframe.models import ModelConfig
from rlframe.rewards.curiosity import RNDConfig
from rlframe.runners.league import LeagueConfig

SMALL = [
    "env=CartPole-v1",
    "sampler=serial",
    "sampler.batch_T=16",
    "sampler.batch_B=4",
    "runner.n_steps=128",
    "eval.n_episodes=2",
    "algo.epochs=1",
    "algo.minibatches=1",
]


def test_help_lists_every_key_and_preset(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert [key for key in to_flat(read_job({}).experiment) if f"{key}=" not in printed] == []
    assert [name for name in preset_names() if name not in printed] == []


@pytest.mark.parametrize(
    ("words", "has", "has_not"),
    [
        (["algo=sac"], ["algo.tau=0.005 ", "how far the target critics move", "Haarnoja"], ["algo.clip"]),
        (
            ["experiment=atari/ppo_pong"],
            ["algo.learning_rate=linear(5e-4,0) ", "Schulman", "env=ALE/Pong-v5"],
            ["algo.tau"],
        ),
        (["runner=async_rl", "algo.clip=0.3"], ["runner.n_slots=", "algo.clip=0.3 "], []),
        (["algo=sac", "sweep.seed=0,1", "repeats=2", "dry_run=true", "log_dir=d"], ["algo.tau=0.005 "], ["algo.clip"]),
        ([], ["threads=0 ", "sampler.n_workers=auto ", "eval.explore=false ", "model.hidden=[64,64] "], []),
    ],
    ids=str,
)
def test_help_is_of_the_parts_on_the_line_with_the_values_they_would_have(capsys, words, has, has_not):
    assert main([*words, "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in has)
    assert not any(text in printed for text in has_not)


def test_help_names_a_key_that_is_unknown(capsys):
    assert main(["algo=sac", "algo.clip=1", "--help"]) == 2
    assert "unknown key algo.clip" in capsys.readouterr().err


def test_what_help_and_show_print_can_be_typed(capsys):
    assert main(["algo=td3", "algo.learning_rate=0.000123456789", "env=Pendulum-v1", "env_kwargs.g=9.0", "--show"]) == 0
    printed = [line.rpartition("  ")[0].strip() for line in capsys.readouterr().out.splitlines()]
    words = [word for word in printed if not word.startswith(("env_kwargs=", "eval.env_kwargs="))]
    experiment = from_flat(dict(word.split("=", 1) for word in words))
    meant = read_job({"algo": "td3", "algo.learning_rate": 0.000123456789, "env": "Pendulum-v1"}).experiment
    assert to_flat(experiment) == to_flat(meant)
    assert "env_kwargs={g: 9.0}" in printed


def test_show_says_where_each_value_comes_from(tmp_path, capsys):
    def source_of(words: list[str], key: str) -> str:
        assert main([*words, "--show"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return next(line for line in lines if line.startswith(f"{key}=")).split("  ")[-1].strip()

    words = ["experiment=atari/ppo_pong", "algo.clip=0.2"]
    sources = {"algo.clip": "command line", "algo": "experiment=atari/ppo_pong", "algo.value_clip": "default"}
    for key, source in {**sources, "env_kwargs": "experiment=atari/ppo_pong"}.items():
        assert source_of(words, key) == source
    assert source_of([], "algo.epochs") == "experiment=classic/ppo_cartpole"
    assert main([f"log_dir={tmp_path}", *SMALL]) == 0
    capsys.readouterr()
    resumed = [f"resume={tmp_path / 'run_0'}", "runner.n_steps=999"]
    assert source_of(resumed, "runner.n_steps") == "command line"
    assert source_of(resumed, "algo") == f"resume={tmp_path / 'run_0'}"
    for word in ("log_dir=mine", "run_ID=3", "affinity=1cpr"):
        assert source_of([word, "retries=2"], word.partition("=")[0]) == "command line"


def test_show_and_help_of_a_run_that_names_code_take_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("from rlframe.runners import Callback\n\n\nclass Mine(Callback): ...\n")
    config = {**to_flat(from_flat({})), "callbacks": [f"{tmp_path}/mine.py:Mine"]}
    (tmp_path / "params.json").write_text(json.dumps({"config": config}))
    for flag in ("--show", "--help"):
        assert main([f"experiment={tmp_path}/params.json", "trust=true", flag]) == 0
        assert "mine.py:Mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("algos", ["sac ", "td3 ", "Soft Actor-Critic"]),
        ("envs", ["CartPole-v1 ", "Pendulum-v1 "]),
        ("presets", ["atari/ppo_pong ", "ppo on ALE/Pong-v5"]),
        ("samplers", ["auto ", "serial "]),
        ("runners", ["async_rl ", "sync_rl "]),
        ("models", ["model.memory ", "none by default"]),
        ("encoders", ["nature ", "impala "]),
    ],
)
def test_list_names_all_of_a_kind(capsys, kind, words):
    assert main(["--list", kind]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
    assert "NoFrameskip" not in printed
    assert "nothing" not in printed
    parts = {each: module_names(ROOTS[each[:-1]]) for each in ("algos", "samplers", "runners")}
    every = {"presets": preset_names(), **parts}.get(kind, [])
    assert [name for name in every if f"\n{name} " not in f"\n{printed}"] == []


@pytest.mark.parametrize("words", [["--list"], ["--list", "algo"], ["--list", "algos", "envs"]], ids=str)
def test_list_needs_one_of_its_words(capsys, words):
    assert main(words) == 2
    assert "algos, envs, presets" in capsys.readouterr().err


def test_parts_are_found_in_capitals_and_recorded_as_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    experiment = from_flat({"algo": "DQN", "sampler": "Serial", "runner": "Async_RL"})
    assert to_flat(experiment) == to_flat(from_flat({"algo": "dqn", "sampler": "serial", "runner": "async_rl"}))
    assert to_flat(experiment)["algo"] == "dqn"


def test_a_policy_of_the_runs_algorithm_in_capitals_has_its_settings() -> None:
    words = {"algo": "PPO", "algo.clip": 0.05, "agents.policies.red.algo": "ppo", "agents.policies.blue.algo": "a2c"}
    policies = from_flat(words).agents.policies
    assert policies["red"].algo.clip == 0.05


def test_the_last_of_two_ways_of_writing_an_argument_counts() -> None:
    preset = {"env_kwargs": {"a": 1}, "env_kwargs.b": 1, "env_vars.X": "1"}
    experiment = from_flat(preset, {"env_kwargs": "{b: 2}", "env_vars": "{X: 2}"}, {"env_vars.X": "3"})
    assert (experiment.env_kwargs, experiment.env_vars) == ({"b": 2}, {"X": "3"})


def test_the_listed_encoders_are_those_of_the_key() -> None:
    keys = {key.name: key for key in keys_of(from_flat({}))}
    choices = keys["model.encoder"].doc.split(",")[0].split(" or ")[0].split(" | ")
    assert [name for name, _ in KINDS["encoders"]()] == choices


TEAM = "agents.map.*=red env=rlframe.envs.debug_agents:TwoStepGame"


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        ("algo=sac algo.v_min=-5", ["algo.v_min=-5 does nothing with algo.value=expected"]),
        ("algo=sac algo.v_min=-5 algo.value=categorical", []),
        (
            "algo=sac algo.tau=0.1 algo.target_critics=false",
            ["algo.tau=0.1 does nothing with algo.target_critics=false"],
        ),
        ("experiment=mujoco/flashsac_hopper algo.normalize_return=false", []),  # the preset gives a limit of it
        ("algo=dqn algo.munchausen_clip=-2", ["algo.munchausen_clip=-2 does nothing with algo.munchausen=0"]),
        ("model.memory=lstm model.memory_heads=2", ["model.memory_heads=2 does nothing with model.memory=lstm"]),
        ("agents.league.games=9", ["agents.league.games=9 does nothing with agents.league.opponents=0"]),
        ("algo=td3 env=Pendulum-v1 algo.target_critics=false algo.tau=0.01", []),  # of its target actor
        ("algo=qmix algo.mixer=sum algo.mixer_width=8", ["algo.mixer_width=8 does nothing with algo.mixer=sum"]),
        ("snapshot_mode=all snapshot_best=eval/return_mean", []),
        (
            f"algo=dqn algo.alpha=0.7 agents.policies.red.algo.prioritized=true {TEAM}",
            [],
        ),
        (
            f"algo=dqn agents.policies.red.algo.alpha=0.7 {TEAM}",
            ["agents.policies.red.algo.alpha=0.7 does nothing with agents.policies.red.algo.prioritized=false"],
        ),
        ("algo=dqn replay.size=10 algo.beta=1", ["algo.beta=1 does nothing with algo.prioritized=false"]),
    ],
)
def test_a_given_key_that_does_nothing_is_noted(words: str, unused: list[str]) -> None:
    notes = read_job(dict(word.split("=", 1) for word in words.split())).notes
    assert [note for note in notes if "does nothing" in note] == unused


ALGOS = [Part(ROOTS["algo"], name).find(name) for name in module_names(ROOTS["algo"])]


@pytest.mark.parametrize("config", [*ALGOS, ModelConfig, LeagueConfig, RNDConfig])
def test_keys_that_may_do_nothing_are_fields_beside_values_that_others_can_have(config: type) -> None:
    for name, (other, values) in declared_in(config, "IDLE").items():
        assert name in chz.chz_fields(config)
        assert all((name, other) in idle_keys(config(**{other: value})) for value in values)


def test_true_of_python_is_the_word_true_where_a_key_takes_words():
    assert from_flat({"algo": "ppo", "env": "CartPole-v1", "compile": True, "eval.explore": True}).compile == "true"
