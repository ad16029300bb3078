"""Estimates of a policy's worth agree with what is known, and say what they cannot do."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.agents import Agent
from rlframe.agents.actor import Deterministic, SquashedGaussian, make_actor_agent
from rlframe.agents.policy import make_policy_agent
from rlframe.agents.q import make_q_agent
from rlframe.core.errors import ConfigError
from rlframe.core.types import AgentInputs
from rlframe.critics import ExpectedValue
from rlframe.data.episodes import Episode
from rlframe.distributions import Categorical, DiagonalGaussian
from rlframe.evaluation.cloning import CloneConfig
from rlframe.evaluation.episode_rows import check_episodes
from rlframe.evaluation.estimate import METHODS, Estimate, EstimateConfig, Report, estimate
from rlframe.evaluation.estimate_evaluator import EstimateEvaluator
from rlframe.evaluation.fitted_q import FittedQConfig
from rlframe.evaluation.target_policy import TargetPolicy, target_policy
from rlframe.models import ModelConfig
from rlframe.record import METRICS

STATES, ACTIONS = spaces.Discrete(4), spaces.Discrete(2)
BOX, NUMBER = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-2, 2, (1,), np.float32)
P, B = 0.8, 0.5  # probability of a step to the right
SMALL = EstimateConfig(
    q=FittedQConfig(hidden=(16,), n_networks=2, n_rounds=2, n_updates=20), clone=CloneConfig(n_updates=100)
)


def walk(n: int, seed: int, limit: int = 0) -> list[Episode]:
    """States 0 to 3; right pays 1 and goes on, left ends the episode, as does state 3; or a time limit before."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(n):
        rights = int((rng.random(3) < B).cumprod().sum())
        T = min(rights + 1, 3, limit or 3)
        action = (np.arange(T) < rights).astype(np.int64)
        terminated, truncated = np.zeros(T, bool), np.zeros(T, bool)
        terminated[-1] = T == 3 or not action[-1]
        truncated[-1] = not terminated[-1]
        info = {"log_prob": np.full(T, np.log(B))}
        found.append(Episode(np.arange(T + 1), action, action.astype(np.float32), terminated, truncated, info))
    return found


def right(p: float = P, greedy: bool = False) -> TargetPolicy:
    def params(episode: Episode) -> torch.Tensor:
        return torch.tensor([1 - p, p]).log().expand(len(episode.observation), 2)

    return TargetPolicy(params, Categorical(2), STATES, ACTIONS, greedy)


def missing(report: Report, worth: float) -> list[Estimate]:
    """The estimates whose interval does not have it; with values that are right, that of DR has no width."""
    return [each for each in report.estimates if not each.low - 1e-5 < worth < each.high + 1e-5]


def test_all_methods_find_what_a_policy_is_worth_and_the_same_again() -> None:
    report = estimate(right(), walk(1000, 0), 0.9, METHODS, config=SMALL)
    worth = P + 0.9 * P**2 + 0.81 * P**3
    assert missing(report, worth) == []
    assert max(each.high - each.low for each in report.estimates) < 0.5
    assert report.behaviour == "recorded"
    assert report.mean_ratio == pytest.approx(1, abs=0.2)
    assert 100 < report.effective_episodes < 900
    assert report == estimate(right(), walk(1000, 0), 0.9, METHODS, config=SMALL)


def test_a_time_limit_is_found_and_counts_for_every_method() -> None:
    report = estimate(right(), walk(1000, 1, limit=2), 0.9, METHODS, config=SMALL)
    assert report.time_limit == 2
    assert missing(report, P + 0.9 * P**2) == []


def test_without_a_time_limit_values_go_on_after_a_truncation() -> None:
    whole, cut = walk(600, 2), walk(600, 3, limit=1)
    report = estimate(right(), whole + cut, 0.9, ["fqe", "dr"], config=SMALL)
    worth = P + 0.9 * P**2 + 0.81 * P**3
    assert report.time_limit == 0
    assert missing(report, worth) == []


@pytest.mark.parametrize("log_prob", [None, np.nan])
def test_missing_log_probabilities_are_cloned_and_the_report_says_so(log_prob: float | None) -> None:
    episodes = [
        replace(each, info={} if log_prob is None else {"log_prob": each.reward * log_prob}) for each in walk(600, 0)
    ]
    report = estimate(right(), episodes, 0.9, ["wis"], config=SMALL)
    assert report.behaviour == "cloned"
    assert "log-probabilities of the data: cloned" in report.table()
    assert report.estimates[0].value == pytest.approx(P + 0.9 * P**2 + 0.81 * P**3, abs=0.2)


def test_box_actions_are_samples_in_fitted_q_evaluation() -> None:
    rng, episodes = np.random.default_rng(0), []
    for _ in range(400):  # one step that pays the action itself
        action = rng.standard_normal((1, 1)).astype(np.float32).clip(-1, 1)
        flags = np.ones(1, bool), np.zeros(1, bool)
        episodes.append(Episode(np.zeros((2, 3), np.float32), action, action[:, 0], *flags, {}))
    mean_std = torch.tensor([0.3, np.log(0.1)], dtype=torch.float32)
    policy = TargetPolicy(lambda episode: mean_std.expand(2, 2), DiagonalGaussian((1,)), BOX, NUMBER)
    report = estimate(policy, episodes, 0.9, ["fqe"], config=SMALL)
    assert report.estimates[0].value == pytest.approx(0.3, abs=0.05)


def episode_of(agent: Agent, T: int = 5) -> tuple[Episode, np.ndarray]:
    """An episode that an agent played on random observations, and the log-probabilities that it recorded."""
    rng = np.random.default_rng(0)
    observation = rng.uniform(-1, 1, (T + 1, 3)).astype(np.float32)
    state = agent.initial_state([0])
    action, log_prob, previous, reward = [], [], None, 0.0
    for t in range(T):
        noise = agent.noise(rng, (1,))
        noise = noise.torch() if hasattr(noise, "torch") else torch.as_tensor(noise)
        prev = torch.zeros(1, 1) if previous is None else previous
        first = torch.tensor([t == 0])
        inputs = AgentInputs(torch.as_tensor(observation[t : t + 1]), prev, torch.tensor([reward]), first)
        step = agent.step(inputs, state, noise)
        state, previous, reward = step.state, step.action, float(t)
        action.append(step.action[0].numpy())
        log_prob.append(float(step.info.log_prob))
    rewards, ends = np.arange(T, dtype=np.float32), np.arange(T) == T - 1
    return Episode(observation, np.stack(action), rewards, ends, ends & False, {}), np.array(log_prob)


@pytest.mark.parametrize("kind", ["ppo", "lstm", "sac"])
def test_log_probabilities_are_those_that_the_agent_records(kind: str) -> None:
    agent: Agent
    if kind == "sac":
        agent = make_actor_agent(BOX, NUMBER, SquashedGaussian(NUMBER), ModelConfig(), "stochastic")
    else:
        model = ModelConfig(memory="lstm", feed_back=True) if kind == "lstm" else ModelConfig()
        agent = make_policy_agent(BOX, NUMBER, model)
    episode, recorded = episode_of(agent)
    policy = target_policy(agent, BOX, NUMBER)
    found = policy.distribution.log_prob(policy.params(episode)[:-1], torch.as_tensor(episode.action))
    np.testing.assert_allclose(found.numpy(), recorded, atol=1e-4)


def test_an_epsilon_greedy_agent_has_the_probabilities_of_its_rate() -> None:
    agent = make_q_agent(BOX, ACTIONS, ModelConfig(), ExpectedValue(), "epsilon")
    episode, _ = episode_of(make_policy_agent(BOX, ACTIONS, ModelConfig()), T=9)
    policy = target_policy(agent, BOX, ACTIONS, epsilon=0.2)
    _, weight = policy.choices(policy.params(episode), np.random.default_rng(0))
    rows = torch.zeros(10, 1)
    inputs = AgentInputs(torch.as_tensor(episode.observation).unsqueeze(1), rows, rows, rows.bool())
    best = agent.greedy(inputs, agent.memory(1))[0][:, 0]  # type: ignore[union-attr, operator]
    assert {*best.tolist()} == {0, 1}
    np.testing.assert_allclose(weight.numpy(), 0.1 + 0.8 * np.eye(2)[best], atol=1e-6)


def test_an_evaluator_logs_estimates_of_the_agent_as_it_is_now() -> None:
    agent = make_policy_agent(STATES, ACTIONS, ModelConfig())
    spaces_ = (STATES, ACTIONS)
    evaluator = EstimateEvaluator(agent, spaces_, walk(200, 0), 0.9, ["wis"])
    first = evaluator.evaluate(0)
    assert [*first] == [
        f"estimate/{name}" for name in ("wis", "wis_low", "wis_high", "effective_episodes", "mean_ratio")
    ]
    assert all(name.replace("wis", "<method>") in METRICS for name in first)
    assert first == evaluator.evaluate(1)
    with torch.no_grad():
        agent.model.policy_head.bias[1] += 3  # type: ignore[union-attr, operator, index]
    assert evaluator.evaluate(2)["estimate/wis"] > first["estimate/wis"] + 0.5


def test_a_greedy_policy_is_estimated_while_it_learns_and_what_it_rests_on_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = make_policy_agent(STATES, ACTIONS, ModelConfig())
    data = [replace(each, info={}) for each in walk(20, 0)]
    with caplog.at_level("INFO", "rlframe"):
        noisy = EstimateEvaluator(agent, (STATES, ACTIONS), data, 0.9, ["fqe", "wis"], config=SMALL)
        assert "estimate/wis" in noisy.evaluate(0)
    assert "log-probabilities of the data: cloned" in caplog.text
    greedy = EstimateEvaluator(agent, (STATES, ACTIONS), walk(20, 0), 0.9, ["fqe"], config=SMALL, explore=False)
    assert greedy.evaluate(0)["estimate/fqe"] != noisy.evaluate(0)["estimate/fqe"]


def test_what_cannot_be_estimated_in_a_run_is_told_before_it_starts_by_its_keys() -> None:
    agent, data = make_policy_agent(STATES, ACTIONS, ModelConfig()), walk(5, 0)
    for methods, discount, words in (
        (["wis", "fqe"], 0.9, r"use eval\.explore=true, or eval\.estimate=\[fqe\]"),
        (["fqe"], 1.0, "discount=1 is for .*sampler.discount"),
    ):
        with pytest.raises(ConfigError, match=words):
            EstimateEvaluator(agent, (STATES, ACTIONS), data, discount, methods, explore=False)


def test_what_cannot_be_estimated_is_an_error_with_the_remedy() -> None:
    def message(*arguments: object) -> str:
        with pytest.raises(ConfigError) as error:
            estimate(*arguments)  # type: ignore[arg-type]
        return str(error.value)

    episodes = walk(3, 0)
    assert "use explore=true, or estimate=fqe" in message(right(greedy=True), episodes, 0.9, ["wis"])
    assert "did you mean wis" in message(right(), episodes, 0.9, ["wiss"])
    assert "each once" in message(right(), episodes, 0.9, ["wis", "wis"])
    assert "0 episodes" in message(right(), [], 0.9, ["wis"])
    assert "from 0 to 1" in message(right(), episodes, 1.5, ["wis"])
    assert "sampler.discount" in message(right(), episodes, 1.0, ["fqe"])
    broken = replace(episodes[0], action=episodes[0].action[:-1])
    assert "episode 1 of the dataset" in message(right(), [episodes[1], broken], 0.9, ["wis"])
    wide = replace(episodes[0], action=episodes[0].action[:, None])
    assert "action has the shape" in message(right(), [episodes[1], wide], 0.9, ["is"])
    other = replace(episodes[0], action=episodes[0].action + 2)
    assert "action goes from 2 to" in (said := message(right(), [episodes[1], other], 0.9, ["is"]))
    assert "given from 0" not in said
    with pytest.raises(ConfigError, match=r"action goes from 3 to \d, and .*; classes are given from 0 here"):
        check_episodes([other, other], STATES, spaces.Discrete(2, start=1))
    long = next(each for each in walk(9, 0) if len(each.reward) > 1)
    early = replace(long, terminated=np.ones(len(long.reward), bool))
    assert "ends before its last step" in message(right(), [long, early], 0.9, ["is"])
    noisy = make_actor_agent(BOX, NUMBER, Deterministic(NUMBER), ModelConfig(), "none")
    with pytest.raises(ConfigError, match="explore=false estimates its greedy policy"):
        target_policy(noisy, BOX, NUMBER)


def test_infos_that_estimates_do_not_use_may_be_anything() -> None:
    plain = walk(20, 0)
    log_prob = [each.info["log_prob"].tolist() for each in plain]
    told = [replace(each, info={"log_prob": x, "note": "anything"}) for each, x in zip(plain, log_prob, strict=True)]
    assert estimate(right(), told, 0.9, ["wis"]) == estimate(right(), plain, 0.9, ["wis"])


@pytest.mark.parametrize(
    ("value", "shown"), [(12345.678, "12345.68"), (0.2214, "0.221"), (0.00022149, "0.000221"), (0.0, "0.00")]
)
def test_the_table_shows_three_digits_of_small_numbers_and_cents_of_large_ones(value: float, shown: str) -> None:
    wis, played = (Estimate(name, value, 0.5 * value, value) for name in ("wis", "dataset"))
    table = Report((wis,), played, 8, 80, 0.9, 0, "", math.nan, math.nan).table()
    assert f" {shown} " in table.splitlines()[1]


def test_what_is_not_finite_is_null_in_json() -> None:
    wis, played = Estimate("wis", math.nan, math.nan, math.inf), Estimate("dataset", 1.0, 0.0, 2.0)
    facts = Report((wis,), played, 8, 80, 0.9, 0, "recorded", math.nan, 0.0).facts()
    assert facts["estimates"] == {"wis": {"value": None, "low": None, "high": None}}
