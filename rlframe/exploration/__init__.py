"""Exploration, a part that an algorithm is given: how its agent acts other than greedily; one file each."""

from rlframe.exploration.base import (
    ActionNoise,
    Evaluated,
    Exploration,
    ExplorationSchedule,
    ExploreConfig,
    ExploreState,
    NetworkNoise,
    QExploration,
    check_features,
    config_of,
    explore,
)

Q_KINDS = ("epsilon", "boltzmann", "noise_hold", "noisy", "none", "own")  # those that fit the DQN family
NOISE_KINDS = ("gaussian", "ornstein_uhlenbeck", "noise_hold", "none", "own")  # DDPG, TD3 and, with Box actions, SAC
POLICY_KINDS = ("stochastic", "gsde")  # the policy-gradient algorithms

__all__ = [
    "NOISE_KINDS",
    "POLICY_KINDS",
    "Q_KINDS",
    "ActionNoise",
    "Evaluated",
    "Exploration",
    "ExplorationSchedule",
    "ExploreConfig",
    "ExploreState",
    "NetworkNoise",
    "QExploration",
    "check_features",
    "config_of",
    "explore",
]
