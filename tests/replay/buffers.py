"""Small replay buffers for the tests, which wrap around many times."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlframe.core.spaces import FrameStack
from rlframe.core.struct import Tree, map_tree
from rlframe.core.types import BatchSpec
from rlframe.replay import KINDS, NStep, ReplayBuffer, make_replay
from rlframe.replay.buffer import ReaderConfig
from tests.replay.history import SIZE, History

ACTIONS = spaces.Discrete(1000)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def space_of(history: History) -> spaces.Space[Any]:
    """The space of its observations."""
    frames = FrameStack(spaces.Box(0, 255, (history.n_frames, *SIZE), np.uint8), history.n_frames)
    return {"vector": VECTOR, "frames": frames, "both": spaces.Dict({"vector": VECTOR, "frames": frames})}[history.kind]


def replay_for(
    history: History,
    reader: ReaderConfig[Any] | None = None,
    T: int = 4,
    L: int = 40,
    config: Any = None,
    n_streams: int = 1,
    **options: Any,
) -> ReplayBuffer[Any]:
    """A buffer of L time steps for a history that is appended T steps at a time; `config`: its kind and fields."""
    options_of = dict(config or {})
    return make_replay(
        KINDS[options_of.pop("kind", "memory")](size=L * history.B, **options_of),
        space_of(history),
        ACTIONS,
        BatchSpec(T, history.B, n_streams),
        reader or NStep(0.5),
        state=(torch.zeros(history.B, 2),),
        **options,
    )


def same(one: Tree, other: Tree) -> bool:
    """Whether two trees of arrays are equal."""
    found: list[bool] = []
    map_tree(lambda a, b: found.append(np.array_equal(np.asarray(a), np.asarray(b))), one, other)
    return all(found)
