"""Options of DQN, R2D1, DDPG, TD3, SAC and PPO against numbers worked out by hand, at their extremes too."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import chz
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe import launch
from rlframe.agents import make_q_agent
from rlframe.algos import ddpg, dqn, ppo, r2d1, sac, td3
from rlframe.algos.off_policy import replay_of
from rlframe.core.errors import ConfigError
from rlframe.core.types import BatchSpec
from rlframe.envs import debug_envs
from rlframe.models import ModelConfig
from rlframe.replay import InMemory, NStep
from rlframe.replay.select import PRIORITY_EPSILON
from tests.algos import test_ddpg, test_sac, test_td3
from tests.algos.learners import OneBatch, learner, target_q, transitions, updated, write_critic, write_linear
from tests.algos.q_table import transitions as choices
from tests.algos.table import one_step_episodes, table_agent
from tests.algos.test_dqn import algo_for, learn, made, run
from tests.algos.test_losses import HALF, PLAIN, RATIOS, moved, ppo_update, ratios
from tests.algos.test_r2d1 import MEMORY, sequences

TANH_HALF = math.tanh(0.5)


@pytest.mark.parametrize(
    ("delta", "losses", "slopes"),
    [
        (1.0, [0.125, 2.5], [-0.5, -1.0]),
        (2.0, [0.125, 4.0], [-0.5, -2.0]),
        (0.25, [0.09375, 0.71875], [-0.25, -0.25]),
        (math.inf, [0.125, 4.5], [-0.5, -3.0]),
    ],
)
def test_the_loss_is_linear_above_huber_delta(delta: float, losses: list[float], slopes: list[float]) -> None:
    algo = algo_for(huber_delta=delta)
    loss, error, _ = algo.evaluate(choices([0, 1], [0, 1], [0.5, 3.0], [0.0, 0.0], [0, 0]))
    loss.sum().backward()
    assert loss.tolist() == losses
    assert error.tolist() == [0.5, 3.0]
    assert [algo.agent.model.table.grad[0, 0].item(), algo.agent.model.table.grad[1, 1].item()] == slopes


def test_huber_delta_is_that_of_quantiles_and_of_sequences_too() -> None:
    batch = choices([0], [0], [3.0], [0.0], [0])
    for delta, loss in ((1.0, 2.5), (math.inf, 4.5)):
        algo = algo_for(value="quantile", n_atoms=2, huber_delta=delta)
        found = algo.evaluate(batch)[0]
        assert found.item() == pytest.approx(loss)  # |τ - 0| of both quantiles, 1/4 and 3/4, times the loss
    settings = {**MEMORY, "learning_starts": 10_000, "burn_in": 0, "learn_T": 1, "n_step": 1, "rescale": False}
    algo, _, _ = run(debug_envs.memory, 4, **settings, huber_delta=math.inf)
    loss, priority, _ = algo.evaluate(sequences(algo))
    torch.testing.assert_close(loss, 0.5 * (priority - PRIORITY_EPSILON).square(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", ["expected", "quantile", "implicit"])
def test_munchausen_adds_the_log_policy_to_the_reward_and_bootstraps_from_the_soft_value(value: str) -> None:
    # target Q(0, .) = 0, ln 3 / 2 and τ = 1/2: π = 1/4, 3/4, soft value τ ln 4; the bonus is of action 1
    algo = algo_for(value=value, n_atoms=2, munchausen=0.9, munchausen_temperature=0.5, huber_delta=math.inf)
    with torch.no_grad():
        algo.target.table[0, 1] = 0.5 * math.log(3)
    _, error, _ = algo.evaluate(algo.with_fractions(choices([0], [1], [2.0], [0.5], [0])))
    assert error.item() == pytest.approx(2 + 0.9 * 0.5 * math.log(0.75) + 0.5 * 0.5 * math.log(4))


@pytest.mark.parametrize(("tau", "expected"), [(0.0, [5.0, 5.0]), (0.25, [4.0, 3.25]), (1.0, [1.0, 1.0])])
def test_the_target_moves_by_target_tau_every_target_interval(tau: float, expected: list[float]) -> None:
    algo = algo_for(target_tau=tau, target_interval=2, learning_rate=0.0)
    with torch.no_grad():
        algo.target.table.fill_(5.0)
        algo.agent.model.table.fill_(1.0)
    algo.replay = OneBatch(choices([0], [0], [1.0], [0.0], [0]))  # type: ignore[assignment]
    for value in expected:
        for n in range(2):
            before = algo.target.table[0, 0, 0].item()
            algo.update()
            assert n or algo.target.table[0, 0, 0].item() == before
        torch.testing.assert_close(algo.target.table, torch.full_like(algo.target.table, value))


def test_a_soft_target_has_the_statistics_of_the_online_network() -> None:
    settings = {"target_tau": 0.1, "target_interval": 1, "model_normalize_observation": True, "replay_ratio": 1.0}
    for module in (dqn, r2d1):
        more = MEMORY if module is r2d1 else {}
        algo, agent, _ = run(debug_envs.memory, 5, **{**more, **settings})
        assert algo.progress.updates > 1
        for target, online in zip(algo.target.buffers(), agent.model.buffers(), strict=True):
            assert torch.equal(target, online)
        assert not all(map(torch.equal, algo.target.parameters(), agent.model.parameters()))


def test_until_the_first_update_a_target_has_the_statistics_of_the_online_network() -> None:
    for more in ({}, MEMORY):  # of dqn, and of r2d1
        settings = {**more, "learning_starts": 10_000, "model_normalize_observation": True}
        algo, agent, _ = run(debug_envs.memory, 2, **settings)
        online = [buffer.clone() for buffer in agent.model.buffers()]
        assert any(buffer.numel() and buffer.any() for buffer in online), "of the rows that came"
        assert all(map(torch.equal, algo.target.buffers(), online))


@pytest.mark.parametrize(("beta", "end"), [("linear(0.4,1,0.5)", 128), ("linear(0.4,1,100)", 100)])
def test_beta_reaches_its_end_after_a_part_of_the_run_or_after_steps(beta: str, end: int) -> None:
    _, _, algo = made(debug_envs.identity, 256, prioritized=True, beta=beta)
    found = [algo.beta(env_steps) for env_steps in (0, end // 2, end, 256)]
    assert found == pytest.approx([0.4, 0.7, 1.0, 1.0])


def test_new_rows_of_dqn_have_the_td_error_of_acting() -> None:
    settings = {"prioritized": True, "initial_priority": "td", "alpha": 1.0, "discount": 0.5, "learning_starts": 10_000}
    sampler, _, algo = made(debug_envs.identity, 256, length=5, **settings)
    for _ in range(3):
        samples = sampler.collect()
        learn(algo, samples)
        index = algo.replay.newest()
        time, env = np.divmod(index, 8)
        row = time - (algo.replay._storages[0].ring.t - 8)  # of this batch
        assert len(index) >= 7 * 4
        q, action = samples.info.q, samples.action
        for i, (t, b) in enumerate(zip(row, env, strict=True)):
            if t < 0:  # of the batch before, whose bootstrap is known now
                continue
            goes_on = 0.5 * (not samples.terminated[t, b])
            error = samples.reward[t, b] + goes_on * q[t + 1, b].max() - q[t, b, action[t, b]]
            found = algo.replay.selector._tree.leaves[index[i] % algo.replay._readers[0].candidates.n_slots]
            assert found == pytest.approx(abs(float(error)) + PRIORITY_EPSILON, rel=1e-4)


@chz.chz
class FiveSteps(dqn.Config):
    def make_replay(self, agent: Any, batch_spec: BatchSpec, seed: int = 0) -> Any:
        return replay_of(self, agent, batch_spec, seed, NStep(self.discount, 5))

    def make_agent(self, observation_space: Any, action_space: Any, model: Any = None, seed: int = 0) -> Any:
        return make_q_agent(observation_space, action_space, model, self.kind(), self.explore, seed, dueling=True)


def test_a_network_or_replay_that_the_config_does_not_describe_is_refused() -> None:
    def make(of_agent: dict[str, Any], of_replay: dict[str, Any], **given: Any) -> None:
        small = {"replay": InMemory(size=100), **given}
        first, second, config = (dqn.Config(**{**small, **each}) for each in (of_agent, of_replay, {}))
        agent = first.make_agent(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), ModelConfig(hidden=(8,)), 0)
        replay = second.make_replay(agent, spec := BatchSpec(4, 2))
        dqn.DQN(agent, replay, config.make_exploration(spec, 100), 100, config)

    make({}, {}, value="quantile", n_atoms=5, dueling=True, prioritized=True, n_step=3)
    own = FiveSteps(replay=InMemory(size=100))  # whose parts are its own matter
    agent = own.make_agent(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), ModelConfig(hidden=(8,)), 0)
    assert own.make_algorithm(agent, BatchSpec(4, 2), 100).replay.made_with()["n_step"] == 5
    for of_agent, of_replay, said in (
        ({"dueling": True}, {}, "the agent was made with dueling=True, and the algorithm with algo.dueling=False"),
        ({"value": "quantile"}, {}, "made with value=quantile, and the algorithm with algo.value=expected; give both"),
        ({}, {"discount": 0.9}, "the replay was made with discount=0.9, and the algorithm with algo.discount=0.99"),
        ({}, {"n_step": 3}, "n_step=3, and the algorithm with algo.n_step=1; give both the same, as config"),
        ({}, {"prioritized": True}, "made with prioritized=True, and the algorithm with algo.prioritized=False"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            make(of_agent, of_replay)


REFUSED = {
    "algo=dqn algo.value=categorical algo.huber_delta=2": "algo.huber_delta=2 is not for algo.value=categorical",
    "algo=dqn algo.munchausen=1.5": "algo.munchausen=1.5 must be from 0 to 1",
    "algo=dqn algo.munchausen=0.9 algo.double=true": "algo.double=true chooses one next action, but algo.m",
    "algo=dqn algo.munchausen=0.9 algo.double=false algo.value=categorical": "algo.munchausen=0.9 averages values",
    "algo=dqn algo.huber_delta=0": "algo.huber_delta=0.0 must be above 0",
    "algo=dqn algo.target_tau=1.1": "algo.target_tau=1.1 must be from 0 to 1",
    "algo=dqn algo.initial_priority=td": "algo.initial_priority=td needs algo.prioritized=true",
    "algo=dqn algo.initial_priority=td algo.prioritized=true algo.value=categorical": "algo.initial_priority=td needs",
    "algo=dqn algo.initial_priority=td algo.prioritized=true algo.value=implicit": "algo.initial_priority=td needs",
    "algo=dqn algo.initial_priority=td algo.prioritized=true algo.munchausen=1 algo.double=false": "and algo.mun",
    "algo=dqn algo.initial_priority=mean": "algo.initial_priority=mean must be max, td, or a number above 0",
    "algo=ddpg algo.prioritized=true algo.initial_priority=nan": "algo.initial_priority=nan must be max, td, or a",
    "algo=dqn algo.initial_priority=2": "algo.initial_priority=2 needs algo.prioritized=true; set both, or use max",
    "algo=td3 algo.unique=true": "algo.unique=true is for prioritized replay; add algo.prioritized=true",
    "algo=r2d1 algo.unique=true algo.alpha=0 model.memory=lstm": "algo.unique=true is for prioritized replay",
    "algo=ddpg algo.initial_priority=td": "algo.initial_priority=td needs algo.prioritized=true; set both, or use max",
    "algo=r2d1 model.memory=gru algo.state_interval=7 algo.learning_starts=9": "algo.state_interval=7 must be a multi",
    "algo=sac algo.action_prior=gaussian": "algo.action_prior=gaussian is for Box actions",
    "algo=sac algo.target_clip=0": "algo.target_clip=0.0 must be above 0",
    "algo=sac algo.n_critics=0": "algo.n_critics=0 must be from 1 to 10000",
    "algo=sac algo.policy_interval=0": "algo.policy_interval=0 must be at least 1",
    "algo=ppo algo.kl_coef=-1": "algo.kl_coef=-1.0 must be at least 0",
    "algo=ppo algo.kl_coef_target=0": "algo.kl_coef_target=0.0 must be above 0",
    "algo=ppo algo.clip=linear(inf,0.1)": "inf in a schedule must be finite",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_means_nothing_is_refused_in_one_line(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*given.split(), "env=CartPole-v1", "sampler=serial", "sampler.batch_T=4", "affinity=none"]
    assert launch.main([*words, "runner.n_steps=1e6", f"log_dir={tmp_path / 'runs'}"]) == 2
    said = capsys.readouterr().err
    assert REFUSED[given] in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_ddpg_with_td3s_options_is_td3() -> None:
    settings = {"target_noise": 0.3, "target_noise_clip": 0.2, "tau": 0.1, "learning_rate": 1e-3}
    settings |= {"critic_learning_rate": 1e-2, "policy_interval": 2, "target_interval": 2, "batch_size": 2}
    one, other = (learner(module, n_critics=2, model={"hidden": (8,)}, **settings) for module in (ddpg, td3))
    for _ in range(6):
        mine, its = updated(one, test_td3.two_rows()), updated(other, test_td3.two_rows())
        assert mine == pytest.approx(its, rel=1e-4)
    for x, y in zip(one.targets, other.targets, strict=True):
        torch.testing.assert_close(x, y)


def test_one_critic_of_td3_has_no_other_to_clip_its_target() -> None:
    algo = learner(td3, n_critics=1, target_noise=0.0, discount=0.9)
    write_linear(algo.target_actor.mlp, [[0.5]], [0.0])
    write_critic(algo.critic.target, 0, [[0.0, 1.0]], [10.0])
    with torch.no_grad():
        expected = [0.25 + 0.9 * (10 + TANH_HALF), 3.0]
        assert target_q(algo, test_td3.two_rows()).tolist() == pytest.approx(expected, rel=1e-6)


CLIPPED = {
    "ddpg": (lambda clip: test_ddpg.by_hand(target_clip=clip), lambda y: (2.5 - y[0]) ** 2 / 2 + (0.5 - y[1]) ** 2 / 2),
    "td3": (
        lambda clip: test_td3.by_hand(target_clip=clip),
        lambda y: sum((q - t) ** 2 for row in test_td3.Q for q, t in zip(row, y, strict=True)) / 2,
    ),
    "sac": (
        lambda clip: test_sac.continuous(target_clip=clip),
        lambda y: sum((q - t) ** 2 for row in test_td3.Q for q, t in zip(row, y, strict=True)) / 4,
    ),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_targets_are_clipped_by_their_magnitude(name: str) -> None:
    make, loss = CLIPPED[name]
    batch = transitions([1.0, 2.0], [0.5, -1.0], [9.0, -3.0], [0.9, 0.0], [1.0, 7.0])  # the first target is above 9
    assert updated(make(2.0), batch)["loss"] == pytest.approx(loss([2.0, -2.0]), rel=1e-5)
    assert updated(make("linear(2,1)"), batch)["loss"] == pytest.approx(loss([2.0, -2.0]), rel=1e-5)
    assert updated(make(1e6), batch)["loss"] == updated(make(math.inf), batch)["loss"]


@pytest.mark.parametrize("module", [ddpg, td3, sac])
def test_policy_and_targets_have_intervals_of_their_own(module: Any) -> None:
    algo = learner(module, policy_interval=2, target_interval=3, tau=0.5, model={"hidden": (8,)})
    parts = {"policy": algo.agent, "targets": algo.critic.target, "critics": algo.critic.networks}

    def numbers() -> dict[str, list[float]]:
        return {name: [p.sum().item() for p in part.parameters()] for name, part in parts.items()}

    for update in range(1, 7):
        before = numbers()
        metrics = updated(algo, test_td3.two_rows())
        changed = {name for name, values in numbers().items() if values != before[name]}
        due = {"critics"} | ({"policy"} if update % 2 == 0 else set()) | ({"targets"} if update % 3 == 0 else set())
        assert changed == due
        assert ("policy_loss" in metrics) == ("policy" in due)


def test_the_temperature_waits_with_the_policy() -> None:
    algo = test_sac.continuous(policy_interval=2)
    assert updated(algo, test_sac.two_rows())["temperature"] == algo.temperature.log.exp().item() == 0.5
    updated(algo, test_sac.two_rows())
    assert algo.temperature.log.exp().item() != 0.5


def test_a_gaussian_prior_pulls_actions_to_the_middle() -> None:
    plain, drawn = (test_sac.continuous(log_std=-20.0, action_prior=prior) for prior in ("uniform", "gaussian"))
    one, other = (updated(algo, test_sac.two_rows()) for algo in (plain, drawn))
    a = np.tanh([0.5, 1.0])
    assert other["policy_loss"] - one["policy_loss"] == pytest.approx(
        float((0.5 * a**2).mean()) + 0.5 * math.log(2 * math.pi), rel=1e-4
    )
    pull = [algo.agent.model.mlp.layers.parameters[0][1].grad[0].item() for algo in (plain, drawn)]
    assert pull[1] - pull[0] == pytest.approx(float((a * (1 - a**2)).mean()), rel=1e-4)
    assert one["loss"] == other["loss"], "targets are those of the uniform prior"


def test_a_gaussian_prior_may_be_of_an_action_without_dimensions() -> None:
    algo = learner(sac, action_space=spaces.Box(-1, 1, (), np.float32), action_prior="gaussian")
    observation, action = torch.zeros(2, 1), torch.tensor([0.5, -1.0])
    loss, _ = algo.soft_value.policy_loss(observation, (action, torch.zeros(2)), torch.ones(()))
    q = algo.critic.policy_q(observation, action).mean()
    assert (loss + q).item() == pytest.approx(0.5 * (0.625 + math.log(2 * math.pi)))


@pytest.mark.parametrize("discrete", [False, True], ids=["box", "discrete"])
def test_one_critic_of_sac_is_as_good_as_two_equal_ones(discrete: bool) -> None:
    given: dict[str, Any] = {"action_space": spaces.Discrete(3)} if discrete else {}
    one, two = (learner(sac, n_critics=n, model={"hidden": (8,)}, **given) for n in (1, 2))
    for mine, its in ((one.critic.networks, two.critic.networks), (one.critic.target, two.critic.target)):
        with torch.no_grad():
            for i, parameter in enumerate(its.parameters()):
                of_one = [*mine.parameters()]
                parameter.copy_(of_one[i % len(of_one)].expand_as(parameter))
    alone, both = (updated(algo, test_sac.two_rows(discrete)) for algo in (one, two))
    assert both["loss"] == pytest.approx(2 * alone["loss"], rel=1e-5), "of the sum of the squared errors"
    for name in ("q", "policy_loss", "entropy", "temperature"):
        assert both[name] == pytest.approx(alone[name], rel=1e-5)


def test_the_kl_penalty_is_added_with_its_coefficient() -> None:
    samples = one_step_episodes([0.0, 0.0, 99.0], [0.0, 0.0, 0.0], [*RATIOS[:2], HALF - 2], [True, True, False])
    table, metrics = ppo_update(samples, kl_coef=3.0)
    # β (r - 1) times d log p / d logits = (0.5, -0.5), over 2 rows; ratios 1.5 and 0.5, advantages 0
    slopes = np.array([0.5, -0.5]) * 3.0 / 2
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(0.5) * np.linalg.norm(slopes), rel=1e-5)
    assert (table.logits[:, 0] < table.logits[:, 1]).tolist() == [True, False, False]  # ratios go back to 1
    assert metrics["kl_coef"] == 3.0


def test_without_a_clip_every_row_has_a_gradient() -> None:
    table, metrics = ppo_update(ratios(), clip=math.inf)
    assert moved(table.logits) == [True, True, True, False]
    assert metrics["policy_loss"] == pytest.approx(-(1.5 - 0.5 + 2.0) / 3, abs=1e-6)
    assert metrics["clip_fraction"] == 0


def adapted(kl: float, target: float, n: int = 1) -> float:
    penalty = ppo.KlPenalty(torch.device("cpu"))
    for _ in range(n):
        penalty.adapt(torch.tensor(kl), target)
    return penalty.factor.item()


def test_the_coefficient_doubles_and_halves_around_the_target() -> None:
    found = [adapted(kl, 0.01) for kl in (0.0, 0.0066, 0.0067, 0.01, 0.0149, 0.0151, 9.0, math.inf)]
    assert found == [0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert adapted(9.0, 0.01, 100) == 2.0**30
    assert adapted(0.0, 0.01, 100) == 2.0**-30
    assert adapted(math.nan, 0.01) == 1.0


def penalized(rewards: list[float], **settings: Any) -> tuple[ppo.PPO, dict[str, float]]:
    algo = ppo.PPO(
        table_agent(len(rewards)),
        BatchSpec(1, len(rewards)),
        1000,
        ppo.Config(**PLAIN, epochs=1, minibatches=1, learning_rate=0.1, **{"kl_coef": 1.0} | settings),
    )
    n = len(rewards)
    algo.receive(one_step_episodes(rewards, [0.0] * n, [HALF] * n))
    return algo, {name: float(x) for name, x in algo.update().items()}


def test_the_kl_is_that_which_the_updates_of_the_batch_come_to() -> None:
    # Adam's first step moves the logits by ±0.1, so the ratio is 2 / (1 + exp(-0.2)), though it was 1 in the loss
    ratio = 2 / (1 + math.exp(-0.2))
    kl = ratio - 1 - math.log(ratio)
    for share, factor in ((0.6, 2.0), (1.0, 1.0), (1.6, 0.5)):
        algo, metrics = penalized([1.0, 1.0], kl_coef_target=share * kl)
        assert metrics["kl"] == 0.0
        assert metrics["kl_coef"] == 1.0
        assert algo.penalty.factor.item() == factor
    assert penalized([1.0], kl_coef_target=math.inf)[0].penalty.factor.item() == 1.0, "inf: it stays"


def test_the_kl_is_the_mean_over_the_rows_of_all_ranks() -> None:
    ratio = 2 / (1 + math.exp(-0.2))
    target = (ratio - 1 - math.log(ratio)) / 1.8  # alone it doubles the coefficient; half of it is within 1.5
    samples = one_step_episodes([1.0, 1.0], [0.0, 0.0], [HALF, HALF])
    for other, factor in (([0.0, 0.0], 2.0), ([0.0, 2.0], 1.0)):  # no row of another rank, or two without KL
        algo, _ = penalized([1.0, 1.0], kl_coef_target=target)
        algo.penalty.factor.fill_(1.0)
        both = staticmethod(lambda x, other=other: x + torch.tensor(other))
        algo.progress.ranks = type("Both", (), {"world_size": 2, "sum_tensor": both})()
        algo._adapt_penalty(samples)
        assert algo.penalty.factor.item() == factor
