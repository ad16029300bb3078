"""Agents whose ends, masks, rewards or names are out of the ordinary: what is learned, reported and refused."""

from __future__ import annotations

from contextlib import closing
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from pettingzoo import AECEnv, ParallelEnv

from rlframe.algos.base import observed
from rlframe.core.errors import ConfigError
from rlframe.core.multi_agent import PolicyMap, columns_of, present
from rlframe.envs import EnvConfig, make_envs
from rlframe.envs.multi_agent import MultiAgentEnv
from rlframe.envs.observations import InvalidValue
from rlframe.envs.options import EnvOptions
from rlframe.samplers import SerialSampler
from tests.envs.test_multi_agent import team_of


class Three(ParallelEnv[str, Any, Any]):
    """Agents whose reward is their action; the first `n` are there from the start, all others come in step 5."""

    metadata: ClassVar[dict[str, Any]] = {"name": "three"}
    render_mode = None

    def __init__(self, n: int = 3, names: tuple[Any, ...] = ("a", "b", "c"), length: int = 100) -> None:
        self.possible_agents, self._n, self._length = list(names), n, length

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(-1, 1, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.t, self.agents = 0, self.possible_agents[: self._n]
        return self._seen(self.agents), self._infos(self.agents)

    def _seen(self, agents: list[str]) -> dict[str, Any]:
        return {agent: np.zeros(2, np.float32) for agent in agents}

    def _infos(self, agents: list[str]) -> dict[str, Any]:
        return {agent: {} for agent in agents}

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        self.t += 1
        acted, last = self.agents, self.t >= self._length
        come = self.possible_agents[self._n :] if self.t == 5 else []
        self.agents = [] if last else [*acted, *come]
        rewards = {agent: float(np.sum(actions[agent])) for agent in acted}
        no, ended = dict.fromkeys(acted, False), dict.fromkeys(acted, last)
        return self._seen([*acted, *come]), rewards, no, ended, self._infos(self.agents)


class Above0(Three):
    """What it shows is never 0."""

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(1, 2, (2,), np.float32)

    def _seen(self, agents: list[str]) -> dict[str, Any]:
        return {agent: np.full(2, 1.5, np.float32) for agent in agents}


def test_agents_that_have_not_come_are_within_the_bounds() -> None:
    env = MultiAgentEnv(Above0(n=2), PolicyMap(), EnvOptions())
    for _ in range(2):
        rows, _ = env.reset(seed=0)
        assert rows["shared"]["observation"].tolist() == [[1.5, 1.5], [1.5, 1.5], [1.0, 1.0]]
        for _ in range(6):
            rows = env.step({"shared": np.zeros(3, np.int64)})[0]
        assert (rows["shared"]["observation"] == 1.5).all()


class Late(Three):
    """Agent c comes in step 5 of 10; what all observe is 1."""

    def __init__(self) -> None:
        super().__init__(n=2, length=10)

    def _seen(self, agents: list[str]) -> dict[str, Any]:
        return {agent: np.ones(2, np.float32) for agent in agents}


@pytest.mark.parametrize("T", [1, 24])
def test_running_statistics_do_not_count_agents_that_have_not_come(T: int) -> None:
    envs = make_envs(EnvConfig(f"{__name__}:Late"), n=1, seeds=[0])
    with closing(SerialSampler(envs, team_of(envs), batch_T=T)) as sampler:
        for _ in range(24 // T):
            samples = columns_of(sampler.collect(), "shared")
            seen = observed(samples)
            assert isinstance(seen, torch.Tensor)
            assert seen[..., 0].numel() >= samples.n_rows
            assert (seen == 1).all()


class MaskedInfos(Three):
    """Agent a has a mask in its info while it acts; b has another kind of action, without one."""

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4) if agent == "a" else spaces.Box(-1, 1, (1,), np.float32)

    def _infos(self, agents: list[str]) -> dict[str, Any]:
        mask = np.array([1, 0, 1, 0], np.int8)
        return {agent: {"action_mask": mask} if agent == "a" else {} for agent in agents}


class Zombie(Three):
    """Agent b is terminated in step 2 and stays."""

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        observations, rewards, terminated, *others = super().step(actions)
        terminated["b"] = self.t == 2
        return observations, rewards, terminated, *others


class OneMove(AECEnv[str, Any, Any]):
    """The first player moves, wins 1 from the other, and the game is over."""

    metadata: ClassVar[dict[str, Any]] = {"name": "one move", "is_parallelizable": False}
    render_mode = None
    possible_agents: ClassVar[list[str]] = ["left", "right"]  # type: ignore[misc]

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(-1, 1, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(2)

    def observe(self, agent: str) -> np.ndarray:
        return np.zeros(2, np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.agent_selection = list(self.possible_agents), "left"
        for name in ("rewards", "_cumulative_rewards"):
            setattr(self, name, dict.fromkeys(self.agents, 0.0))
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def step(self, action: int | None) -> None:
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        self.rewards = {"left": 1.0, "right": -1.0}
        self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = "right"


def played(env: MultiAgentEnv, n_steps: int, action: Any) -> tuple[Any, dict[str, Any]]:
    """The rows and the info of the last of some steps."""
    env.reset(seed=0)
    for _ in range(n_steps):
        rows, _, _, _, info = env.step(action)
    return rows, info


def test_who_would_come_in_the_step_of_the_time_limit_stays_away() -> None:
    env = MultiAgentEnv(Three(n=2), PolicyMap(), EnvOptions(max_episode_steps=5))
    rows, info = played(env, 5, {"shared": np.array([1, 2, 3])})
    assert rows["shared"]["first"].tolist() == [False] * 3
    assert present(rows["shared"]).tolist() == [True, True, False], "the values of those that were cut count"
    assert info["episode/agent/return"] == 7.5


def test_masks_in_infos_are_of_agents_that_act_by_discrete_actions() -> None:
    policies = PolicyMap({"a": "one", "b": "other"}, policies=("one", "other"))
    env = MultiAgentEnv(MaskedInfos(n=2, names=("a", "b"), length=3), policies, EnvOptions())
    env.reset(seed=0)
    masks = []
    for _ in range(3):
        rows, *_ = env.step({"one": np.zeros(1, int), "other": np.zeros((1, 1), np.float32)})
        masks.append(rows["one"]["observation"]["action_mask"][0].tolist())
    assert masks == [[1, 0, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1]]
    env = MultiAgentEnv(MaskedInfos(n=2, names=("a", "b")), policies, EnvOptions(max_episode_steps=1))
    rows, _ = played(env, 1, {"one": np.zeros(1, int), "other": np.zeros((1, 1), np.float32)})
    assert rows["one"]["truncated"].all()
    assert rows["one"]["observation"]["action_mask"].tolist() == [[1, 0, 1, 0]], "what is bootstrapped from"
    assert "action_mask" not in env.observation_space["other"]["observation"].spaces


def test_what_is_lost_before_the_first_turn_is_in_the_return() -> None:
    env = MultiAgentEnv(OneMove(), PolicyMap({"left": "one", "right": "two"}, policies=("one", "two")), EnvOptions())
    rows, info = played(env, 1, {"one": np.zeros(1, int), "two": np.zeros(1, int)})
    assert info == {"episode/one/return": 1.0, "episode/two/return": -1.0}
    assert env.returns == {"left": 1.0, "right": -1.0}
    assert not rows["two"]["valid"].any(), "it did nothing to learn from"


class Sometimes(OneMove):
    """In every second episode the other player has the first turn."""

    n = 0

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed, options)
        self.n += 1
        self.agent_selection = "left" if self.n % 2 else "right"


def test_the_return_is_that_of_the_episode_whoever_had_turns_before() -> None:
    policies = PolicyMap({"left": "one", "right": "two"}, policies=("one", "two"))
    env = MultiAgentEnv(Sometimes(), policies, EnvOptions())
    for _ in range(4):
        _, info = played(env, 1, {"one": np.zeros(1, int), "two": np.zeros(1, int)})
        assert info == {"episode/one/return": 1.0, "episode/two/return": -1.0}


class Guest(OneMove):
    """Right is there from the first step on, and has the next turn; four steps."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed, options)
        self.t, self.agents = 0, ["left"]

    def step(self, action: int | None) -> None:
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        self.t += 1
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 1.0)
        self.terminations = dict.fromkeys(self.agents, self.t == 4)
        self.agent_selection = self.possible_agents[self.t % 2]


def test_who_comes_with_the_next_turn_starts_an_episode_of_its_own() -> None:
    env = MultiAgentEnv(Guest(), PolicyMap(), EnvOptions())
    env.reset(seed=0)
    found = []
    for _ in range(4):
        rows, *_, info = env.step({"shared": np.zeros(2, int)})
        found.append((rows["shared"]["first"].tolist(), rows["shared"]["valid"].tolist()))
    assert found[0] == ([True, True], [False, False])
    assert found[1] == ([False, True], [True, False])
    assert found[2] == ([False, False], [False, True])
    assert found[3] == ([False, False], [True, True])
    assert info["episode/agent/return"] == 3.5


@pytest.mark.parametrize("make", [OneMove, lambda: Three(n=1, names=("left", "right"), length=2)])
def test_a_league_reports_both_sides_also_where_one_never_comes(make: Any) -> None:
    env = MultiAgentEnv(make(), PolicyMap(opponents=1), EnvOptions())
    action = {"opponent_0": np.ones(1, int), "shared": np.ones(2, int)}
    seen = set()
    for seed in range(9):
        env.reset(seed=seed)
        done = False
        while not done:
            _, _, *ends, info = env.step(action)
            done = any(ends)
        seen.add((info["episode/shared/return"], info["episode/opponent_0/return"]))
    assert seen == ({(1.0, -1.0), (-1.0, 1.0)} if make is OneMove else {(2.0, 0.0), (0.0, 2.0)})


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (lambda: Three(names=("a", "b", "a")), "possible_agents has a 2 times; give each agent its own name"),
        (lambda: Three(names=(4, 5, 6)), "possible_agents has 4, a int; agents' names must be str"),
        (lambda: Three(names=(0, 1, 2)), "possible_agents has 0, a int; agents' names must be str"),
        (lambda: Three(names=("", "b", "")), "possible_agents has  2 times; give each agent its own name"),
        (lambda: Three(n=0), "an episode started without agents; let `agents` name who plays"),
        (Zombie, r"agent b \(policy shared\) ended and stays in `agents`"),
    ],
)
def test_what_is_refused_is_said_with_the_remedy(env: Any, words: str) -> None:
    with pytest.raises((ConfigError, InvalidValue), match=words):
        played(MultiAgentEnv(env(), PolicyMap(), EnvOptions()), 3, {"shared": np.zeros(3, int)})
