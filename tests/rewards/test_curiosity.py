"""RND and ICM: what is new is rewarded, by the papers' formulas; with every algorithm, resumed exactly."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces
from torch.nn import functional

from rlframe import launch
from rlframe.algos import Algorithm, ppo
from rlframe.core.errors import ConfigError
from rlframe.core.spaces import FrameStack, random_action, zeros
from rlframe.core.struct import map_tree
from rlframe.core.types import Samples
from rlframe.envs import EnvConfig, debug_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.experiment.ranks import for_ranks
from rlframe.experiment.settings import from_flat
from rlframe.models.encoders import has_images
from rlframe.optimizers.moments import Adam
from rlframe.rewards import ICMConfig, NoBonus, RNDConfig
from rlframe.rewards.base import UNCHANGED, Steps
from rlframe.runners import Callback, Learner, MinibatchRl, RunnerConfig
from rlframe.runners.config import config_of
from rlframe.samplers import SerialSampler
from tests.algos.test_dqn import made
from tests.runners.resumed import assert_resumed_exactly, last_state, words
from tests.runners.resumed_cases import CARTPOLE, EACH_STEP, ON_POLICY, PENDULUM, PICTURES, PPO, REPLAY, SHORT
from tests.samplers.made import sampler_for
from tests.tables import read_csv
from tests.variants import variants

SMALL: dict[str, Any] = {"hidden": (16,), "embedding": 16, "learning_starts": 0}
PICTURE = spaces.Box(0, 255, (3, 12, 12), np.uint8)


def curious(config: Any, T: int = 6, B: int = 3) -> tuple[SerialSampler, Algorithm, Any]:
    """A sampler, a PPO, and its rewards with the bonus."""
    sampler, agent = sampler_for(debug_envs.corridor, T, B, length=4, model_hidden=(8,))
    algo = ppo.Config(minibatches=1, epochs=1).make_algorithm(agent, sampler.batch_spec, 1000)
    return sampler, algo, added(config, sampler, algo)


def added(config: Any, sampler: SerialSampler, algo: Algorithm, n_steps: int = 1000, seed: int = 0) -> Any:
    """Unchanged rewards with the bonus."""
    in_spaces = sampler.envs.observation_space, sampler.envs.action_space
    return config.add_to(UNCHANGED, algo, in_spaces, n_steps, seed)


def learn(bonus: Any, steps: Steps, n: int) -> None:
    """Make gradient steps."""
    parameters = [x for x in bonus.parameters() if x.requires_grad]
    optimizer = Adam(parameters, (0.9, 0.999), 1e-8)
    for _ in range(n):
        bonus.loss(steps).mean().backward()
        optimizer.step(1e-2)
        for parameter in parameters:
            parameter.grad = None


def steps_of(space: Space, actions: Space, n: int, seed: int = 0) -> Steps:
    """Random steps."""
    space.seed(seed)
    before, after = (batched(space, [space.sample() for _ in range(n)]) for _ in range(2))
    action = random_action(actions, np.random.default_rng(seed), n)
    return Steps(*(map_tree(torch.as_tensor, part) for part in (before, action, after)))


def batched(space: Space, rows: list[Any]) -> Any:
    example = zeros(space)
    return map_tree(lambda x, *each: np.stack(each).astype(x.dtype), example, *rows)


@pytest.mark.parametrize("config", [RNDConfig(**SMALL, scale=0.5), ICMConfig(**SMALL, scale=0.5)], ids=["rnd", "icm"])
def test_rewards_are_raised_by_novelty_over_the_deviation_of_its_discounted_sums(config: Any) -> None:
    sampler, algo, rewards = curious(config)
    sums, running = [0.0], np.zeros(3)
    with closing(sampler):
        for _ in range(8):
            samples = sampler.collect()
            valid = samples.valid.numpy()
            with torch.no_grad():
                novelty = rewards.bonus.novelty(rewards.bonus.steps(samples)).view(6, 3).numpy()
            found = rewards(samples)
            algo.receive(found)
            algo.update()
            for t in range(6):  # on over the ends of episodes
                running = np.where(valid[t], 0.99 * running + novelty[t], running)
                sums += running[valid[t]].tolist()
            bonus = np.where(valid, 0.5 * novelty / math.sqrt(np.var(sums) + 1e-8), 0.0)
            np.testing.assert_allclose(found.reward, samples.reward.numpy() + bonus, rtol=1e-4)
            assert (bonus[valid] > 0).all()
        assert not valid.all()


def test_the_bonus_is_of_the_observation_that_a_step_leads_to() -> None:
    sampler, _, rewards = curious(RNDConfig(**SMALL))
    with closing(sampler):
        samples = next(each for each in iter(sampler.collect, None) if not each.valid.all())
        seen = rewards.bonus.steps(samples).next_observation.view(6, 3, 4)
        assert torch.equal(seen[:-1], samples.inputs.observation[1:-1])
        assert torch.equal(seen[-1], samples.inputs.observation[6])


def test_without_a_bonus_the_rewards_are_those_that_were_given() -> None:
    sampler, _, same = curious(NoBonus())
    sampler.close()
    assert same is UNCHANGED


def test_the_bonus_is_recorded_with_the_algorithm() -> None:
    sampler, algo, rewards = curious(RNDConfig(**SMALL, scale="linear(1,0)"))
    with MinibatchRl(sampler, Learner(sampler.agent, algo, rewards), RunnerConfig(n_steps=1000)) as runner:
        flat = config_of(runner)
    assert (flat["algo"], flat["reward.bonus"], flat["reward.bonus.scale"]) == ("ppo", "rnd", "linear(1,0)")


def test_first_env_steps_only_teach_the_normaliser() -> None:
    sampler, algo, rewards = curious(RNDConfig(**{**SMALL, "learning_starts": 20}, batch_size=8))
    before = [x.detach().clone() for x in rewards.bonus.parameters()]
    with closing(sampler):
        for n in range(3):
            samples = sampler.collect()
            assert algo.progress.env_steps >= 20 or n < 2
            found = rewards(samples)
            algo.receive(found)
            algo.update()
            assert torch.equal(found.reward, samples.reward) == (n < 2)
            unchanged = all(map(torch.equal, before, rewards.bonus.parameters()))
            assert unchanged == (n < 2)
    assert int(rewards.bonus.norm.parts[0].count) == algo.progress.env_steps


def test_its_networks_learn_from_a_batch_at_the_rate_of_that_batch() -> None:
    sampler, algo, rewards = curious(RNDConfig(**SMALL, learning_rate="linear(1,0)", batch_size=8))
    with closing(sampler):
        for _ in range(3):
            found, env_steps = rewards(sampler.collect()), algo.progress.env_steps
            assert rewards.optimizer.rate == pytest.approx(1 - env_steps / 1000)
            algo.receive(found)
            algo.update()


class Seen(Callback):
    """Keeps the rewards of the batches."""

    def __init__(self) -> None:
        self.rewards: set[float] = set()

    def on_batch(self, samples: Samples) -> None:
        self.rewards |= {*samples.reward.flatten().tolist()}


def test_callbacks_have_the_rewards_without_the_bonus() -> None:
    sampler, algo, rewards = curious(RNDConfig(**SMALL))
    options, seen = RunnerConfig(n_steps=200, log_interval_steps=200), Seen()
    with MinibatchRl(sampler, Learner(sampler.agent, algo, rewards), options, callbacks=[seen]) as runner:
        assert runner.train()["algo/bonus_mean"] > 0
    assert {0.0} <= seen.rewards <= {0.0, 1.0}


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-2.0, 3.0, (5,), np.float32),
        spaces.Discrete(200),
        PICTURE,
        FrameStack(spaces.Box(0, 255, (4, 36, 36), np.uint8), 4),
        spaces.Dict({"image": PICTURE, "at": spaces.MultiDiscrete([3, 4])}),
        spaces.Tuple((spaces.MultiBinary(3), spaces.Box(-1.0, 1.0, (), np.float32))),
    ],
    ids=["vector", "class", "image", "stack", "dict", "tuple"],
)
@pytest.mark.parametrize("config", [RNDConfig(**SMALL), pytest.param(ICMConfig(**SMALL), marks=pytest.mark.slow)])
def test_what_was_learned_is_less_new_than_what_was_not(config: Any, space: Space) -> None:
    torch.manual_seed(0)
    actions = spaces.Dict({"a": spaces.MultiDiscrete([2, 3]), "b": spaces.Box(-1.0, 2.0, (2,))})
    bonus = config.make_bonus(space, actions)
    known, other = steps_of(space, actions, 8), steps_of(space, actions, 8, seed=1)
    bonus.observe(map_tree(lambda *x: torch.cat(x), known.next_observation, other.next_observation))
    first = bonus.loss(known).mean().item()
    learn(bonus, known, 30)
    with torch.no_grad():
        assert bonus.loss(known).mean() < 0.9 * first
        found = [bonus.novelty(each) for each in (known, other)]
        assert all(x.shape == (8,) and bool((x >= 0).all()) for x in found)
        if not has_images(space):  # noise in images is much alike
            assert found[0].mean() < 0.8 * found[1].mean()


def test_rnd_is_surprised_by_how_far_a_predictor_is_from_a_network_that_stays_as_it_was() -> None:
    space, actions = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(4)
    bonus, steps = RNDConfig(hidden=(8,), embedding=5).make_bonus(space, actions), steps_of(space, actions, 6)
    before = [x.clone() for x in bonus.target.parameters()]
    learn(bonus, steps, 3)
    assert all(map(torch.equal, before, bonus.target.parameters()))
    with torch.no_grad():
        seen = bonus.norm(steps.next_observation)
        squares = (bonus.predictor(seen) - bonus.target(seen)).square()
        torch.testing.assert_close(bonus.novelty(steps), squares.sum(-1))
        torch.testing.assert_close(bonus.loss(steps), squares.mean(-1))


def test_icm_is_surprised_by_its_forward_model_whose_loss_beta_weighs_against_the_inverse_models() -> None:
    space, actions = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(4)
    bonus, steps = ICMConfig(hidden=(8,), embedding=5, beta=0.1).make_bonus(space, actions), steps_of(space, actions, 6)
    with torch.no_grad():
        before, after = (bonus.features(bonus.norm(x)) for x in (steps.observation, steps.next_observation))
        predicted = bonus.forward_model(torch.cat([before, functional.one_hot(steps.action, 4)], -1))
        forward = 0.5 * (predicted - after).square().sum(-1)
        logits = bonus.inverse(torch.cat([before, after], -1))
        inverse = functional.cross_entropy(logits, steps.action, reduction="none")
        torch.testing.assert_close(bonus.novelty(steps), forward)
        torch.testing.assert_close(bonus.loss(steps), 0.9 * inverse + 0.1 * forward)


def test_icm_features_tell_the_action() -> None:
    torch.manual_seed(0)
    space, actions = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)
    bonus = ICMConfig(hidden=(16,), embedding=4).make_bonus(space, actions)
    steps = steps_of(space, actions, 64)
    move = torch.stack([2.0 * steps.action - 1.0, torch.randn(64)], -1)  # the second number is noise
    steps = Steps(steps.observation, steps.action, steps.observation + 0.3 * move)
    bonus.observe(steps.observation)
    learn(bonus, steps, 60)
    before, after = bonus._features(steps)
    found = bonus.inverse(torch.cat([before, after], -1)).argmax(-1)
    assert (found == steps.action).float().mean() > 0.95


def test_reported_returns_are_without_the_bonus(tmp_path: Path) -> None:
    case = f"{PPO} {PENDULUM} {ON_POLICY} algo.learning_rate=1e-30"
    for bonus in ("none", "rnd"):
        own = [] if bonus == "none" else ["reward.bonus.learning_starts=0", "reward.bonus.batch_size=64"]
        assert launch.main([*words(case, tmp_path / bonus), f"reward.bonus={bonus}", *own]) == 0
    logs = {bonus: read_csv(tmp_path / bonus / "run_0/progress.csv")[1] for bonus in ("none", "rnd")}
    for metric in ("episode/return_mean", "eval/return_mean"):
        assert [row[metric] for row in logs["none"]] == [row[metric] for row in logs["rnd"]]
    last = logs["rnd"][-1]
    assert all(float(last[f"algo/bonus_{name}"]) > 0 for name in ("mean", "loss", "deviation"))
    assert last["algo/value_loss"] != logs["none"][-1]["algo/value_loss"]


RND = "reward.bonus=rnd reward.bonus.hidden=[8] reward.bonus.embedding=4 reward.bonus.learning_starts=40"
ICM = f"{RND.replace('=rnd', '=icm')} reward.bonus.scale=linear(2,0)"
CASES = {  # some steps are collected, and not learned from, when a run is stopped
    "ppo": f"{PPO} {CARTPOLE} {ON_POLICY} {RND} reward.bonus.batch_size=100",
    "dqn": f"algo=dqn {CARTPOLE} algo.batch_size=8 algo.replay_ratio=1 {REPLAY} {ICM} reward.bonus.batch_size=20",
    "sac": f"algo=sac {PENDULUM} algo.batch_size=8 algo.replay_ratio=1 {REPLAY} {ICM} reward.bonus.batch_size=20",
    "r2d1": f"algo=r2d1 {CARTPOLE} algo.batch_size=2 algo.burn_in=2 algo.learn_T=4 model.memory=lstm {REPLAY} {RND} "
    "reward.bonus.batch_size=20 env.normalize_reward=true",
    "dqn_images": f"algo=dqn {PICTURES} model.image_hidden=[8] {EACH_STEP} {SHORT} {RND} reward.bonus.batch_size=7",
}


@pytest.mark.parametrize("case", variants(CASES, ("dqn",)))
def test_a_resumed_run_equals_one_that_was_not_stopped(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = last_state(assert_resumed_exactly(CASES[case], tmp_path, monkeypatch))["rewards"]
    assert float(own["deviation"]["statistics"]["count"]) > 70  # of 120 env_steps from 40 on


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bonus": "rnd"}, r"unknown key bonus; did you mean reward.bonus\?"),
        ({"reward.bonus": "icm", "beta": 0.1}, r"unknown key beta; did you mean reward.bonus.beta\?"),
        ({"model": "lstm"}, r"model=lstm: write model.memory=lstm"),
        ({"reward": "rnd"}, r"reward=rnd: write reward.bonus=rnd"),
        ({"reward.bonus": "rdn"}, r"rdn.*rlframe.rewards.*did you mean rnd"),
        ({"reward.bonus": "rnd", "reward.bonus.beta": 0.1}, r"unknown key reward.bonus.beta"),
        ({"reward.bonus.scale": 2.0}, r"unknown key reward.bonus.scale"),
        ({"reward.bonus": "rnd", "reward.bonus.share": 0}, r"reward.bonus.share=0.0 must be above 0 and at most 1"),
        ({"reward.bonus": "icm", "reward.bonus.beta": 1}, r"reward.bonus.beta=1.0 must be at least 0 and below 1"),
        ({"reward.bonus": "rnd", "algo": "es", "runner": "evolution"}, r"reward.bonus=rnd .*algo=es"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        for_ranks(from_flat({"sampler": "serial", **given}), 1)
    assert "\n" not in str(error.value)


def test_a_replay_with_previous_rewards_is_refused() -> None:
    sampler, agent, algo = made(debug_envs.corridor, 1000, length=4, model_feed_back=True)
    learner = Learner(agent, algo, added(RNDConfig(), sampler, algo))
    with closing(sampler), pytest.raises(ConfigError, match=r"reward.bonus .*model.feed_back=true"):
        MinibatchRl(sampler, learner, RunnerConfig(n_steps=1000))


def test_a_second_bonus_is_refused() -> None:
    sampler, algo, rewards = curious(RNDConfig(**SMALL))
    with closing(sampler), pytest.raises(ConfigError, match="have one bonus already"):
        ICMConfig(**SMALL).add_to(rewards, algo, (sampler.envs.observation_space, sampler.envs.action_space), 1000)


def test_a_bonus_that_diverges_names_its_own_learning_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = f"algo=dqn {CARTPOLE} algo.batch_size=8 {REPLAY} {RND} reward.bonus.batch_size=16"
    with np.errstate(all="ignore"):
        assert launch.main([*words(case, tmp_path), "reward.bonus.learning_rate=1e30"]) == 1
    assert "Try a lower learning rate (reward.bonus.learning_rate)" in capsys.readouterr().err


def explored(bonus: Any, n_batches: int, seed: int = 0) -> tuple[float, float]:
    """PPO's greedy return after batches of 512 steps in a corridor of 30 cells; the mean cell of the last batch."""
    sampler, agent = sampler_for(debug_envs.corridor, 64, 8, seed, length=30, model_hidden=(64,))
    n_steps = 512 * n_batches
    config = ppo.Config(learning_rate=1e-3, clip=0.2, normalize_advantage=False)
    algo = config.make_algorithm(agent, sampler.batch_spec, n_steps, seed)
    rewards = added(bonus, sampler, algo, n_steps, seed)
    env, once = EnvConfig(debug_envs.corridor, {"length": 30}, "python"), EvalConfig(n_envs=1, n_episodes=1)
    with closing(sampler), closing(Evaluator(env, agent, once)) as evaluator:
        for _ in range(n_batches):
            samples = sampler.collect()
            algo.receive(rewards(samples))
            algo.update()
        return evaluator.play()[0].return_, float(samples.observation.argmax(-1).float().mean())


def test_a_bonus_leads_on_where_there_are_no_rewards() -> None:
    (_, bold), (_, plain) = explored(RNDConfig(learning_rate=1e-3, scale=3.0), 16), explored(NoBonus(), 16)
    assert bold > 6.0
    assert plain < 3.0


@pytest.mark.slow
def test_a_corridor_with_one_reward_at_its_end_is_learned_with_a_bonus_only() -> None:
    """With it 34 of the seeds 10 to 49 did."""
    bonus = RNDConfig(learning_rate=1e-3, scale=3.0)
    assert sum(explored(NoBonus(), 60, seed)[0] for seed in range(4)) == 0.0
    assert sum(explored(bonus, 60, seed)[0] for seed in range(10)) >= 6.0
