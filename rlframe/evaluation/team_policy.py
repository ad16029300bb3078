"""TeamPolicy: the policies of an environment of several agents, by agents' names, as PettingZoo's loops take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gymnasium import Space, spaces

from rlframe.agents import Agent
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.core.multi_agent import OBSERVATION, JointSpace
from rlframe.core.spaces import ACTION_MASK
from rlframe.envs import EnvConfig
from rlframe.envs.make import fixed_backend, resolve, reward_options
from rlframe.envs.pettingzoo import function_of
from rlframe.evaluation.policy import Policy

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class TeamPolicy:
    """Acts for all agents of an environment, each by its own policy; agents with memory have one each.

    observations, infos = env.reset()  # of PettingZoo, parallel
    policy.reset()
    while env.agents:
        observations, rewards, _, _, infos = env.step(policy.act(observations, infos))
    """

    def __init__(self, team: Agent, observation_space: JointSpace, action_space: JointSpace, env: EnvConfig) -> None:
        """`team`: of several policies.    env: the environment's config, which says for whom each acts."""
        self.observation_space, self.action_space = observation_space, action_space
        self.policies = tuple(observation_space.agents)  # their names
        self._agents, self._env = team.agents(), env
        self._function = function_of(env.policies.function, "agents.map")
        self._by_agent: dict[str, Policy] = {}  # of those that have acted in this episode
        self._acting: frozenset[str] = frozenset()  # in the step before
        self._episode = 0

    def reset(self) -> None:
        """Start an episode: forget the previous one. Policies without memory, and whose map is fixed, need no reset."""
        self._episode += bool(self._by_agent)
        self._by_agent = {}

    def of(self, policy: str, seed: int | Sequence[int] = 0) -> Policy:
        """The policy of this name, for the observations of one of its agents. Raises ConfigError if there is none."""
        if policy not in self.policies:
            known = ", ".join(self.policies)
            raise ConfigError(f"policy={policy:.60}: there is none of this name; there are {known}")
        own = self.observation_space.own[policy], self.action_space.own[policy]
        return Policy(self._agents[policy], *own, seed, self._env.options)

    def act(
        self,
        observations: Mapping[str, Any],
        infos: Mapping[str, Any] = _NOTHING,
        rewards: Mapping[str, Any] = _NOTHING,
        explore: bool = False,
    ) -> dict[str, Any]:
        """The actions of agents by their names, from their observations; agents that are absent have none.

        An agent with memory that was absent in the step before starts an episode.

        Args:
            infos: of agents; needed only if they have the masks of actions, as in PettingZoo they may.
            rewards: see `Policy.act`.    explore: act with the exploration noise of training.
        Raises:
            ValueError: an observation does not fit its space, or an agent is unknown; the message names both.
        """
        found = {}
        for agent, observation in observations.items():
            own = self._policy_of(agent)
            if agent not in self._acting:
                own.reset()
            try:
                seen = _with_mask(observation, own.observation_space, infos.get(agent, {}))
                found[agent] = own.act(seen, rewards.get(agent, 0.0), explore)
            except ValueError as error:
                raise ValueError(f"agent {agent}: {error}") from None
        self._acting = frozenset(observations)
        return found

    def _policy_of(self, agent: str) -> Policy:
        if agent not in self._by_agent:
            known = list(dict.fromkeys(each for own in self.observation_space.agents.values() for each in own))
            if agent not in known:
                raise ValueError(f"agent {agent:.60} is unknown{nearest(agent, known)}; there are {', '.join(known)}")
            name = self._function(agent, self._episode) if self._function else self._env.policies.of(agent)
            self._by_agent[agent] = self.of(name, (known.index(agent), self._episode))
        return self._by_agent[agent]


def policy_of(agent: Agent, in_spaces: tuple[Space, Space], env: EnvConfig, name: str = "") -> Policy | TeamPolicy:
    """The policy of an agent; of a Team the one of a name, the only one, or all of them.

    Args:
        in_spaces: of observations and actions.    env: the config of the environment that it acts in.
    Raises:
        ConfigError: it has none of this name.
    """
    observations, actions = in_spaces
    if isinstance(observations, JointSpace) and isinstance(actions, JointSpace):
        team = TeamPolicy(agent, observations, actions, env)
        return team.of(name or team.policies[0]) if name or len(team.policies) == 1 else team
    if name:
        raise ConfigError(f"policy={name:.60} is for environments of several agents, and this one has a single agent")
    options = reward_options(env, resolve(env.id), fixed_backend(env, 1))
    return Policy(agent, observations, actions, options=options)


def _with_mask(observation: Any, space: Space, info: Mapping[str, Any]) -> Any:
    """An observation with the mask of its agent's info, if it needs that."""
    if not isinstance(space, spaces.Dict) or ACTION_MASK not in space.spaces or ACTION_MASK not in info:
        return observation
    entries = observation if isinstance(observation, Mapping) else {OBSERVATION: observation}
    return {ACTION_MASK: info[ACTION_MASK], **entries}
