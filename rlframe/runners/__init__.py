"""Runners, the training loops, and callbacks."""

from collections.abc import Mapping

from rlframe.runners.async_rl import AsyncRl, AsyncRlConfig
from rlframe.runners.base import Runner
from rlframe.runners.callbacks import Callback, Clock, Training
from rlframe.runners.config import RunnerConfig
from rlframe.runners.evolution import EvolutionRl, EvolutionRlConfig
from rlframe.runners.learner import Learner
from rlframe.runners.minibatch_rl import MinibatchRl, MinibatchRlConfig, MinibatchRlEvalConfig
from rlframe.runners.offline_rl import OfflineRl, OfflineRlConfig
from rlframe.runners.report import Reporting
from rlframe.runners.sync_rl import SyncRl, SyncRlConfig

KINDS: Mapping[str, type[RunnerConfig]] = {  # by the value of runner=
    "async_rl": AsyncRlConfig,
    "evolution": EvolutionRlConfig,
    "minibatch_rl": MinibatchRlConfig,
    "minibatch_rl_eval": MinibatchRlEvalConfig,
    "offline_rl": OfflineRlConfig,
    "sync_rl": SyncRlConfig,
}

__all__ = [
    "KINDS",
    "AsyncRl",
    "AsyncRlConfig",
    "Callback",
    "Clock",
    "EvolutionRl",
    "EvolutionRlConfig",
    "Learner",
    "MinibatchRl",
    "MinibatchRlConfig",
    "MinibatchRlEvalConfig",
    "OfflineRl",
    "OfflineRlConfig",
    "Reporting",
    "Runner",
    "RunnerConfig",
    "SyncRl",
    "SyncRlConfig",
    "Training",
]
