"""The league of a run, if it has one, and who is evaluated then."""

from __future__ import annotations

from gymnasium import Space

from rlframe.agents import Agent
from rlframe.agents.team import Team
from rlframe.core.multi_agent import SHARED, joint, opponent_name
from rlframe.experiment.config import Experiment
from rlframe.experiment.weights import load_weights, naming_policy, saved_part
from rlframe.runners.league import League


def make_leagues(experiment: Experiment, agent: Agent, in_spaces: tuple[Space, Space]) -> list[League]:
    """What gives the opponents of a league their weights.

    Raises:
        ConfigError: a member's weights do not fit.
    """
    config = experiment.agents.league
    if not isinstance(agent, Team) or not config.opponents:
        return []
    observations, _ = joint(in_spaces)
    opponents = [agent.agents()[opponent_name(k)] for k in range(config.opponents)]
    members = [saved_part(name, "agent", SHARED) for name in config.members]
    for name, weights in zip(config.members, members, strict=True):
        with naming_policy("agents.league.members", opponent_name(0), observations.agents[opponent_name(0)]):
            load_weights(opponents[0], weights, name)
    return [League(agent.agents()[SHARED], opponents, config, experiment.seed, members)]


def evaluated_agent(
    experiment: Experiment, agent: Agent, in_spaces: tuple[Space, Space]
) -> tuple[Agent, tuple[Space, Space]]:
    """The agent that is evaluated, and its spaces: of a league, the policy that learns, which plays all seats."""
    if not experiment.agents.league.opponents or not isinstance(agent, Team):
        return agent, in_spaces
    observations, actions = (space.part(SHARED) for space in joint(in_spaces))
    return Team({SHARED: agent.agents()[SHARED]}, observations, actions), (observations, actions)
