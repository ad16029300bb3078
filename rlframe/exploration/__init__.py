"""Exploration, a part that an algorithm is given: how its agent acts other than greedily."""

from rlframe.exploration.actions import (
    GaussianConfig,
    NoiseHoldConfig,
    NoneConfig,
    OrnsteinUhlenbeckConfig,
    OwnExplorationConfig,
    StochasticConfig,
)
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
from rlframe.exploration.gsde import GsdeConfig
from rlframe.exploration.parameter_noise import ParameterNoiseConfig
from rlframe.exploration.q import BoltzmannConfig, EpsilonConfig, NoisyConfig
from rlframe.exploration.sample_hold import SampleHoldConfig

KINDS = {
    "boltzmann": BoltzmannConfig,
    "epsilon": EpsilonConfig,
    "gaussian": GaussianConfig,
    "gsde": GsdeConfig,
    "noise_hold": NoiseHoldConfig,
    "noisy": NoisyConfig,
    "none": NoneConfig,
    "ornstein_uhlenbeck": OrnsteinUhlenbeckConfig,
    "own": OwnExplorationConfig,
    "parameter_noise": ParameterNoiseConfig,
    "sample_hold": SampleHoldConfig,
    "stochastic": StochasticConfig,
}
Q_KINDS = ("epsilon", "boltzmann", "noise_hold", "noisy", "none", "own")  # those that fit the DQN family
NOISE_KINDS = ("gaussian", "ornstein_uhlenbeck", "noise_hold", "none", "own")  # DDPG, TD3 and, with Box actions, SAC
SAMPLE_KINDS = ("stochastic", "sample_hold", "gsde")  # those that sample by the policy: SAC
POLICY_KINDS = ("stochastic", "gsde", "none")  # the policy-gradient algorithms

__all__ = [
    "KINDS",
    "NOISE_KINDS",
    "POLICY_KINDS",
    "Q_KINDS",
    "SAMPLE_KINDS",
    "ActionNoise",
    "BoltzmannConfig",
    "EpsilonConfig",
    "Evaluated",
    "Exploration",
    "ExplorationSchedule",
    "ExploreConfig",
    "ExploreState",
    "GaussianConfig",
    "GsdeConfig",
    "NetworkNoise",
    "NoiseHoldConfig",
    "NoisyConfig",
    "NoneConfig",
    "OrnsteinUhlenbeckConfig",
    "OwnExplorationConfig",
    "ParameterNoiseConfig",
    "QExploration",
    "SampleHoldConfig",
    "StochasticConfig",
    "check_features",
    "config_of",
    "explore",
]
