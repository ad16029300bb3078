"""What an environment of several agents asks of an experiment, and one with a single agent: keys that do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from gymnasium import Space

from rlframe.core.errors import ConfigError
from rlframe.core.multi_agent import JointSpace
from rlframe.experiment.config import Experiment
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


def _check_metrics(experiment: Experiment, policies: Sequence[str]) -> None:
    """Raise ConfigError for a key that names the metric of a policy that there is not."""
    named = {"stop": StopRule(experiment.stop).names} if experiment.stop else {}
    named["snapshot_best"] = [experiment.snapshot_best.lstrip("-")]
    for key, metrics in named.items():
        for metric in metrics:
            policy = metric.partition("/")[2].rpartition("/")[0]
            if policy and policy not in policies:
                known = f"its policies are {', '.join(policies)}" if policies else "it has a single agent"
                raise ConfigError(f"{key}: env={experiment.env} has no metric {metric:.100}; {known}")
