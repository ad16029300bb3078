"""What becomes of rewards: `reward.bonus=NAME` adds a learned bonus, `env.normalize_reward=true` divides them."""

from rlframe.rewards.base import Bonus, BonusConfig, NoBonus, RewardConfig, Rewards
from rlframe.rewards.curiosity import ICMConfig, RNDConfig
from rlframe.rewards.normalize import rewards_for

KINDS = {"icm": ICMConfig, "none": NoBonus, "rnd": RNDConfig}

__all__ = [
    "KINDS",
    "Bonus",
    "BonusConfig",
    "ICMConfig",
    "NoBonus",
    "RNDConfig",
    "RewardConfig",
    "Rewards",
    "rewards_for",
]
