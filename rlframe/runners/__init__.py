"""Runners, the training loops, and callbacks."""

from rlframe.runners.async_rl import AsyncRl
from rlframe.runners.base import Runner
from rlframe.runners.callbacks import Callback
from rlframe.runners.evolution import EvolutionRl
from rlframe.runners.minibatch_rl import MinibatchRl
from rlframe.runners.minibatch_rl_eval import MinibatchRlEval
from rlframe.runners.sync_rl import SyncRl

__all__ = ["AsyncRl", "Callback", "EvolutionRl", "MinibatchRl", "MinibatchRlEval", "Runner", "SyncRl"]
