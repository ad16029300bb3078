"""What an algorithm brings where nothing is given, and the presets that experiment=auto takes."""

import math
from typing import Any

import chz
import numpy as np
import pytest
from gymnasium import spaces

from rlframe.algos import a2c, appo, ars, ddpg, dqn, es, impala, pg, ppo, pqn, r2d1, sac, td3
from rlframe.algos.defaults import Kind, defaults_of
from rlframe.core.config import count
from rlframe.core.errors import ConfigError
from rlframe.core.parts import ROOTS, module_names
from rlframe.experiment.checks import check_parts
from rlframe.experiment.job import place_job, read_job
from rlframe.experiment.presets import load_preset, preset_names, presets_for
from rlframe.experiment.settings import to_flat
from rlframe.launch import main
from rlframe.models import ModelConfig


def keys(**given):
    return to_flat(read_job({key.replace("__", "."): value for key, value in given.items()}).experiment)


def test_vectors_and_images_have_the_networks_and_batches_of_their_literature():
    of_vectors = keys(algo="sac", env="Pendulum-v1")
    assert (of_vectors["model.hidden"], of_vectors["model.activation"]) == ([256, 256], "relu")
    assert (of_vectors["sampler.batch_T"], of_vectors["sampler.batch_B"]) == (1, 1)
    assert of_vectors["algo.learning_starts"] == 1_000
    of_vectors, of_images = keys(algo="ppo", env="CartPole-v1"), keys(algo="ppo", env="ALE/Pong-v5")
    assert (of_vectors["model.activation"], of_vectors["algo.clip"]) == ("tanh", 0.2)
    assert (of_images["model.activation"], of_images["algo.clip"]) == ("relu", 0.1)
    assert (of_images["sampler.batch_T"], of_images["sampler.batch_B"]) == (128, 8)
    of_images = keys(algo="dqn", env="ALE/Pong-v5")
    assert of_images["algo.learning_starts"] == 50_000, "as in Mnih et al. 2015"


def test_a_key_that_is_given_wins_and_a_preset_too():
    found = keys(algo="td3", env="Pendulum-v1", model__hidden=[32], algo__learning_starts=7)
    assert (found["model.hidden"], found["algo.learning_starts"], found["model.activation"]) == ([32], 7, "relu")
    preset = keys(experiment="classic/td3_pendulum", algo__learning_starts=7)
    assert (preset["algo.discount"], preset["algo.learning_starts"]) == (0.98, 7)
    other = keys(experiment="classic/td3_pendulum", algo="sac")
    assert other["algo.critic_learning_rate"] == 1e-3, "the preset's"


@pytest.mark.parametrize("algo", ["es", "ars"])
def test_what_learns_from_episodes_brings_their_runner(algo):
    assert keys(algo=algo)["runner"] == "evolution"
    assert keys(algo="ppo")["runner"] == "minibatch_rl_eval"
    with pytest.raises(ConfigError, match=f"algo={algo} needs runner=evolution, not runner=minibatch_rl"):
        check_parts(read_job({"algo": algo, "runner": "minibatch_rl"}).experiment)


def test_another_exploration_has_its_own_defaults():
    assert keys(algo="dqn")["algo.explore.epsilon"] == "linear(1,0.05,0.1)"
    found = keys(algo="dqn", algo__explore="boltzmann")
    assert "algo.explore.epsilon" not in found
    assert found["algo.explore"] == "boltzmann"
    for algo in ("dqn", "pqn", "r2d1"):
        noisy = keys(algo=algo, algo__explore="noisy", env="CartPole-v1")
        assert {float(noisy.get(f"algo.explore.{name}", 0.0)) for name in ("epsilon", "epsilon_last")} == {0.0}
    assert keys(algo="dqn", algo__explore="noise_hold")["algo.explore.epsilon"] == "linear(1,0.05,0.1)"


TEAM = {"env": "rlframe.envs.debug_agents:TwoStepGame", "agents.map.*": "red"}


def test_another_exploration_of_a_policy_has_its_own_keys_beside_the_runs() -> None:
    explore = "agents.policies.red.algo.explore"
    for given in ({}, {"algo.explore.epsilon": 0.3}):
        found = keys(algo="dqn", **TEAM, **given, **{explore: "boltzmann"})
        assert (found[explore], f"{explore}.epsilon" in found) == ("boltzmann", False)
    assert keys(algo="r2d1", **TEAM, **{explore: "epsilon"})[f"{explore}.epsilon"] == "linear(1,0.1,0.1)", "the run's"


def test_noisy_layers_of_a_policy_explore_without_the_random_actions_that_are_the_runs_default() -> None:
    explore = "agents.policies.red.algo.explore"
    noisy = keys(algo="r2d1", **TEAM, **{explore: "noisy"})
    assert (noisy[f"{explore}.epsilon"], noisy[f"{explore}.epsilon_last"]) == (0.0, 0.0)
    assert noisy["algo.explore.epsilon"] == "linear(1,0.1,0.1)"
    noisy = keys(algo="dqn", **TEAM, **{explore: "noisy", "algo.explore.epsilon": 0.3})
    assert noisy[f"{explore}.epsilon"] == 0.3, "that was given"


def test_a_policy_of_another_algorithm_than_the_run_has_the_numbers_that_its_own_brings() -> None:
    own, alone = "agents.policies.red.algo", keys(algo="dqn", env="CartPole-v1")
    found = keys(algo="ppo", **TEAM, **{own: "dqn", f"{own}.batch_size": 7})
    for name in ("learning_starts", "target_interval", "n_step", "double", "replay.size", "explore.epsilon"):
        assert found[f"{own}.{name}"] == alone[f"algo.{name}"], name
    assert found[f"{own}.batch_size"] == 7
    assert keys(algo="ppo", **TEAM, **{own: "dqn", f"{own}.explore": "noisy"})[f"{own}.explore.epsilon"] == 0.0


@pytest.mark.parametrize("sampler", ["serial", pytest.param("auto", marks=pytest.mark.slow)])
def test_observations_of_an_unknown_environment_are_looked_at(sampler, tmp_path, monkeypatch):
    (tmp_path / "pixels_of_mine.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Pixels(gymnasium.Env):\n"
        "    def __init__(self, side=40):\n"
        "        self.observation_space = gymnasium.spaces.Box(0, 255, (side, side, 3), np.uint8)\n"
        "        self.action_space = gymnasium.spaces.Discrete(2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = keys(algo="ppo", env="pixels_of_mine:Pixels", sampler=sampler)
    assert (found["model.activation"], found["algo.clip"]) == ("relu", 0.1)
    found = keys(algo="ppo", env="pixels_of_mine:Pixels", sampler=sampler, **{"env_kwargs.side": 4})
    assert (found["model.activation"], found["algo.clip"]) == ("tanh", 0.2), "so few pixels are a vector"


@pytest.mark.parametrize(
    ("env", "normalizes"),
    [
        ("Pendulum-v1", True),
        ("MountainCarContinuous-v0", True),
        ("HalfCheetah-v5", True),
        ("CartPole-v1", False),
        ("rlframe.envs.debug_envs:corridor", False),
        ("dials_of_mine:Dials", True),
    ],
)
def test_ppo_normalizes_observations_and_rewards_where_actions_are_continuous(env, normalizes, tmp_path, monkeypatch):
    (tmp_path / "dials_of_mine.py").write_text(
        "import gymnasium\n"
        "class Dials(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1, 1, (3,))\n"
        "    action_space = gymnasium.spaces.Box(-2, 2, (2,))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = keys(algo="ppo", env=env, sampler="serial")
    assert (found["model.normalize_observation"], found["env.normalize_reward"]) == (normalizes, normalizes)


@pytest.mark.parametrize("given", [{"record": "mine-v0"}, {"env.reward_clip": "sign"}], ids=str)
def test_ppo_leaves_rewards_as_they_are_where_they_are_recorded_or_signs(given):
    found = keys(algo="ppo", env="Pendulum-v1", **given)
    assert found["model.normalize_observation"]
    assert not found["env.normalize_reward"]


def test_show_says_which_algorithm_a_default_is_of(capsys):
    assert main(["algo=sac", "env=Pendulum-v1", "algo.tau=0.01", "--show"]) == 0
    printed = {line.split("=")[0]: line.rpartition("  ")[2] for line in capsys.readouterr().out.splitlines()}
    assert printed["model.hidden"] == printed["sampler.batch_B"] == "default of algo=sac"
    assert (printed["algo.tau"], printed["algo.n_step"]) == ("command line", "default")


def test_a_field_that_a_subclass_states_anew_has_its_default():
    @chz.chz
    class Config(ppo.Config):
        epochs: int = count(3, "passes")

    for kind in Kind:
        ours, theirs = defaults_of(Config, kind).own, defaults_of(ppo.Config, kind).own
        assert ours == {name: value for name, value in theirs.items() if name != "epochs"}
    assert defaults_of(ppo.Config, Kind.VECTORS).own["epochs"] != 3


@pytest.mark.parametrize(
    "module", [a2c, appo, ars, ddpg, dqn, es, impala, pg, ppo, pqn, r2d1, sac, td3], ids=lambda module: module.__name__
)
def test_agents_made_by_hand_have_the_network_of_their_algorithm(module):
    observations = spaces.Box(-1, 1, (3,), np.float32)
    actions = spaces.Box(-1, 1, (1,), np.float32) if module in (ddpg, sac, td3) else spaces.Discrete(2)
    config = module.Config()
    made, given = config.make_agent(observations, actions), ModelConfig(hidden=(5,), memory="gru")
    assert made.model_config == (ModelConfig() if module is es else config.for_vectors.model)
    if module is ppo:
        assert config.make_agent(observations, spaces.Box(-1, 1, (1,))).model_config.normalize_observation
    if module is r2d1:
        assert config.make_agent(observations, actions, given).model_config == given


@pytest.mark.parametrize("algo", module_names(ROOTS["algo"]))
@pytest.mark.parametrize("env", ["CartPole-v1", "ALE/Pong-v5"])
def test_every_algorithm_reads_with_what_it_brings(algo, env):
    config = read_job({"algo": algo, "env": env}).experiment.algo
    if hasattr(config, "max_grad_norm"):
        assert chz.replace(config, max_grad_norm=math.inf), "inf: never, as the key's text says"


def test_auto_takes_the_preset_of_the_algorithm_and_the_environment():
    job = read_job({"experiment": "auto", "algo": "ddpg", "env": "Pendulum-v1", "algo.tau": 0.01})
    assert job.notes == ("experiment=classic/ddpg_pendulum",), "and none of its variants"
    assert (job.experiment.algo.discount, job.experiment.algo.tau) == (0.98, 0.01)
    assert read_job({"experiment": "auto"}).notes == ("experiment=classic/ppo_cartpole",)
    with pytest.raises(ConfigError, match=r"no preset for algo=dqn on env=Pendulum-v1; .*sac_pendulum"):
        read_job({"experiment": "auto", "algo": "dqn", "env": "Pendulum-v1"})


def test_a_run_with_defaults_names_the_preset_of_its_pair(tmp_path):
    (note,) = read_job({"algo": "sac", "env": "Pendulum-v1"}).notes
    assert note.startswith("experiment=classic/sac_pendulum is a preset for algo=sac on Pendulum-v1")
    (note,) = read_job({"algo": "a2c", "env": "Pendulum-v1"}).notes
    assert note.startswith("presets for this environment: ")
    assert read_job({"algo": "ppo", "env": "Acrobot-v1"}).notes == ()
    own = tmp_path / "own_ppo.py"
    own.write_text("from rlframe.algos.ppo import Config")
    assert read_job({"algo": str(own), "env": "CartPole-v1"}).notes == (), "which no preset is of"
    (note,) = read_job({"algo": "impala", "env": "ALE/Boxing-v5"}).notes
    assert note.startswith("experiment=atari/impala_boxing is an unmeasured preset for algo=impala on ALE/Boxing-v5")


def test_each_preset_is_found_by_its_environment_and_algorithm():
    for name, config in ((name, load_preset(name)) for name in preset_names()):
        assert name in presets_for(config["env"], config.get("algo", "ppo")), name


def test_measured_presets_come_before_those_that_nobody_has_measured():
    names = presets_for("Ant-v5", "sac")
    assert names.index("mujoco/crossq_ant") < names.index("mujoco/sac_ant")


def test_cloning_without_data_is_told():
    assert any("imitates its own play" in note for note in place_job(read_job({"algo": "bc"}))[0].notes)
    assert not any("own play" in note for note in place_job(read_job({"algo": "marwil"}))[0].notes)


@pytest.mark.parametrize(
    ("keys", "n"),
    [
        ({}, 0),
        ({"env": "Hopper-v5"}, 0),
        ({"env": "Pendulum-v1"}, 1),
        ({"env": "Pendulum-v1", "algo.target_entropy": -1}, 0),
    ],
)
def test_a_preset_on_another_environment_tells_what_it_has_of_its_own(keys: dict[str, Any], n: int) -> None:
    notes = read_job({"experiment": "mujoco/xqc_hopper", **keys}).notes[1:]
    says = "experiment=mujoco/xqc_hopper has algo.target_entropy=-1.5 of Hopper-v4, which may not fit Pendulum-v1"
    assert [note.startswith(says) for note in notes] == [True] * n
