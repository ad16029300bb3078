"""Exploration bonuses, one file each: `reward.bonus=NAME` names one, and `reward.bonus.FIELD` sets its fields."""

from rlframe.bonuses.base import Bonus, BonusConfig, RewardConfig

__all__ = ["Bonus", "BonusConfig", "RewardConfig"]
