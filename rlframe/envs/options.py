"""EnvOptions: what any environment can be given beside its own arguments, `env.name=value` on the command line."""

from __future__ import annotations

import math

import chz

from rlframe.core.config import count, entries_of, names, number, option, sizes
from rlframe.core.errors import ConfigError

_MAX_SIDE = 4096  # pixels


def clip_bounds(text: str) -> tuple[float, float]:
    """The bounds that `reward_clip` means, if it is not sign: (lo, hi), infinite if it is empty.

    Raises:
        ConfigError: it is not two numbers in order.
    """
    try:
        low, high = map(float, entries_of(text)) if text else (-math.inf, math.inf)
    except (ValueError, AttributeError):  # not text
        low, high = 1.0, 0.0
    if not low < high:
        raise ConfigError(f"env.reward_clip={text} must be sign, or two numbers in order such as [-1,1]")
    return low, high


@chz.chz
class EnvOptions:
    """Changes that work for every environment, from wrappers outwards in the order of these fields.

    The reward that is learned from is clip(scale * reward), or clip(scale * reward / deviation) with normalize_reward.
    Reported returns, in training and in evaluation, are always those of the environment's own rewards.
    """

    wrappers: tuple[str, ...] = names(
        (), "[module:Class,./file.py:Class(key=value)]: wrappers, or functions, of an environment; first innermost"
    )
    grayscale: bool = option(False, "of images: one channel, of ITU-R 601 luma")
    resize: tuple[int, ...] = sizes((), "[height,width] that images get, by averaging over areas; default: their own")
    frame_stack: int = count(1, "newest observations that the agent sees at once; 1: the last only", high=128)
    max_episode_steps: int = count(0, "env steps after which an episode is truncated; 0: the environment's own limit")
    reward_scale: float = number(1.0, "factor of the rewards that are learned from", low=1e-30, high=1e30)
    reward_clip: str = option("", "sign or [lo,hi] of the rewards that are learned from, after scaling; default: as is")
    normalize_reward: bool = option(
        False, "divide the rewards that are learned from by the running deviation of the discounted return"
    )

    @chz.validate
    def _check(self) -> None:
        if self.reward_clip != "sign":
            clip_bounds(self.reward_clip)
        elif self.reward_scale != 1 or self.normalize_reward:
            given = "env.normalize_reward=true" if self.normalize_reward else f"env.reward_scale={self.reward_scale:g}"
            raise ConfigError(f"{given} changes nothing with env.reward_clip=sign; leave one of them out")
        if len(self.resize) not in (0, 2) or any(side > _MAX_SIDE for side in self.resize):
            raise ConfigError(f"env.resize={list(self.resize)} must be [height,width], at most {_MAX_SIDE} pixels each")
        for name in self.wrappers:
            if not name.rpartition(":")[0]:
                raise ConfigError(f"env.wrappers={name} must be written package.module:Class or ./file.py:Class")

    @property
    def changes_observations(self) -> bool:
        return self.grayscale or bool(self.resize) or self.frame_stack > 1

    @property
    def changes_rewards(self) -> bool:
        return self.normalize_reward or self.reward_scale != 1.0 or bool(self.reward_clip)
