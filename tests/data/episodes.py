"""Episodes of any space, for the tests of datasets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gymnasium import Space, spaces

from rlframe.core.spaces import random_action, zeros
from rlframe.core.struct import leaves, map_tree
from rlframe.data import DatasetWriter, Episode, NewDataset

NESTED = spaces.Dict(
    a=spaces.Box(-1, 1, (3,)),
    b=spaces.Discrete(4),
    c=spaces.Tuple([spaces.MultiBinary(3), spaces.Box(0, 255, (40, 33, 3), np.uint8)]),
)
CARTPOLE = spaces.Box(-5, 5, (4,)), spaces.Discrete(2)


def episodes(lengths: list[int], observation_space: Space, action_space: Space, seed: int = 0) -> list[Episode]:
    """Random ones; each of odd length is truncated, the others terminate."""
    rng = np.random.default_rng(seed)

    def values(space: Space, n: int) -> object:
        def random(zero: np.ndarray) -> np.ndarray:
            if zero.dtype == np.uint8:
                return rng.integers(0, 255, zero.shape, np.uint8)
            return rng.random(zero.shape, np.float32) if zero.dtype.kind == "f" else rng.integers(0, 2, zero.shape)

        return map_tree(lambda zero: random(zero).astype(zero.dtype), zeros(space, (n,)))

    found = []
    for n in lengths:
        last, log_prob = np.arange(n) == n - 1, rng.random(n, np.float32)
        reward, action = rng.random(n, np.float32), random_action(action_space, rng, n)
        ends = (last, ~last & last) if n % 2 == 0 else (~last & last, last)
        found.append(Episode(values(observation_space, n + 1), action, reward, *ends, {"log_prob": log_prob}))
    return found


def stored(folder: Path, found: list[Episode], observation_space: Space, action_space: Space) -> str:
    """The path of a dataset with these episodes."""
    with DatasetWriter(NewDataset(f"{folder}/test-v0", observation_space, action_space)) as writer:
        writer.add(found)
    return str(writer.path)


def arrays(episode: Episode) -> list[np.ndarray]:
    return leaves(tuple(each if not isinstance(each, dict) else dict(each) for each in vars(episode).values()))
