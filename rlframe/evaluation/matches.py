"""Matches: players of an environment of several agents against each other, and their table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError, PartError, aligned, naming, one_line, printable, warn_once
from rlframe.core.multi_agent import FIRST, OBSERVATION, REWARD, JointSpace, PolicyMap, joint, random_actions
from rlframe.core.names import find_attribute
from rlframe.core.seeding import Role, generator, seed_int
from rlframe.core.spaces import ACTION_MASK, action_decoder, mask_parts, zeros
from rlframe.core.struct import Tree, as_numpy, map_tree
from rlframe.core.types import AgentInputs
from rlframe.envs import EnvConfig
from rlframe.envs.make import make_env
from rlframe.envs.multi_agent import MultiAgentEnv
from rlframe.envs.pettingzoo import function_of
from rlframe.ops.ratings import elo_ratings
from rlframe.updates.progress import do_nothing

RANDOM = "random"  # the player that takes any allowed action
Row = Mapping[str, Any]  # of an agent: observation, reward, first and so on, each [1, ...] (see core.multi_agent)
Function = Callable[[Any, Space, np.random.Generator], Any]


class Player(Protocol):
    """Plays one or more agents of a game."""

    name: str

    def check(self, observation_space: JointSpace, action_space: JointSpace) -> None:
        """Raise ConfigError unless it can play every agent; entries of the spaces are agents."""

    def start(self, rng: np.random.Generator, episode: int) -> None:
        """A game starts, with this generator; `episode` is for players whose policies change with it."""

    def act(self, agent: str, row: Row, observation_space: Space, action_space: Space) -> Tree:
        """The action of an agent [1, ...], in terms of its action space."""


class FunctionPlayer:
    """Plays by a function of (observation, action_space, rng), or at random."""

    def __init__(self, name: str, key: str = "player") -> None:
        """Args:
            name: random, or module:function, which returns an element of the action space.    key: for messages.
        Raises:
            ConfigError: there is no such function.
        """
        self.name, self._rng = name, np.random.default_rng(0)
        self._function: Function | None = None
        if name != RANDOM:
            found = find_attribute(name, key)
            if not callable(found):
                raise ConfigError(f"{key}={name:.100} is no function of (observation, action_space, rng)")
            self._function = found

    def check(self, observation_space: JointSpace, action_space: JointSpace) -> None:
        """It is the function's to know what it can play."""

    def start(self, rng: np.random.Generator, episode: int) -> None:
        self._rng = rng

    def act(self, agent: str, row: Row, observation_space: Space, action_space: Space) -> Tree:
        if self._function is None:
            action = random_actions(observation_space, action_space, row[OBSERVATION], [self._rng])
            return action_decoder(action_space)(action)
        with naming(f"player {self.name}, agent {agent}"):
            action = self._function(map_tree(lambda x: x[0], row[OBSERVATION]), action_space, self._rng)
        if not action_space.contains(action):
            raise PartError(f"player {self.name}: {action!r:.60} for agent {agent} is none of {action_space}'s actions")
        if parts := mask_parts(observation_space, action_space):
            chosen = np.ravel(action - action_space.start)  # type: ignore[attr-defined]
            starts = np.cumsum([0, *parts[:-1]])
            if not row[OBSERVATION][ACTION_MASK][0, starts + chosen].all():
                raise PartError(f"player {self.name}: {action!r:.60} for agent {agent} is forbidden by its action_mask")
        return map_tree(lambda x: np.asarray(x)[None], action)


class PolicyPlayer:
    """Plays by the policies of a trained agent, each agent by the policy that it had in training."""

    def __init__(
        self, name: str, agent: Agent, spaces: tuple[Space, Space], policies: PolicyMap, explore: bool = True
    ) -> None:
        """Args:
            name: for the table.    spaces: of observations and actions, for which the agent was made.
            policies: which of them acts for which agent.    explore: act with the exploration noise of training.
        Raises:
            ConfigError: its environment has a single agent.
        """
        if not agent.agents() or not all(isinstance(space, JointSpace) for space in spaces):
            raise ConfigError(f"{name:.200} was trained in an environment of one agent; matches need several")
        self.name, self._agents, self._explore = name, agent.agents(), explore
        self._spaces: tuple[Any, Any] = spaces
        self._map, self._function = policies, function_of(policies.function, "agents.map")
        self._episode = 0
        self._device = next(agent.parameters()).device
        self._rng = np.random.default_rng(0)
        self._state: dict[str, tuple[Tree, Tree]] = {}  # of each agent that acted: its memory and its last action

    def check(self, observation_space: JointSpace, action_space: JointSpace) -> None:
        for agent in observation_space.agents:
            own = [policy for policy, agents in self._spaces[0].agents.items() if agent in agents]
            if not own:
                raise ConfigError(f"{self.name:.200} has no policy for agent {agent}")
            for policy in own:
                self._check(agent, policy, (observation_space, action_space))

    def _check(self, agent: str, policy: str, spaces: tuple[JointSpace, JointSpace]) -> None:
        for kind, own, space in zip(("observations", "actions"), self._spaces, spaces, strict=True):
            if own.own[policy] != space.own[agent]:
                before, now = (one_line(x, 100) for x in (own.own[policy], space.own[agent]))
                raise ConfigError(
                    f"agent {agent}: policy {policy} of {self.name:.200} is for {kind} {before}; here they are {now}"
                )

    def start(self, rng: np.random.Generator, episode: int) -> None:
        self._rng, self._state, self._episode = rng, {}, episode

    def _policy_of(self, agent: str) -> Agent:
        if self._function is None:
            return self._agents[self._map.of(agent)]
        with naming(f"agents.map={self._map.function} of {self.name:.200}, agent {agent}"):
            return self._agents[self._function(agent, self._episode)]

    @torch.inference_mode()
    def act(self, agent: str, row: Row, observation_space: Space, action_space: Space) -> Tree:
        policy = self._policy_of(agent)
        state, action = self._state.get(agent) or (policy.initial_state([0]), zeros(action_space, (1,)))
        inputs = AgentInputs(row[OBSERVATION], action, row[REWARD], row[FIRST]).torch()
        noise = map_tree(torch.as_tensor, policy.noise(self._rng, (1,)))
        noise = noise if self._explore else map_tree(torch.zeros_like, noise)
        inputs, noise, state = (map_tree(lambda x: x.to(self._device), each) for each in (inputs, noise, state))
        step = policy.step(inputs, state, noise)
        action = map_tree(as_numpy, step.action)
        self._state[agent] = step.state, action
        return action_decoder(action_space)(action)


@dataclass
class Pair:
    """What the games of two players came to."""

    first: str
    second: str
    won: int = 0  # by the first
    drawn: int = 0
    lost: int = 0
    returns: tuple[float, float] = (0.0, 0.0)  # sums over games, of the mean of each player's agents

    @property
    def games(self) -> int:
        return self.won + self.drawn + self.lost

    @property
    def score(self) -> float:
        """The share of games that the first won, with half of those that were drawn."""
        return (self.won + self.drawn / 2) / self.games

    def add(self, own: float, other: float) -> None:
        """Add a game by the returns of both."""
        self.won += own > other
        self.lost += own < other
        self.drawn += own == other
        self.returns = self.returns[0] + own, self.returns[1] + other


class Table:
    """An environment at which players meet. Closes with it."""

    def __init__(self, env: EnvConfig, max_length: int = 200_000, on_step: Callable[[], None] = do_nothing) -> None:
        """Args:
            max_length: env steps after which a game is cut, and counts as it is then.
            on_step: called before each step of a game; what it raises ends the game.
        Raises:
            ConfigError: it has fewer than two agents.
        """
        env = replace(env, mode="eval")
        with closing(make_env(env)) as probe:
            several = _several(probe, str(env.id)).possible
        seen = env.policies  # what agents see is what they saw in training
        names = PolicyMap(policies=several, global_state=seen.global_state, agent_id=seen.agent_id)
        self._env = make_env(replace(env, policies=names))
        self._inner, self._max_length, self._on_step = _several(self._env, str(env.id)), max_length, on_step
        self.agents = self._inner.possible
        if len(self.agents) < 2:
            self.close()
            raise ConfigError(
                f"matches need an environment of at least 2 agents, and {env.id} has {self.agents[0]} alone"
            )
        self.observation_space, self.action_space = joint((self._inner.observation_space, self._inner.action_space))

    def close(self) -> None:
        self._env.close()

    def play(self, first: Player, second: Player, n_games: int, seed: int) -> Pair:
        """Let two players play. In turn, each has one agent and the other player the rest, and the seats alternate.

        Of two games in a row, in which they change sides, the environment has the same seed.
        """
        found, n = Pair(first.name, second.name), len(self.agents)
        for player in (first, second):
            player.check(self.observation_space, self.action_space)
        for game in range(n_games):
            alone, rest = (first, second) if game % 2 == 0 else (second, first)
            chosen = self.agents[game // 2 % n]
            players = {agent: alone if agent == chosen else rest for agent in self.agents}
            returns = self._play(players, (first, second), seed, game)
            own, other = (
                float(np.mean([returns.get(agent, 0.0) for agent in self.agents if players[agent] is player]))
                for player in (first, second)
            )
            found.add(own, other)
        return found

    def _play(self, players: Mapping[str, Player], both: Sequence[Player], seed: int, game: int) -> dict[str, float]:
        """Play a game; returns the return of each agent that came."""
        for k, player in enumerate(both):
            player.start(generator(seed, Role.MATCH, game, k), game // 2)
        rows, _ = self._env.reset(seed=seed_int(seed, Role.MATCH, game // 2))
        actions = {agent: zeros(space) for agent, space in self.action_space.spaces.items()}
        for _ in range(self._max_length):
            for agent in self._inner.acting():
                own, space = self.observation_space.own[agent], self.action_space.own[agent]
                actions[agent] = players[agent].act(agent, rows[agent], own, space)
            self._on_step()
            rows, _, terminated, truncated, _ = self._env.step(actions)
            if terminated or truncated:
                return self._inner.returns
        warn_once(
            f"a game ran {self._max_length:,} steps without an end: it counts as it is; set a time limit "
            f"(env.max_episode_steps=...)"
        )
        return self._inner.returns


def _several(env: gymnasium.Env, name: str) -> MultiAgentEnv:
    found = env.unwrapped
    if not isinstance(found, MultiAgentEnv):
        raise ConfigError(f"env={name} has a single agent; matches need several")
    return found


def ratings(pairs: Sequence[Pair]) -> dict[str, tuple[float, float]]:
    """Elo and score of each player over all its games, the strongest first."""
    names = list(dict.fromkeys(name for pair in pairs for name in (pair.first, pair.second)))
    scores, games = np.zeros((len(names), len(names))), np.zeros((len(names), len(names)))
    for pair in pairs:
        i, j = names.index(pair.first), names.index(pair.second)
        own = pair.score * pair.games
        scores[i, j], scores[j, i] = own, pair.games - own
        games[i, j] = games[j, i] = pair.games
    elo, total = elo_ratings(scores, games), scores.sum(1) / games.sum(1)
    return {names[k]: (float(elo[k]), float(total[k])) for k in np.argsort(-elo, kind="stable")}


def lines(pairs: Sequence[Pair]) -> str:
    """The tables of all pairs and of all players."""
    rows: list[Sequence[str]] = [("player", "against", "games", "won", "drawn", "lost", "score", "return")]
    for pair in pairs:
        counts = (str(n) for n in (pair.games, pair.won, pair.drawn, pair.lost))
        mean = f"{pair.returns[0] / pair.games:.2f}"
        rows.append((printable(pair.first), printable(pair.second), *counts, f"{pair.score:.1%}", mean))
    of_players = [("player", "Elo", "score")]
    of_players += [(printable(name), f"{elo:+.0f}", f"{score:.1%}") for name, (elo, score) in ratings(pairs).items()]
    return "\n".join([*aligned(rows, "<<>>>>>>"), "", *aligned(of_players, "<>>")])
