"""Environments of PettingZoo whose agents act one after another, with its parallel interface."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pettingzoo.utils.conversions import aec_to_parallel_wrapper, turn_based_aec_to_parallel_wrapper


class Cycles(aec_to_parallel_wrapper[str, Any, Any]):
    """PettingZoo's aec_to_parallel: all agents act, in their order, and the environment moves after the last one.

    Its own also observes each agent before it acts, which nobody sees, and reads everything through all wrappers many
    times: a step of simple_spread takes 1.3 times as long with it, and one of pistonball 1.8 times.
    """

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        env, rewards = self.aec_env, defaultdict[str, float](float)
        for agent in list(env.agents):
            if agent != (turn := env.agent_selection):
                raise RuntimeError(
                    f"it is the turn of agent {turn}, not of {agent}: agents must act in the order of `agents` and "
                    f"end only when the last one has acted"
                )
            env.step(actions[agent])
            given = env.rewards
            for each in env.agents:
                rewards[each] += given[each]
        return _result(self, rewards)


class Turns(turn_based_aec_to_parallel_wrapper[str, Any, Any]):
    """PettingZoo's turn_based_aec_to_parallel: one agent acts in a step."""

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        self.aec_env.step(actions[self.aec_env.agent_selection])
        return _result(self, self.aec_env.rewards)


def _result(parallel: Any, rewards: dict[str, float]) -> tuple[Any, ...]:
    """What a step returns; agents that have ended leave."""
    env = parallel.aec_env
    found = [dict(each) for each in (rewards, env.terminations, env.truncations, env.infos)]
    observations = {agent: env.observe(agent) for agent in env.agents}
    while (agents := env.agents) and (env.terminations[turn := env.agent_selection] or env.truncations[turn]):
        env.step(None)
    parallel.agents = agents
    return observations, *found
