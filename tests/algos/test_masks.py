"""Action masks: a forbidden action is never taken, and weighs nothing in any loss, target or entropy."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.agents import Agent, make_policy_agent, make_q_agent
from rlframe.algos import dqn, ppo, pqn, r2d1, sac
from rlframe.core.spaces import nth_allowed
from rlframe.core.struct import leaves
from rlframe.core.types import AgentInputs, BatchSpec
from rlframe.critics import CategoricalValue, ExpectedValue, ImplicitValue, QuantileValue
from rlframe.distributions import Categorical, MultiCategorical
from rlframe.envs import EnvConfig, debug_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.exploration import EpsilonConfig
from rlframe.models import ModelConfig
from rlframe.models.views import FORBIDDEN, masked_logits
from rlframe.replay import InMemory, Transitions
from rlframe.samplers import cpu, serial
from tests.variants import variants

SLOW = pytest.mark.slow
STATE, ACTIONS = spaces.Discrete(2), spaces.Discrete(3)
MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(3), "observation": STATE})
CONFIG = ModelConfig(hidden=(8,))

OFF: dict[str, Any] = {"replay": InMemory(size=4_096), "learning_starts": 256, "replay_ratio": 0.5}
MANY_ACTIONS = {"kind": "multi_discrete"}
PPO: dict[str, Any] = {"epochs": 1, "minibatches": 2}
SEQUENCES: dict[str, Any] = {**OFF, "burn_in": 4, "learn_T": 8, "batch_size": 8}
LSTM = {"memory": "lstm", "memory_size": 8}
RANDOM = {"explore": EpsilonConfig(epsilon=1.0)}
GREEDY = {"explore": "none"}
RUNS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ppo": (ppo, PPO, {}, {}),
    "ppo_lstm": (ppo, PPO, LSTM, {}),
    "ppo_multi_discrete": (ppo, PPO, {}, MANY_ACTIONS),
    "dqn_random": (dqn, {**OFF, **RANDOM}, {}, {}),
    "dqn_greedy": (dqn, {**OFF, **GREEDY, "double": True}, {}, {}),
    "r2d1": (r2d1, {**SEQUENCES, "explore": EpsilonConfig(epsilon=0.5)}, LSTM, {}),
    "pqn": (pqn, {**PPO, "explore": EpsilonConfig(epsilon=0.5)}, {"norm": "layer"}, {}),
    "pqn_lstm": (pqn, {**PPO, "explore": EpsilonConfig(epsilon=0.5)}, LSTM, {}),
    "sac": (sac, {**OFF, "learning_starts": 1_024}, {}, {}),
}


def run(name: str, n_steps: int, numpy: bool = True, T: int = 32, B: int = 32, workers: int = 0) -> Agent:
    """Collect and learn; the environment raises where a forbidden action is taken."""
    module, settings, model, kwargs = RUNS[name]
    config = module.Config(**settings)
    sizes: dict[str, Any] = {"batch_T": T, "batch_B": B, "decorrelation_steps": 20}
    sampler_config = cpu.Config(**sizes, n_workers=workers) if workers else serial.Config(**sizes)
    envs = sampler_config.make_envs(EnvConfig(debug_envs.masked, kwargs, "python"), 0, ())
    agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(**{"hidden": (16,)} | model), 0)
    assert agent.numpy_step(4) is not None
    if not numpy:
        agent.numpy_step = lambda n: None
    sampler = sampler_config.make_sampler(envs, agent, 0)
    algo = config.make_algorithm(agent, sampler.batch_spec, n_steps, 0)
    n_parts = 2 if kwargs else 1
    for _ in range(-(-n_steps // (T * B))):
        samples = sampler.collect()
        mask = samples.observation["action_mask"].unflatten(-1, (n_parts, -1))
        taken = mask.gather(-1, samples.action.view(T, B, n_parts, 1))
        assert taken[samples.valid].all()
        algo.receive(samples)
        while algo.updates_due():
            metrics = algo.update()
        sampler.refresh(agent)
    assert all(math.isfinite(float(x)) for x in metrics.values())
    assert all(x.isfinite().all() for x in agent.parameters())
    sampler.close()
    return agent


@pytest.mark.parametrize("name", RUNS)
def test_no_forbidden_action_is_ever_taken(name: str) -> None:
    run(name, 2_048)


@pytest.mark.parametrize("name", variants(RUNS, ("ppo", "r2d1", "sac")))
def test_no_forbidden_action_is_ever_taken_in_torch(name: str) -> None:
    run(name, 2_048, numpy=False)


@SLOW
@pytest.mark.parametrize("name", RUNS)
def test_no_forbidden_action_is_ever_taken_in_a_million_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, settings, model, kwargs = RUNS[name]
    seldom = {"replay_ratio": 0.02, "replay": InMemory(size=16_384)} if "replay" in settings else {}
    monkeypatch.setitem(RUNS, name, (module, settings | seldom, model, kwargs))
    run(name, 1_000_000, numpy=name != "ppo_lstm", B=256)


def test_workers_take_no_forbidden_action() -> None:
    run("ppo", 2_048, workers=2)


def inputs(states: list[int], masks: list[list[int]]) -> AgentInputs:
    n = len(states)
    observation = {"action_mask": torch.tensor(masks, dtype=torch.int8), "observation": torch.tensor(states)}
    return AgentInputs(observation, torch.zeros(n, dtype=torch.int64), torch.zeros(n), torch.zeros(n).bool())


def test_probabilities_entropy_and_kl_are_those_of_a_softmax_over_the_allowed() -> None:
    logits, mask = torch.tensor([0.5, 3.0, -1.0]), torch.tensor([1, 0, 1])
    p = math.exp(0.5) / (math.exp(0.5) + math.exp(-1.0))
    params, action = masked_logits(logits, mask)[None], torch.tensor([0])
    log_prob, entropy = Categorical(3).log_prob_entropy(params, action)
    assert log_prob.item() == pytest.approx(math.log(p))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    other = torch.log_softmax(masked_logits(torch.tensor([0.0, -2.0, 0.0]), mask), -1)
    mine = torch.log_softmax(params[0], -1)
    kl = p * math.log(p / 0.5) + (1 - p) * math.log((1 - p) / 0.5)
    assert (mine.exp() * (mine - other)).sum().item() == pytest.approx(kl, rel=1e-5)
    both = MultiCategorical((3, 3))
    joint = torch.cat([params, masked_logits(torch.zeros(3), torch.tensor([0, 1, 1]))[None]], -1)
    assert both.log_prob(joint, torch.tensor([[0, 2]])).item() == pytest.approx(math.log(p / 2))
    assert both.entropy(joint).item() == pytest.approx(entropy.item() + math.log(2))


@pytest.mark.parametrize("mask", [[1, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]], ids=["some", "one", "none"])
def test_the_gradient_of_masked_logits_is_finite_and_none_of_it_goes_to_those_forbidden(mask: list[int]) -> None:
    logits = torch.tensor([[0.5, 3.0, -1.0, 2.0]] * 2, requires_grad=True)
    action = torch.tensor([2, 2])
    log_prob, entropy = Categorical(4).log_prob_entropy(masked_logits(logits, torch.tensor(mask)), action)
    (0.7 * log_prob + 0.3 * entropy).sum().backward()
    assert logits.grad is not None
    assert all(x.isfinite().all() for x in (log_prob, entropy, logits.grad))
    assert not logits.grad[:, torch.tensor(mask) == 0].any()


def test_the_mask_is_no_feature_and_the_network_is_that_without_it() -> None:
    masked, plain = (make_policy_agent(space, ACTIONS, CONFIG) for space in (MASKED, STATE))
    for one, other in zip(masked.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    rows = inputs([0, 1], [[1, 1, 1], [1, 1, 0]])
    seen = dataclasses.replace(rows, observation=rows.observation["observation"])
    params, expected = masked(rows, ())[0], plain(seen, ())[0]
    assert torch.equal(params[0], expected[0])
    assert torch.equal(params[1, :2], expected[1, :2])
    assert params[1, 2] == FORBIDDEN


def test_box_actions_have_an_ordinary_observation_of_that_name() -> None:
    agent = make_policy_agent(MASKED, spaces.Box(-1, 1, (2,), np.float32), CONFIG)
    assert agent(inputs([0], [[0, 0, 0]]), ())[0].shape == (1, 4)


@pytest.mark.parametrize(
    "kind",
    [ExpectedValue(), CategoricalValue(5, -1.0, 2.0), QuantileValue(4), ImplicitValue(2, 4)],
    ids=lambda k: type(k).__name__,
)
@pytest.mark.parametrize("numpy", [True, False], ids=["numpy", "torch"])
def test_greedy_and_random_choices_are_among_the_allowed_and_random_ones_uniform(kind: Any, numpy: bool) -> None:
    agent, n = make_q_agent(MASKED, ACTIONS, CONFIG, kind, "epsilon"), 3_000
    rows = inputs([0, 1] * (n // 2), [[1, 0, 1], [0, 1, 1]] * (n // 2))
    noise = agent.noise(np.random.default_rng(0), (n,))
    for epsilon in (1.0, 0.0):
        agent.exploration.set_level(epsilon, epsilon, 1)
        state = agent.initial_state(range(n))
        step = agent.numpy_step(n)
        assert step is not None
        if numpy:
            action = step(rows.map(lambda x: x.numpy()), state.map(lambda x: x.numpy()), noise).action
        else:
            action = agent.step(rows, state, noise.torch()).action.numpy()
        for start, allowed in ((0, {0, 2}), (1, {1, 2})):
            values, counts = np.unique(action[start::2], return_counts=True)
            assert set(values) <= allowed
            if epsilon:
                assert counts.min() > 0.45 * n / 2  # 7 deviations


def test_the_nth_allowed_counts_only_those_and_no_mask_at_all_allows_everything() -> None:
    masks = np.array([[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0]])
    drawn = np.array([3, 6, 5, 2**31 - 1])
    assert nth_allowed(masks, drawn).tolist() == [3, 2, 1, 2]
    assert nth_allowed(torch.from_numpy(masks), torch.from_numpy(drawn)).tolist() == [3, 2, 1, 2]


def write_table(model: Any, table: list[list[float]]) -> None:
    """Make the Q-network Q(s, a) = table[s][a]."""
    layer = model.advantage.network.linears[0]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(table).T)
        layer.bias.zero_()


@pytest.mark.parametrize(
    ("double", "munchausen", "expected"),
    [(False, 0.0, [2.0, 9.0, 9.0]), (True, 0.0, [1.0, 9.0, 5.0]), (False, 0.9, [2.0, 9.0, 9.0])],
)
def test_the_maximum_of_the_target_is_over_what_the_next_row_allows(
    double: bool, munchausen: float, expected: list[float]
) -> None:
    config = dqn.Config(replay=InMemory(size=64), double=double, munchausen=munchausen, discount=0.5)
    agent = config.make_agent(MASKED, ACTIONS, ModelConfig(hidden=()), 0)
    algo: Any = config.make_algorithm(agent, BatchSpec(4, 2), 100)
    algo = getattr(algo, "algo", algo)
    write_table(agent.model, [[8.0, 7.0, 9.0], [8.0, 7.0, 9.0]])
    write_table(algo.target, [[1.0, 2.0, 9.0], [5.0, 4.0, 9.0]])
    zeros = torch.zeros(3)
    batch = Transitions(
        inputs=inputs([0, 0, 1], [[1, 1, 1]] * 3),
        action=torch.tensor([0, 1, 2]),
        return_=torch.tensor([0.25, 0.0, 0.0]),
        bootstrap=torch.full((3,), 0.5),
        next_inputs=inputs([0, 0, 1], [[1, 1, 0], [1, 1, 1], [0, 0, 0]]),
        weight=zeros + 1,
        index=np.arange(3),
    )
    if double:  # all forbidden: as if all were allowed
        batch = dataclasses.replace(batch, next_inputs=inputs([0, 0, 1], [[1, 1, 0], [0, 0, 0], [1, 1, 0]]))
    assert algo.next_values(batch).squeeze(-1).tolist() == expected  # a soft one at 0.03, a part in 1e13 from it


def test_r2d1s_choice_is_over_what_each_row_allows() -> None:
    agent = make_q_agent(MASKED, ACTIONS, CONFIG, ExpectedValue(), "epsilon")
    q = torch.tensor([[[1.0, 2.0, 9.0]], [[5.0, 4.0, 9.0]]])  # [T, n, A]
    rows = inputs([0, 0], [[1, 1, 0], [1, 0, 0]]).map(lambda x: x.unsqueeze(1))
    assert agent.best(q, rows).tolist() == [[1], [0]]


def sac_with(q: list[float], logits: list[float]) -> Any:
    config = sac.Config(replay=InMemory(size=64), temperature=0.5)
    agent = config.make_agent(MASKED, ACTIONS, ModelConfig(hidden=()), 0)
    algo = config.make_algorithm(agent, BatchSpec(4, 2), 100)
    with torch.no_grad():
        for network in (*algo.critic.networks.networks, *algo.critic.target.networks):
            network[1].layers.flat[0].zero_()
            network[1].layers.flat[1].copy_(torch.tensor(q))
        agent.model.mlp.layers.flat[0].zero_()
        agent.model.mlp.layers.flat[1].copy_(torch.tensor(logits))
    return algo


def test_sac_expects_over_the_allowed_alone() -> None:
    algo = sac_with([1.0, 2.0, 100.0], [0.5, -0.5, 4.0])
    rows = algo.agent.model.normalized(inputs([0, 1], [[1, 1, 0], [1, 0, 0]]).observation)
    drawn = algo.soft_value.draw(algo.agent.model.params(rows), ())
    loss, log_prob = algo.soft_value.policy_loss(rows, drawn, torch.tensor(0.5))
    p = 1 / (1 + math.exp(-1.0))
    both = p * (0.5 * math.log(p) - 1.0) + (1 - p) * (0.5 * math.log(1 - p) - 2.0)
    assert loss.item() == pytest.approx((both - 1.0) / 2, rel=1e-5)
    assert log_prob.item() == pytest.approx((p * math.log(p) + (1 - p) * math.log(1 - p)) / 2, rel=1e-5)
    loss.backward()
    assert all(x.grad.isfinite().all() for x in algo.agent.model.parameters())
    assert algo.target_entropy(drawn).item() == pytest.approx(0.98 * (math.log(2) + math.log(1)) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "ppo_lstm", "dqn", "sac"])
def test_a_masked_grid_is_solved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    annealed = {"explore": EpsilonConfig(epsilon="linear(1,0.1,0.5)")}
    of_dqn = {**OFF, **annealed, "replay_ratio": 8.0, "target_interval": 100}
    module, settings, model, kwargs = (dqn, of_dqn, {}, {}) if name == "dqn" else RUNS[name]
    quick = {"learning_rate": 3e-3} if module is not sac else {"replay_ratio": 8.0, "temperature": 0.1}
    monkeypatch.setitem(RUNS, "quick", (module, {**settings, **quick}, model, kwargs))
    agent = run("quick", 20_480, T=32, B=8)
    evaluator = Evaluator(EnvConfig(debug_envs.masked, {}, "python"), agent, EvalConfig(n_envs=4, n_episodes=8))
    assert np.mean([t.return_ for t in evaluator.play()]) == pytest.approx(1 - 0.1 * 6)  # the shortest way
    assert leaves(agent.initial_state([0])) or name != "ppo_lstm"
