"""A runner of a user's own, which knows no ranks."""

from rlframe.runners import minibatch_rl


class Config:
    """Not one of ours."""

    def __init__(self) -> None:
        self.n_steps = 100
        self.inner = minibatch_rl.Config()
