"""Experiments with several agents: the keys that fit them, their leagues, and the agent that is evaluated."""

from __future__ import annotations

from collections.abc import Sequence

from gymnasium import Space

from rlframe.agents import Agent
from rlframe.agents.team import Team
from rlframe.core.errors import ConfigError, prefixed
from rlframe.core.multi_agent import SHARED, JointSpace, joint, opponent_name
from rlframe.core.parts import part_name
from rlframe.experiment.config import Experiment, kind_of
from rlframe.experiment.weights import load_weights, saved_part
from rlframe.record.metrics import METRICS, signed, without_learner
from rlframe.runners.league import League
from rlframe.runners.stop_rule import StopRule


def check_agents(experiment: Experiment, observation_space: Space) -> None:
    """Raise ConfigError for a key that is for several agents in an environment of one, or the reverse."""
    if isinstance(observation_space, JointSpace):
        _check_several(experiment)
        policies = list(observation_space.agents)
        _check_metrics(experiment, policies if len(policies) > 1 else ["agent"])
        return
    _check_metrics(experiment, [])
    if key := experiment.agents.given():
        raise ConfigError(f"{key} is for environments of several agents, and env={experiment.env} has one; remove it")


def _check_several(experiment: Experiment) -> None:
    runner, c = experiment.runner, experiment
    for key, given, instead in (
        (f"record={c.record:.100}", c.record, "write what you need by a callback's on_batch"),
        ("eval.estimate", c.eval.estimate, "play episodes, eval.n_episodes=20"),
        ("runner=evolution", runner.evolves, "use runner=minibatch_rl_eval and an algorithm for it"),
        ("runner=offline_rl", runner.learns_from_data, "use a runner that plays"),
    ):
        if given:
            raise ConfigError(
                f"{key} is for environments of a single agent so far, and env={c.env} has several; remove it, and "
                f"{instead}"
            )


def check_joint(policy: str, own: Experiment, turns: bool) -> None:
    """Raise ConfigError unless a policy's agents can learn together: they take turns, or rewards have a bonus."""
    name = kind_of("algo", own.algo)
    if turns:
        raise ConfigError(
            f"policy {policy}: algo={name} learns from what agents do at the same time, and those of env={own.env} "
            f"take turns; use algo=ppo or dqn"
        )
    if (kind := part_name(own.reward.bonus, "rlframe.rewards")) != "none":
        raise ConfigError(f"policy {policy}: reward.bonus={kind} is of one agent's rows, and algo={name} has a team's")


def _check_metrics(experiment: Experiment, policies: Sequence[str]) -> None:
    """Raise ConfigError for a key that names the metric of a policy that there is not."""
    named = {"stop": StopRule(experiment.stop).names} if experiment.stop else {}
    named["snapshot_best"] = [signed(experiment.snapshot_best)[0]]
    for key, metrics in named.items():
        for metric in metrics:
            policy = metric.partition("/")[2].rpartition("/")[0]
            of_policy = without_learner(metric) in METRICS and not metric.startswith("eval/env/")
            if policy and policy not in policies and of_policy:
                known = f"its policies are {', '.join(policies)}" if policies else "it has a single agent"
                raise ConfigError(f"{key}: env={experiment.env} has no metric {metric:.100}; {known}")


def make_leagues(experiment: Experiment, agent: Agent, in_spaces: tuple[Space, Space]) -> list[League]:
    """What gives the opponents of a league their weights.

    Raises:
        ConfigError: a member's weights do not fit.
    """
    config = experiment.agents.league
    if not config.opponents:
        return []
    observations, _ = joint(in_spaces)
    opponents = [agent.agents()[opponent_name(k)] for k in range(config.opponents)]
    members = [saved_part(name, "agent", SHARED, "agents.league.members") for name in config.members]
    for name, weights in zip(config.members, members, strict=True):
        with prefixed(f"policy {opponent_name(0)} of agent {observations.agents[opponent_name(0)][0]}"):
            load_weights(opponents[0], weights, f"agents.league.members=[{name}]")
    return [League(agent.agents()[SHARED], opponents, config, experiment.seed, members)]


def evaluated_agent(
    experiment: Experiment, agent: Agent, in_spaces: tuple[Space, Space]
) -> tuple[Agent, tuple[Space, Space]]:
    """The agent that is evaluated, and its spaces: of a league, the policy that learns, which plays all seats."""
    if not experiment.agents.league.opponents:
        return agent, in_spaces
    observations, actions = (space.part(SHARED) for space in joint(in_spaces))
    return Team({SHARED: agent.agents()[SHARED]}, observations, actions), (observations, actions)
