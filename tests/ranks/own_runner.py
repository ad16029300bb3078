"""A user's own runner, which cannot train in ranks."""

import chz

from rlframe.runners.config import RunnerConfig


@chz.chz
class Config(RunnerConfig):
    """Not a runner of rlframe."""
