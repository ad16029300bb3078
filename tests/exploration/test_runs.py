"""Runs with each kind of exploration: in workers, stopped and resumed, logged; and the settings that are refused."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.agents import SquashedGaussian, make_actor_agent, make_policy_agent, make_q_agent
from rlframe.algos import ddpg, dqn, pqn, r2d1, sac, td3
from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, env_seeds
from rlframe.core.types import BatchSpec
from rlframe.critics import ExpectedValue
from rlframe.deploy.load import load_policy
from rlframe.envs import EnvConfig, make_envs
from rlframe.experiment.job import read_job
from rlframe.experiment.keys import show_keys
from rlframe.experiment.settings import from_flat, merge, to_flat
from rlframe.exploration import (
    BoltzmannConfig,
    EpsilonConfig,
    ExplorationSchedule,
    ExploreConfig,
    GsdeConfig,
    NoiseHoldConfig,
    OrnsteinUhlenbeckConfig,
    OwnExplorationConfig,
    ParameterNoiseConfig,
)
from rlframe.models import ModelConfig
from rlframe.replay import InMemory
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.samplers import CpuSampler, SerialSampler
from tests.exploration.test_kinds import PUSH, SECOND
from tests.runners.resumed import assert_resumed_exactly, log
from tests.runners.resumed_cases import CASES as RESUMED
from tests.variants import variants

ACTING: dict[str, tuple[Any, str, Any]] = {
    "boltzmann": (dqn, "CartPole-v1", BoltzmannConfig(temperature=0.1, temperature_last=5.0)),
    "noise_hold": (dqn, "CartPole-v1", NoiseHoldConfig(epsilon=0.3, epsilon_last=0.6, longest=4)),
    "held_noise": (td3, "Pendulum-v1", NoiseHoldConfig(std=0.2, std_last=0.4, longest=4)),
    "ornstein_uhlenbeck": (sac, "Pendulum-v1", OrnsteinUhlenbeckConfig(sigma=0.2, sigma_last=0.4)),
    "own": (ddpg, "Pendulum-v1", OwnExplorationConfig(name=PUSH, level=0.1)),
    "gsde": (td3, "Pendulum-v1", GsdeConfig(sigma=0.1, sigma_last=0.2, interval=3)),
    "learned_gsde": (sac, "Pendulum-v1", GsdeConfig(interval=3)),
    "parameter_noise": (ddpg, "Pendulum-v1", ParameterNoiseConfig(std=0.1, std_last=0.2)),
}


def batches(case: str, n_workers: int) -> list[torch.Tensor]:
    """The actions of three batches."""
    module, env, explore = ACTING[case]
    config, seeds = EnvConfig(env, {"max_episode_steps": 7}, "python"), env_seeds(0, Role.ENV, 5)
    envs: Any = WorkerPool(config, 5, seeds, n_workers, ()) if n_workers else make_envs(config, 5, seeds)
    algo_config = module.Config(explore=explore, replay=InMemory(size=1_000), learning_starts=0)
    agent = algo_config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(16,)), 0)
    algo_config.make_algorithm(agent, BatchSpec(4, 5), 1_000, 0)  # sets the levels
    sampler = (CpuSampler if n_workers else SerialSampler)(envs, agent, 4)
    try:
        return [sampler.collect().action.clone() for _ in range(3)]
    finally:
        sampler.close()


@pytest.mark.same_bits
@pytest.mark.parametrize("case", ACTING)
def test_workers_explore_as_one_process_does(case: str) -> None:
    for one, other in zip(batches(case, 0), batches(case, 2), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


SMALL = (
    "model.hidden=[8] eval.n_episodes=1 eval.n_envs=1 runner.log_interval_steps=80 runner.n_steps=160 "
    "sampler=serial sampler.batch_T=4 sampler.batch_B=2 algo.learning_starts=20 algo.replay.size=300 algo.batch_size=8 "
    "algo.replay_ratio=1"
)
PENDULUM, CARTPOLE = "env=Pendulum-v1 env.max_episode_steps=45", "env=CartPole-v1"
OU = "explore=ornstein_uhlenbeck explore.sigma=linear(0.3,0.1) explore.sigma_last=0.05"
HOLD = "explore=noise_hold explore.longest=6 explore.epsilon=0.6 explore.epsilon_last=0.2"
CASES = {
    "ornstein_uhlenbeck": f"{RESUMED['ddpg_target_noise']} {OU}",
    "held_action": f"{RESUMED['dqn_between_updates']} {HOLD}",
    "held_noise": f"algo=td3 explore=noise_hold explore.std=0.3 algo.random_steps=10 {PENDULUM} {SMALL}",
    "held_sample": f"algo=sac explore=sample_hold explore.longest=6 algo.random_steps=10 {PENDULUM} {SMALL}",
    "boltzmann": f"algo=dqn explore=boltzmann explore.temperature=linear(2,0.1) {CARTPOLE} {SMALL}",
    "own": f"algo=dqn explore={SECOND} explore.level=0.3 {CARTPOLE} {SMALL}",
}
FAST = ("ornstein_uhlenbeck", "held_action")


@pytest.mark.parametrize("case", variants(CASES, FAST))
def test_a_resumed_run_explores_as_one_that_was_not_stopped(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = assert_resumed_exactly(CASES[case], tmp_path, monkeypatch)
    rows = log(run)
    assert ("episode/return_mean_least_exploring" in rows[-1]) == ("_last" in CASES[case])
    assert "algo/epsilon" in rows[-1] or "algo/exploration" in rows[-1] or case in ("own", "held_sample")
    policy = load_policy(run, trust=True)
    observation = np.zeros(policy.observation_space.shape, np.float32)  # type: ignore[arg-type]
    greedy = policy.act(observation)
    assert all(np.array_equal(policy.act(observation), greedy) for _ in range(3))
    assert any(not np.array_equal(policy.act(observation, explore=True), greedy) for _ in range(60))


@pytest.mark.parametrize(("module", "memory"), [(dqn, "none"), (r2d1, "gru"), (pqn, "none")])
def test_noisy_layers_explore_before_the_first_update(module: Any, memory: Any) -> None:
    """Noise is drawn for the first batch, and anew for each that comes before updates begin."""
    envs = make_envs(EnvConfig("CartPole-v1"), 4, env_seeds(0, Role.ENV, 4))
    config = module.Config(explore="noisy")
    agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(16,), memory=memory), 0)
    algo, sampler = config.make_algorithm(agent, BatchSpec(16, 4), 10_000, 0), SerialSampler(envs, agent, 16)
    seen: list[torch.Tensor] = []
    with closing(sampler):
        for _ in range(2):
            seen.append(agent.model.noisy_layers[0].noise_in.clone())
            samples = sampler.collect()
            noisy, quiet = (agent.model(samples.inputs[:-1], samples.state.memory, scale)[0] for scale in (1.0, 0.0))
            assert not torch.isclose(noisy, quiet).all()
            assert torch.equal(noisy.squeeze(-1).argmax(-1), samples.action)
            algo.receive(samples)
            sampler.refresh(agent)
    assert (seen[0] != seen[1]).all() or module is pqn  # which updates after each batch


def test_random_first_steps_are_those_before_learning_unless_said_otherwise() -> None:
    for given, expected in ((AUTO, 40), (0, 0), (80, 80)):
        config = td3.Config(learning_starts=40, random_steps=given, replay=InMemory(size=100))
        envs = make_envs(EnvConfig("Pendulum-v1", {}, "python"), 1, [0])
        agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(4,)), 0)
        algo = config.make_algorithm(agent, BatchSpec(4, 1), 100, 0)
        for env_steps in range(0, 100, 20):
            algo.progress.env_steps = env_steps
            algo.explore()
            assert agent.random.item() == (env_steps < expected)
        envs.close()


def test_explore_is_short_for_algo_explore() -> None:
    given = {"algo": "dqn", "explore": "noise_hold", "explore.mu": "3"}
    flat = to_flat(from_flat(given))
    assert (flat["algo.explore"], flat["algo.explore.mu"]) == ("noise_hold", 3.0)
    assert to_flat(from_flat(flat)) == flat
    shown = show_keys(from_flat(given), [("command line", given)])
    assert [line for line in shown.splitlines() if line.startswith("algo.explore.mu=3 ") and "command line" in line]


def test_another_algorithm_keeps_the_exploration_that_fits_it() -> None:
    preset = {"algo": "dqn", "algo.explore": "boltzmann", "algo.explore.temperature": 3.0}
    memory = {"model.memory": "lstm"}
    assert from_flat(preset, {"algo": "r2d1", **memory}).algo.explore.temperature == 3.0
    assert merge(preset, {"algo": "td3"})[1] == ["algo.explore", "algo.explore.temperature"]
    assert from_flat(preset, {"algo": "td3"}).algo.explore.std == 0.1
    assert from_flat(preset, {"explore": "epsilon"}).algo.explore.epsilon.text == "linear(1,0.1,0.02)"


OVERRIDDEN = [  # a preset that leaves a part at its default, words of the command line, and what the preset loses
    ({"algo": "dqn", "algo.explore.epsilon": 0.1}, {"explore": "boltzmann"}, ["algo.explore.epsilon"]),
    ({"algo": "dqn", "algo.explore.epsilon": 0.1}, {"explore": "noisy"}, []),
    ({"algo": "dqn", "algo.explore.epsilon": 0.1}, {"explore": SECOND}, ["algo.explore.epsilon"]),
    (
        {"algo": "ddpg", "algo.explore.std": 0.1},
        {"algo": "td3", "explore": "ornstein_uhlenbeck"},
        ["algo.explore.std"],
    ),
    ({"algo": "dqn", "algo.optimizer.epsilon": 0.1}, {"algo.optimizer": "sgd"}, ["algo.optimizer.epsilon"]),
    ({"algo": "ppo", "algo.optimizer.epsilon": 0.1}, {"algo": "a2c"}, []),
    ({"algo": "ppo", "algo.optimizer.epsilon": 0.1}, {"algo": "ars"}, ["algo.optimizer.epsilon"]),
    ({"algo": "ppo", "algo.optimizer.epsilon": 0.1}, {"algo": "ars", "algo.optimizer": "adam"}, []),
    ({"algo": "ppo", "algo.optimizer": "adamw", "algo.optimizer.epsilon": 0.1}, {"algo": "ars"}, []),
]


@pytest.mark.parametrize(("preset", "words", "lost"), OVERRIDDEN)
def test_keys_of_a_default_part_do_not_outlive_it(
    preset: dict[str, Any], words: dict[str, Any], lost: list[str]
) -> None:
    assert merge(preset, words)[1] == lost
    made = to_flat(from_flat(preset, words))
    assert all(made[key] == preset[key] for key in set(preset) - set(lost) - set(words))


@pytest.mark.parametrize(
    ("preset", "word", "lost"),
    [
        ("explore: boltzmann\nexplore.temperature: 2", "explore=epsilon", "algo.explore.temperature=2"),
        (
            "algo.optimizer: torch.optim:NAdam\nalgo.optimizer.kwargs.eps: 2",
            "algo.optimizer=sgd",
            "algo.optimizer.kwargs.eps=2",
        ),
    ],
    ids=["explore", "optimizer"],
)
def test_what_a_preset_loses_is_noted_where_it_has_short_keys(
    preset: str, word: str, lost: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(f"algo: dqn\n{preset}\n", encoding="utf-8")
    key, value = word.split("=")
    assert (
        read_job({"experiment": f"{tmp_path}/mine.yaml", key: value}).notes[-1] == f"left out, as unknown now: {lost}"
    )


REFUSED = [
    ("dqn explore=gaussian", "explore=gaussian does not fit algo=dqn, which takes epsilon, boltzmann"),
    ("dqn explore=epsilom", "did you mean epsilon"),
    ("ddpg explore=random", "random first steps of ddpg, td3 and sac are algo.random_steps"),
    ("dqn explore.epsilonn=0.1", "did you mean algo.explore.epsilon"),
    ("ppo explore=epsilon", "explore=epsilon does not fit algo=ppo, which takes stochastic"),
    ("sac explore=boltzmann", "does not fit algo=sac"),
    ("td3 explore=stochastic", "does not fit algo=td3, which takes gaussian"),
    ("dqn explore.epsilon=1.1", "explore.epsilon=1.1 must be from 0 to 1"),
    ("dqn explore.epsilon_last=linear(0.1,-1)", "must be from 0 to 1"),
    ("dqn explore=boltzmann explore.temperature=-1", "explore.temperature=-1.0 must be from 0 to 1e+30"),
    ("dqn explore=boltzmann explore.temperature=inf", "explore.temperature=inf must be from 0 to 1e+30"),
    ("dqn explore=noise_hold explore.std=0.1", "explore.std=0.1 has no meaning for algo=dqn; use algo.explore.epsilon"),
    ("td3 explore=noise_hold explore.epsilon=0.1", "has no meaning for algo=td3; use algo.explore.std"),
    ("td3 explore=sample_hold", "algo.explore=sample_hold does not fit algo=td3"),
    ("sac env=CartPole-v1 explore=sample_hold", "algo.explore=sample_hold is for Box actions; use stochastic"),
    ("dqn explore=noise_hold explore.longest=0", "explore.longest=0 must be from 1 to"),
    ("dqn explore=noise_hold explore.longest=1e9", "explore.longest=1000000000 must be from 1 to"),
    ("dqn explore=noise_hold explore.mu=-1", "explore.mu=-1.0 must be at least 0"),
    ("ddpg explore.std=-0.1", "explore.std=-0.1 must be from 0 to 1e+30"),
    ("ddpg explore=ornstein_uhlenbeck explore.theta=1.5", "explore.theta=1.5 must be from 0 to 1"),
    ("ddpg explore=ornstein_uhlenbeck explore.sigma=inf", "explore.sigma=inf must be from 0 to 1e+30"),
    ("td3 explore.clip=0", "explore.clip=0.0 must be above 0, or inf"),
    ("ddpg algo.random_steps=-2", "random_steps=-2"),
    ("dqn explore=own", "explore=own needs algo.explore.name=module:Class"),
    ("dqn explore=tests.exploration.own:Unrelated", "is no subclass of rlframe.exploration.QExploration or"),
    ("dqn explore=tests.exploration.own:SecondBestt", "has no SecondBestt; did you mean SecondBest"),
    (f"dqn explore={PUSH}", "Push: for Q-values it must be a subclass of QExploration"),
    (f"dqn explore={SECOND} explore.kwargs.stepp=2", "its arguments are algo.explore.kwargs.name=value"),
    ("sac env=CartPole-v1 explore=gaussian", "explore=gaussian is for Box actions"),
    ("dqn explore=noisy algo.explore=none", "explore is short for algo.explore"),
]


@pytest.mark.parametrize(("case", "message"), REFUSED, ids=[case for case, _ in REFUSED])
def test_what_makes_no_sense_is_refused_in_one_line(case: str, message: str) -> None:
    keys: dict[str, Any] = dict(word.split("=", 1) for word in f"algo={case}".split())
    continuous = keys["algo"] in ("ddpg", "td3", "sac") and "env" not in keys

    def make() -> None:
        experiment = from_flat({"env": "Pendulum-v1" if continuous else "CartPole-v1", **keys})
        with closing(make_envs(experiment.env_config(), 1, [0])) as envs:
            experiment.algo.make_agent(envs.observation_space, envs.action_space, experiment.model, 0)

    with pytest.raises(ConfigError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [3, None, 0.1])
def test_what_is_neither_a_name_nor_a_config_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=f"algo.explore={given} must be a name such as .* of rlframe.exploration"):
        dqn.Config(explore=given)


VECTOR, ONE = spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (1,))
GAUSSIAN, SMALL = SquashedGaussian(ONE), ModelConfig(hidden=(8,))
BY_HAND: list[tuple[str, Callable[[], object], str]] = [
    (
        "policy",
        lambda: make_policy_agent(VECTOR, ONE, SMALL, explore="epsilon"),
        "explore=epsilon does not fit a policy agent",
    ),
    ("sac", lambda: make_actor_agent(VECTOR, ONE, GAUSSIAN, SMALL, "parameter_noise"), "is for deterministic policies"),
    ("schedule", lambda: ExplorationSchedule("gaussian", 100, 1), "explore=gaussian has no level; set it"),
    (
        "q",
        lambda: make_q_agent(VECTOR, spaces.Discrete(2), SMALL, ExpectedValue(), "gaussian"),
        "does not choose among",
    ),
    ("interval", lambda: GsdeConfig(interval=2.5), "algo.explore.interval=2.5 must be a whole number"),
]


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in BY_HAND], ids=[case[0] for case in BY_HAND])
def test_parts_made_by_hand_that_do_not_fit_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("explore", [BoltzmannConfig(), EpsilonConfig(epsilon=0.5, epsilon_last=0.1)])
def test_an_agent_that_was_made_with_another_exploration_than_the_algorithm_is_refused(explore: ExploreConfig) -> None:
    agent = make_q_agent(VECTOR, spaces.Discrete(2), SMALL, ExpectedValue(), explore)
    config = dqn.Config(replay=InMemory(size=1_000))
    with pytest.raises(ConfigError, match=r"agent was made with explore=.*, and the algorithm with explore=epsilon;"):
        config.make_algorithm(agent, BatchSpec(4, 2), 1_000)
    assert dqn.Config(replay=config.replay, explore=explore).make_algorithm(agent, BatchSpec(4, 2), 1_000)
