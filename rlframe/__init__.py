"""rlframe: deep-RL research on one machine: a Runner drives a Sampler, an Agent and an Algorithm over [T, B]."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlframe.deploy.load import Policy

__version__ = "0.1.0"


def load_policy(path: str, device: str = "cpu", trust: bool = False) -> "Policy":
    """The trained policy of a run directory or snapshot; `load_policy(RUN_DIR).act(observation)` is its action."""
    from rlframe.deploy.load import load_policy as load  # here: rlframe alone loads no torch

    return load(path, device, trust)
