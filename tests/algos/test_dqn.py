"""DQN and its options: targets by hand, when updates and copies happen, exact resume, and learning in seconds."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe import launch
from rlframe.agents import make_q_agent
from rlframe.algos import dqn
from rlframe.algos.replay_ratio import ReplayRatio
from rlframe.algos.targets import TargetMoves, copy_into
from rlframe.core.errors import ConfigError
from rlframe.core.types import BatchSpec, Samples
from rlframe.critics import ExpectedValue
from rlframe.envs import EnvConfig, debug_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.exploration import EpsilonConfig, NoisyConfig
from rlframe.models import ModelConfig
from rlframe.optimizers import AdamConfig
from rlframe.replay import InMemory
from rlframe.samplers import serial
from rlframe.updates.progress import Progress
from tests.algos.q_table import inputs_at, table_agent, transitions
from tests.algos.test_learning import blind_time_limit
from tests.variants import variants

QUICK: dict[str, Any] = {
    "learning_rate": 1e-2,
    "batch_size": 32,
    "replay_ratio": 8.0,
    "learning_starts": 64,
    "target_interval": 20,
    "explore": EpsilonConfig(epsilon="linear(1,0.1,0.5)"),
    "optimizer": AdamConfig(epsilon=1e-5),
}
SMALL = InMemory(size=2_000)


def algo_for(n: int = 4, **settings: Any) -> dqn.DQN:
    config = dqn.Config(**{"replay": SMALL, "discount": 0.5} | settings)
    agent, spec = table_agent(n, config.kind()), BatchSpec(4, 2)
    return dqn.DQN(agent, config.make_replay(agent, spec), config.make_exploration(spec, 100), 100, config)


def made(
    env: Any, n_steps: int, T: int = 8, B: int = 8, seed: int = 0, module: Any = dqn, **settings: Any
) -> tuple[Any, Any, Any]:
    """Sampler, agent and algorithm; what begins with `model_` is the model's."""
    kwargs = {key: settings.pop(key) for key in ("action", "length", "delay", "ends") if key in settings}
    model = {key.removeprefix("model_"): settings.pop(key) for key in list(settings) if key.startswith("model_")}
    config = module.Config(**{"replay": SMALL} | QUICK | settings)
    sampling = serial.Config(batch_T=T, batch_B=B)
    envs = sampling.make_envs(EnvConfig(env, kwargs, "python"), seed, ())
    agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(**{"hidden": (32,)} | model), seed)
    sampler = sampling.make_sampler(envs, agent, seed)
    return sampler, agent, config.make_algorithm(agent, sampler.batch_spec, n_steps, seed)


def run(env: Any, n_batches: int, **settings: Any) -> tuple[Any, Any, list[Samples]]:
    """Algorithm, agent and a copy of every batch, after `n_batches` of 64 rows."""
    sampler, agent, algo = made(env, n_batches * 64, **settings)
    batches = []
    for _ in range(n_batches):
        samples = sampler.collect()
        batches.append(samples.map(torch.clone))
        learn(algo, samples)
    return algo, agent, batches


def learn(algo: Any, samples: Samples) -> None:
    algo.receive(samples)
    while algo.updates_due():
        algo.update()


def score(agent: Any, env: Any, **kwargs: Any) -> float:
    evaluator = Evaluator(EnvConfig(env, kwargs, "python"), agent, EvalConfig(n_envs=20, n_episodes=40))
    return float(np.mean([t.return_ for t in evaluator.play()]))


def test_the_replay_ratio_loses_no_fraction() -> None:
    ratio, other = (ReplayRatio(replay_ratio=0.1, batch_size=3, learning_starts=0, progress=Progress()) for _ in "12")
    for step in range(3_000):
        ratio.receive(step, step + 1)
        while ratio.due():
            ratio.progress.updates += 1
    assert ratio.progress.updates == 100
    ratio.receive(3_000, 1_000_003)
    other.load_state_dict(ratio.state_dict())
    assert other.pending == ratio.pending


def test_updates_are_due_only_from_learning_starts_on() -> None:
    ratio = ReplayRatio(replay_ratio=8.0, batch_size=32, learning_starts=1_000, progress=Progress())
    ratio.receive(0, 996)
    assert ratio.due() == 0
    ratio.receive(996, 1_012)  # 12 of 16 count
    assert ratio.due() == 3


def test_nothing_is_given_up_while_there_is_nothing_to_learn_from() -> None:
    ratio = ReplayRatio(replay_ratio=8.0, batch_size=32, learning_starts=0, progress=Progress())
    for n in range(0, 1_000, 10):  # a hundred batches, of which no sequence is whole yet
        ratio.receive(n, n + 10)
        assert ratio.due(n_rows=0) == 0
    assert ratio.due(n_rows=1) == 250


def test_updates_wait_while_replay_has_lost_all_rows() -> None:
    ratio = ReplayRatio(replay_ratio=8.0, batch_size=8, learning_starts=0, progress=Progress())
    ratio.receive(0, 5)
    assert [ratio.due(n_rows=n) for n in (5, 0, 1)] == [5, 0, 5]


def test_pending_updates_are_bounded_and_dropped_ones_are_counted_also_after_a_resume() -> None:
    ratio, other = (ReplayRatio(replay_ratio=8.0, batch_size=32, learning_starts=0, progress=Progress()) for _ in "12")
    for batch in range(100):
        ratio.receive(64 * batch, 64 * (batch + 1))  # each calls for 16
        ratio.due()
    assert ratio.due() == 9 * 16, "eight batches' worth, and the newest"
    assert ratio.dropped + ratio.pending == 100 * 16
    other.load_state_dict(ratio.state_dict())
    assert (other.pending, other.dropped) == (ratio.pending, ratio.dropped)
    ratio.progress.updates, ratio.progress.env_steps = 160, 6_400
    counters = ratio.counters()
    assert counters == {"replay/ratio": 0.8, "replay/dropped_updates": 100 * 16 - 9 * 16}


def test_replay_ratios_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"algo.replay_ratio=0.0 must be above 0"):
        ReplayRatio(0.0, 32, 0, Progress())


def test_the_target_starts_equal() -> None:
    algo, agent, _ = run(debug_envs.identity, 1, learning_starts=10_000)
    for one, other in zip(algo.target.parameters(), agent.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_targets_move_at_the_first_update_after_an_interval_of_env_steps() -> None:
    progress = Progress()
    moves = TargetMoves(100, progress)
    turns = []
    for env_steps in (60, 120, 120, 180, 450, 450, 500):  # updates may be several a batch, or none for long
        progress.env_steps = env_steps
        turns.append(moves.turn(1))
    assert turns == [False, True, False, False, True, False, True]
    resumed = TargetMoves(100, progress)
    resumed.load_state_dict(moves.state_dict())
    assert not resumed.turn(1)
    progress.schedule(700)  # of a runner that counts in updates
    assert resumed.turn(1)
    progress.env_steps, progress.scheduled = 20, 0  # a sampler follows
    assert [resumed.turn(1), resumed.turn(1)] == [True, False]


def test_the_target_of_a_run_is_copied_by_env_steps() -> None:
    algo, agent, _ = run(debug_envs.identity, 1, learning_starts=0, target_interval=1_000_000, target_interval_steps=64)
    assert (algo.progress.env_steps, algo.moves.last) == (64, 64)  # at the first of 16 updates
    assert all(
        (one != other).any() for one, other in zip(algo.target.parameters(), agent.model.parameters(), strict=True)
    )
    fresh = run(debug_envs.identity, 1, learning_starts=10_000)[0]
    assert all(
        (one != other).any() for one, other in zip(algo.target.parameters(), fresh.target.parameters(), strict=True)
    )


def test_a_copy_has_statistics_and_noise_too() -> None:
    space, config = spaces.Box(-1.0, 1.0, (3,), np.float32), ModelConfig(normalize_observation=True)
    one, other = (make_q_agent(space, spaces.Discrete(2), config, ExpectedValue(), "noisy", seed) for seed in (0, 1))
    one.observe(torch.ones(4, 3))
    one.model.resample(torch.Generator().manual_seed(0))
    copy_into(other.model, one.model)
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], tensor), name


def test_the_single_target_takes_the_largest_value_and_the_double_that_of_the_online_choice() -> None:
    batch = transitions([0, 0], [0, 1], [1.0, 1.0], [0.5, 0.0], [1, 1])
    for double, q_next in ((False, 8.0), (True, 2.0)):
        algo = algo_for(double=double)
        with torch.no_grad():
            algo.agent.model.table[1, :, 0] = torch.tensor([5.0, 4.0])  # the online network prefers action 0
            algo.target.table[1, :, 0] = torch.tensor([2.0, 8.0])
        loss, error, q = algo.evaluate(batch)
        torch.testing.assert_close(error, torch.tensor([1.0 + 0.5 * q_next, 1.0]))  # Q(0, .) = 0; row 1 terminated
        torch.testing.assert_close(loss.detach(), torch.tensor([0.5 + 0.5 * q_next, 0.5]))
        assert not q.any()


@pytest.mark.parametrize("value", ["categorical", "quantile"])
def test_a_distribution_is_learned_of_the_action_taken_only(value: str) -> None:
    algo = algo_for(value=value, n_atoms=3, v_min=0.0, v_max=2.0)
    loss, _, _ = algo.evaluate(transitions([0], [1], [2.0], [0.0], [1]))
    loss.sum().backward()
    grad = algo.agent.model.table.grad
    assert (grad[0, 1] != 0).any()
    assert (grad[0, 0] == 0).all()
    assert (grad[1:] == 0).all()


def test_epsilon_goes_down_over_its_fraction_of_the_run() -> None:
    ladder = EpsilonConfig(epsilon="linear(1,0.1,0.5)", epsilon_last="linear(1,0.01,0.5)")
    algo, agent, _ = run(debug_envs.identity, 4, explore=ladder)
    assert agent.exploration.level.tolist() == pytest.approx([0.1, 0.01, 7])
    algo.exploration.apply(agent.exploration, 64)
    assert agent.exploration.level.tolist() == pytest.approx([0.55, 0.505, 7])


def test_prioritized_replay_is_told_the_errors() -> None:
    algo, _, _ = run(debug_envs.identity, 3, prioritized=True, discount=0.0)
    told: list[Any] = []
    algo.replay.update_priorities = lambda index, priority: told.append((index, priority))
    algo.ratio.receive(1_000_000, 1_000_004)
    algo.update()
    ((index, priority),) = told
    assert len(index) == len(priority) == 32
    assert (priority >= 0).all()


def test_priorities_to_the_power_of_0_are_draws_of_equal_probability() -> None:
    config = dqn.Config(prioritized=True, alpha=0.0, replay=InMemory(size=100))
    agent = config.make_agent(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), ModelConfig(hidden=(8,)), 0)
    assert not config.make_algorithm(agent, BatchSpec(4, 2), 100_000).replay.is_prioritized


def test_memory_is_refused_with_the_algorithm_that_trains_it() -> None:
    with pytest.raises(ConfigError, match="use r2d1"):
        run(debug_envs.memory, 1, model_memory="lstm")


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "quantile": {"value": "quantile", "n_atoms": 8},
    "implicit munchausen": {"value": "implicit", "n_atoms": 8, "munchausen": 0.9, "double": False},
    "fed back": {"model_feed_back": True},
    "rainbow": {
        "double": True,
        "dueling": True,
        "n_step": 3,
        "prioritized": True,
        "explore": NoisyConfig(epsilon="linear(1,0.1,0.5)"),
        "value": "categorical",
        "n_atoms": 21,
        "v_min": -1.0,
        "v_max": 5.0,
        "learning_rate": 3e-3,
    },
}


@pytest.mark.parametrize("name", variants(OPTIONS, ("plain", "quantile", "fed back", "rainbow")))
def test_every_option_learns_to_name_what_it_sees(name: str) -> None:
    _, agent, _ = run(debug_envs.identity, 10, length=8, discount=0.5, **OPTIONS[name])
    assert score(agent, debug_envs.identity, length=8) > 0.9 * 8  # chance is at most 4


def q_values(env: Any, n_states: int, **kwargs: Any) -> torch.Tensor:
    """The largest Q of each state, after learning three steps at a time with γ = 0.8 from random actions."""
    settings = {
        "discount": 0.8,
        "explore": EpsilonConfig(epsilon=1.0),
        "double": True,
        "n_step": 3,
        "learning_rate": 2e-2,
        "target_interval": 10,
    }
    _, agent, _ = run(env, 11, **settings, **kwargs)
    with torch.no_grad():
        return agent.kind.q(agent(inputs_at(list(range(n_states))), ())[0]).max(-1).values


def test_a_time_limit_bootstraps() -> None:
    q = q_values(blind_time_limit, 1, ends="truncated")
    torch.testing.assert_close(q, torch.tensor([5.0]), rtol=0, atol=0.3)  # 1 / (1 - γ)


def test_a_termination_does_not_bootstrap() -> None:
    q = q_values(debug_envs.time_limit, 5, ends="terminated", length=5)
    torch.testing.assert_close(q, torch.tensor([3.3616, 2.952, 2.44, 1.8, 1.0]), rtol=0, atol=0.3)


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["rainbow"]], ids=["plain", "rainbow"])
def test_one_seed_gives_one_history(options: dict[str, Any]) -> None:
    few = {**options, "replay_ratio": 2.0}
    agents = [run(debug_envs.identity, 4, seed=3, **few)[1] for _ in range(2)]
    other = run(debug_envs.identity, 4, seed=4, **few)[1]
    pairs = list(zip(*(agent.parameters() for agent in (*agents, other)), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize("name", ["plain", "rainbow", "implicit munchausen"])
def test_a_resumed_algorithm_goes_on_exactly(name: str) -> None:
    check_resume(debug_envs.identity, **OPTIONS[name])


def check_resume(env: Any, **settings: Any) -> None:
    """Eight batches learned from at once, or four, and four more by an algorithm that began with other weights."""
    settings = {"replay_ratio": 2.0} | settings
    _, _, batches = run(env, 8, **settings | {"learning_starts": 10_000})
    _, agent, algo = made(env, 8 * 64, **settings)
    for samples in batches[:4]:
        learn(algo, samples)
    saved, weights = copy.deepcopy((algo.state_dict(), agent.state_dict()))
    _, other_agent, other = made(env, 8 * 64, seed=9, **settings)
    other.load_state_dict(saved)
    other_agent.load_state_dict(weights)
    for samples in batches[4:]:
        learn(algo, samples)
        learn(other, samples)
    assert algo.progress.updates > 7
    for one, two in zip(agent.state_dict().values(), other_agent.state_dict().values(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("word", ["algo.batch_size=1e9", "algo.learning_starts=1e9", "algo.replay_ratio=1e-320"])
def test_a_run_without_one_update_is_refused_before_it_starts(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["algo=dqn", "env=CartPole-v1", "sampler=serial", "runner.n_steps=1000", "algo.learning_starts=100"]
    words = [each for each in words if each.partition("=")[0] != word.partition("=")[0]]
    assert launch.main([*words, word, f"log_dir={tmp_path / 'run'}", "affinity=none"]) == 2
    error, starts = capsys.readouterr().err, "starts" in word
    assert "nothing would be learned" in error
    assert ("use algo.learning_starts=996 or less" if starts else "learn from fewer rows") in error
    assert not (tmp_path / "run").exists()


def test_a_run_whose_replay_never_had_a_row_to_learn_from_ends_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "algo=r2d1 env=CartPole-v1 model.memory=gru sampler=serial sampler.batch_T=8 sampler.batch_B=1 "
    words += (
        "runner.n_steps=300 runner.log_interval_steps=300 algo.learning_starts=10 algo.batch_size=2 algo.learn_T=4 "
    )
    words += "algo.burn_in=1000 algo.replay.size=5000 eval.n_episodes=1 affinity=none"
    assert launch.main([*words.split(), f"log_dir={tmp_path}"]) == 1
    assert "nothing was learned in 3" in capsys.readouterr().err
