"""MultiAgentEnv: rows of agents that come, die or wait for their turn, the same in every sampler, and bad input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from rlframe.agents.team import Team
from rlframe.algos import ppo
from rlframe.core.errors import ConfigError, PartError
from rlframe.core.multi_agent import JointSpace, PolicyMap, columns_of, observation_of, random_actions
from rlframe.core.spaces import zeros
from rlframe.core.struct import leaves
from rlframe.core.types import Samples
from rlframe.envs import EnvConfig, EnvError, EnvOptions, make_envs
from rlframe.envs.multi_agent import MultiAgentEnv
from rlframe.envs.observations import InvalidValue, batch_checker
from rlframe.models import ModelConfig
from rlframe.samplers import cpu, gpu, serial
from tests.agents_envs import Crowd, Turns
from tests.envs.rows import rows_for

CROWD, TURNS = EnvConfig("tests.agents_envs:Crowd"), EnvConfig("tests.agents_envs:Turns")
KINDS = EnvConfig("tests.agents_envs:Crowd", {"kinds": 2}, policies=PolicyMap(policies=("even", "odd")))


def team_of(envs: Any) -> Team:
    seen, done = envs.observation_space, envs.action_space
    assert isinstance(seen, JointSpace)
    assert isinstance(done, JointSpace)
    model = ModelConfig(hidden=(8,))
    agents = {name: ppo.Config().make_agent(own, done.own[name], model, seed=1) for name, own in seen.own.items()}
    return Team(agents, seen, done)


def by_policy(samples: Samples) -> dict[str, Samples]:
    return {name: columns_of(samples, name) for name in samples.inputs.observation}


def batches(config: Any, env: EnvConfig, n: int = 3) -> Iterator[dict[str, Samples]]:
    envs = config.make_envs(env, 5, ())
    with closing(config.make_sampler(envs, team_of(envs), 5)) as sampler:
        for _ in range(n):
            yield {name: each.map(torch.clone) for name, each in by_policy(sampler.collect()).items()}


@pytest.mark.same_bits
@pytest.mark.parametrize("env", [CROWD, KINDS, TURNS], ids=["crowd", "kinds", "turns"])
def test_all_samplers_give_the_same_rows_of_every_policy(env: EnvConfig) -> None:
    def rows(config: Any) -> list[np.ndarray]:
        return [x.numpy() for batch in batches(config, env) for x in leaves(batch)]

    expected = rows(serial.Config(batch_T=16, batch_B=4))
    workers = {"batch_T": 16, "batch_B": 4, "n_workers": 2}
    for config in (cpu.Config(**workers), gpu.Config(**workers, n_groups=2)):
        assert all(np.array_equal(x, y) for x, y in zip(rows(config), expected, strict=True))


def test_only_living_agents_have_valid_rows_and_each_goes_on_where_it_was() -> None:
    kept = [batch["shared"] for batch in batches(serial.Config(batch_T=32, batch_B=2), CROWD, 20)]
    observation = torch.cat([x.observation for x in kept])  # number, age and step
    following = torch.cat([x.inputs.observation[1:] for x in kept])
    valid, first = (torch.cat([x.valid for x in kept]), torch.cat([x.inputs.first[:-1] for x in kept]))
    action, reward = torch.cat([x.action for x in kept]), torch.cat([x.reward for x in kept])
    ended = torch.cat([x.terminated | x.truncated for x in kept])
    assert 0.3 < valid.float().mean() < 0.9
    assert torch.equal(observation[..., 0][valid], torch.arange(8).remainder(4).expand(len(valid), 8)[valid].float())
    assert torch.equal(reward[valid], action[valid].float())
    assert not reward[~valid].any()
    assert torch.equal(following[valid][:, 1:], observation[valid][:, 1:] + 1)  # also the last observation
    assert not (following[~valid][:, 1] == observation[~valid][:, 1] + 1).any()  # only a living agent grows older
    assert torch.equal(first[valid], observation[..., 1][valid] == 0)
    assert not ended[~valid].any()
    assert not (valid[1:] & ended[:-1]).any()
    terminated = torch.cat([x.terminated for x in kept])
    assert not terminated[:, 1::2].any()
    assert terminated[:, ::2].any()
    assert sum(x.n_rows for x in kept) == int(valid.sum()) > sum(x.n_env_steps for x in kept) > 0


def test_a_step_in_turn_is_finished_at_the_next_turn_with_all_rewards_since() -> None:
    (batch,) = (each["shared"] for each in batches(serial.Config(batch_T=12, batch_B=1), TURNS, 1))
    steps = {
        k: [(int(batch.observation["observation"][t, k, 1]), float(batch.reward[t, k] - batch.action[t, k]))
            for t in range(12) if batch.valid[t, k]]
        for k in range(3)
    }  # fmt: skip
    # Steps at which each began, and what it got beside its action: 10 for each step of others until its next turn.
    assert steps[0] == [(0, 20.0), (3, 20.0), (6, 10.0), (8, 10.0), (10, 0.0)]
    assert steps[1] == [(1, 20.0), (4, 20.0), (7, 10.0), (9, 10.0)]
    assert steps[2] == [(2, 20.0), (5, 0.0)]
    assert batch.terminated[:, 2].nonzero().flatten().tolist() == [5]
    assert not batch.terminated[:, :2].any()
    assert batch.truncated[10].tolist() == [True, True, False]
    assert batch.n_env_steps == 11
    assert batch.n_rows == 11
    mask = batch.observation["action_mask"].gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
    assert bool(mask[batch.valid].all())
    log_prob = batch.info.log_prob  # type: ignore[attr-defined]
    began, finished = 3, 5  # rows of player 0's second step
    assert torch.equal(log_prob[began, 0], log_prob[finished, 0])
    assert batch.action[began, 0] == batch.action[finished, 0]


def test_a_run_of_agents_in_turn_goes_on_bit_by_bit_from_a_saved_state() -> None:
    for env in (TURNS, KINDS):
        config = serial.Config(batch_T=7, batch_B=2)
        envs = config.make_envs(env, 5, ())
        sampler = config.make_sampler(envs, team_of(envs), 5)
        for _ in range(3):
            sampler.collect()
        state = sampler.state_dict()
        expected = [x.numpy() for x in leaves(by_policy(sampler.collect()))]
        again = config.make_envs(env, 5, ())
        other = config.make_sampler(again, team_of(again), 5)
        assert other.load_state_dict(state) == ["", ""]
        assert all(
            np.array_equal(x, y.numpy()) for x, y in zip(expected, leaves(by_policy(other.collect())), strict=True)
        )


def test_the_state_of_the_environment_is_for_critics_alone() -> None:
    env = EnvConfig("tests.agents_envs:Turns", policies=PolicyMap(global_state="true"))
    with closing(make_envs(env, 1, [0])) as envs:
        seen = envs.observation_space
        assert isinstance(seen, JointSpace)
        assert set(seen.own["shared"]) == {"observation", "action_mask", "privileged"}
        team, model = team_of(envs), team_of(envs).agents()["shared"].model
        assert model.actor.view.keys == ("observation",)
        assert "privileged" in model.critic.view.keys
    for batch in batches(serial.Config(batch_T=12, batch_B=1), env, 1):
        valid = batch["shared"].valid
        own = batch["shared"].observation
        assert torch.equal(own["privileged"][valid][:, 0], own["observation"][valid][:, 1])
    assert team.sizes == {"shared": 3}


def test_rewards_are_scaled_for_learning_and_reported_as_they_are() -> None:
    options = EnvOptions(reward_scale=0.1, reward_clip="[0,0.3]", max_episode_steps=3)
    env = MultiAgentEnv(Crowd(death=0.0), PolicyMap(), options)
    env.reset(seed=0)
    returns = np.zeros(4)
    for t in range(3):
        rows, reward, terminated, truncated, info = env.step({"shared": np.array([1, 2, 3, 4])})
        valid = rows["shared"]["valid"]
        np.testing.assert_allclose(rows["shared"]["reward"], [0.1, 0.2, 0.3, 0.3] * valid, rtol=1e-6)
        assert (terminated, truncated) == (False, t == 2)
        raw = [1, 2, 3, 4] * valid
        assert reward == raw.sum()
        returns += raw
    assert valid[:2].any()
    assert valid[2:].any()
    assert info == {"episode/agent/return": pytest.approx(returns[valid].mean())}


def by_episode(agent: str, episode: int) -> str:
    return "red" if (int(agent[-1]) + episode) % 2 else "blue"


def test_a_function_gives_agents_other_policies_in_every_episode() -> None:
    policies = PolicyMap(function="tests.envs.test_multi_agent:by_episode", policies=("red", "blue"))
    env = EnvConfig("tests.agents_envs:Turns", policies=policies)
    (batch,) = batches(serial.Config(batch_T=23, batch_B=1), env, 1)
    for k in range(3):
        acted = {name: batch[name].valid[:, k].nonzero().flatten() for name in batch}
        early, late = ("blue", "red") if k % 2 == 0 else ("red", "blue")
        assert acted[early].max() < 12 <= acted[late].min()


def played(envs: Any, out: Any, n_steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    kept = []
    for _ in range(n_steps):
        envs.step(random_actions(envs.observation_space, envs.action_space, out.observation, [rng]), out)
        kept += [x.copy() for x in leaves(out)]
    return kept


class Opaque(Turns):
    def __init__(self) -> None:
        super().__init__()
        self.unreadable = lambda: None


@pytest.mark.parametrize("env", [Turns, Opaque], ids=["by its state", "by its actions"])
def test_a_function_gives_the_same_policies_after_a_resume_and_in_every_round(env: Any) -> None:
    policies = PolicyMap(function="tests.envs.test_multi_agent:by_episode", policies=("red", "blue"))
    first, second, third = (make_envs(EnvConfig(env, policies=policies), 1, [3]) for _ in range(3))
    out = rows_for(first)
    first.reset(out)
    second.reset(rows_for(second))
    played(first, out, 27)  # episodes have 11 steps and a reset: the third is running
    row = out.map(np.copy)
    assert second.restore(first.state(), row, lambda: None) == [""]
    expected = played(first, out, 15)
    assert all(map(np.array_equal, played(second, row, 15), expected))
    row = rows_for(third)
    first.reset(out, round_=2)
    third.reset(row, round_=2)
    assert all(map(np.array_equal, played(third, row, 30), played(first, out, 30)))


class Odd(Crowd):
    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        found = super().reset(seed, options)
        self.agents = ["stranger"]
        return found


class Leaver(Crowd):
    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        observations, rewards, terminated, truncated, infos = super().step(actions)
        return observations, rewards, dict.fromkeys(terminated, False), dict.fromkeys(truncated, False), infos


class Lost(Crowd):
    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        observations, rewards, *others = super().step(actions)
        return observations, dict.fromkeys(rewards, float("nan")), *others


class Nested(Crowd):
    """Everybody is there and stays, and the rewards of odd agents are arrays."""

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed, options)
        self.agents = self.possible_agents[:]
        return self._observations(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        observations, rewards, *others = super().step(actions)
        return observations, {a: np.array([r]) if a.startswith("odd") else r for a, r in rewards.items()}, *others


def test_a_reward_counts_once_in_the_return_where_another_policy_is_written_agent_by_agent() -> None:
    env = MultiAgentEnv(Nested(kinds=2, death=0.0), KINDS.policies, EnvOptions())
    env.reset(seed=0)
    for _ in range(2):
        env.step({"even": np.array([1, 2]), "odd": np.array([3, 4])})
    assert env.returns == {"even_0": 2.0, "even_2": 4.0, "odd_1": 6.0, "odd_3": 8.0}


class Blind(Nested):
    """Number 2 sees NaN."""

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        observations, *others = super().step(actions)
        observations["even_2"][1] = float("nan")
        return observations, *others


def test_what_is_not_finite_is_told_of_an_opponent_without_the_agent_which_is_another_in_every_episode() -> None:
    own, names = spaces.Box(-1, 1, (2,), np.float32), {"opponent_0": ("red",), "shared": ("red", "blue")}
    entries = {name: observation_of(own, len(agents), turns=False) for name, agents in names.items()}
    space = JointSpace(entries, dict.fromkeys(names, own), names)
    for policy, k, words in (
        ("shared", 1, r"^agent blue \(policy shared\): .*nan"),
        ("opponent_0", 0, "^policy opponent_0: "),
    ):
        rows = zeros(space, (3,))
        rows[policy]["observation"][2, k, 1] = np.nan
        with pytest.raises(InvalidValue, match=words) as caught:
            batch_checker(space)(rows)
        assert caught.value.index == 2


@pytest.mark.parametrize(
    ("make", "policies", "words"),
    [
        (Crowd, PolicyMap(policies=("odd",)), "agent even_0 has no policy: the policies are odd"),
        (Crowd, PolicyMap(policies=("even", "blue")), "policy blue has no agents.*even_0"),
        (lambda: Crowd(kinds=2), PolicyMap(), "policy shared: agents even_0 and odd_1 have different observations"),
        (Crowd, PolicyMap(patterns={"*": "red"}, policies=("blue",)), "gives agent even_0 the policy red"),
        (Crowd, PolicyMap(global_state="true"), "no state"),
        (Crowd, PolicyMap(function="builtins:abs"), "^agents.map=builtins:abs, agent even_0: .*takes exactly one"),
        (Crowd, PolicyMap(global_state="builtins:abs"), "^agents.global_state=builtins:abs: .*bad operand type"),
        (Odd, PolicyMap(), "agent stranger is none of possible_agents"),
        (Leaver, PolicyMap(), r"agent even_\d \(policy shared\) left without"),
        (Lost, PolicyMap(), r"the reward of agent even_\d \(policy shared\) is not finite"),
        (lambda: Blind(death=0.0), PolicyMap(), r"agent even_2 \(policy shared\): the observation is not finite"),
    ],
    ids=[
        "none",
        "empty",
        "spaces",
        "unknown",
        "state",
        "map raises",
        "state raises",
        "stranger",
        "leaver",
        "nan",
        "blind",
    ],
)
def test_bad_input_names_agent_and_policy(make: Callable[[], Any], policies: PolicyMap, words: str) -> None:
    def play() -> None:
        envs = make_envs(EnvConfig(make, policies=policies), 1, [0])
        serial.SerialSampler(envs, team_of(envs), 64).collect()

    with pytest.raises((ConfigError, EnvError, PartError), match=words):
        play()
