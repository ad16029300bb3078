"""A runner of a user's own, which knows no ranks."""

import chz


@chz.chz
class Config:
    """Not one of ours."""

    n_steps: int = 100
    log_interval_steps: int = 100
