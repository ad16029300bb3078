"""Fields that the configs of several algorithms have."""

from __future__ import annotations

from typing import Any

from rlframe.core.config import count, option
from rlframe.core.schedule import scheduled


def grad_norm(default: float, of: str = "global norm at which gradients are clipped") -> Any:
    """A field for the norm at which gradients are clipped."""
    return scheduled(default, f"{of}; inf: never", above=True, infinite=True)


def interval_steps() -> Any:
    """A field for the interval of target networks in env_steps."""
    return count(0, "env_steps between moves of the targets, in place of target_interval; 0: by updates", low=0)


def target_tau() -> Any:
    """A field for how far a target network of Q-learning moves."""
    return scheduled(1.0, "how far it moves to the online network; 1: a copy", high=1)


def double(default: bool) -> Any:
    """A field for double Q-learning (van Hasselt, Guez, Silver, 2016)."""
    return option(default, "the online network chooses the next action, the target network values it")


def dueling(default: bool) -> Any:
    """A field for the dueling architecture (Wang et al. 2016)."""
    return option(default, "a stream for the state's value and one for the advantages")
