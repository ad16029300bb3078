"""Replay buffers for the tests, small enough to go round many times."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlframe.core.spaces import FrameStack
from rlframe.core.struct import Tree, map_tree
from rlframe.core.types import BatchSpec
from rlframe.replay import NStep, ReplayBuffer, ReplayConfig, make_replay
from rlframe.replay.readers import Plan
from tests.replay.history import SIZE, History

ACTIONS = spaces.Discrete(1000)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def space_of(history: History) -> spaces.Space[Any]:
    """Of its observations."""
    frames = FrameStack(spaces.Box(0, 255, (history.n_frames, *SIZE), np.uint8), history.n_frames)
    return {"vector": VECTOR, "frames": frames, "both": spaces.Dict({"vector": VECTOR, "frames": frames})}[history.kind]


def replay_for(
    history: History, plan: Plan[Any] | None = None, T: int = 4, L: int = 40, config: Any = None, **options: Any
) -> ReplayBuffer[Any]:
    """L time steps of a history that comes T steps at a time."""
    return make_replay(
        ReplayConfig(size=L * history.B, **(config or {})),
        space_of(history),
        ACTIONS,
        BatchSpec(T, history.B),
        plan or NStep(0.5),
        state=(torch.zeros(history.B, 2),),
        **options,
    )


def same(one: Tree, other: Tree) -> bool:
    """Whether two trees of arrays are equal."""
    found: list[bool] = []
    map_tree(lambda a, b: found.append(np.array_equal(np.asarray(a), np.asarray(b))), one, other)
    return all(found)
