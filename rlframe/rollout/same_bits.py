"""Whether rows keep their bits on this machine, however many act together: all samplers then give the same samples."""

from __future__ import annotations

import numpy as np
from gymnasium import Space, spaces

from rlframe.agents import Agent
from rlframe.core.spaces import zeros
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree, zeros_like
from rlframe.core.types import AgentInputs
from rlframe.models.numpy_inference import BLOCK
from rlframe.rollout.inference import CpuInference

_MOST = 64  # rows that are tried


def rows_keep_their_bits(agent: Agent, observation_space: Space, action_space: Space, n: int) -> bool:
    """Whether an agent on the CPU acts for each of n rows with the same bits, however many of them act together.

    Tried with random observations, all at once and in blocks of 4 and of 8. Elsewhere the kernel of a product, or the
    part of a vector that an activation is evaluated in, depends on the number of rows.
    """
    n, rng = min(-(-n // BLOCK) * BLOCK, _MOST), np.random.default_rng(0)
    observation, action = _random(observation_space, n, rng), zeros(action_space, (n,))
    inputs = AgentInputs(observation, action, np.zeros(n, np.float32), np.zeros(n, bool))
    noise = zeros_like(agent.noise(rng, ()), (n,))

    def acted(size: int) -> list[np.ndarray]:
        parts = []
        for rows in (slice(start, start + size) for start in range(0, n, size)):
            step = CpuInference(agent, inputs[rows], agent.initial_state(range(n)[rows]))
            parts.append(leaves(step(step.view(map_tree(lambda x, rows=rows: x[rows], noise)))))
        return [np.concatenate([as_numpy(x) for x in same]) for same in zip(*parts, strict=True)]

    whole, blocks = acted(n), [acted(size) for size in (BLOCK, 2 * BLOCK)]
    return all(np.array_equal(*pair, equal_nan=True) for each in blocks for pair in zip(whole, each, strict=True))


def _random(space: Space, n: int, rng: np.random.Generator) -> Tree:
    """Canonical observations [n, ...] in the space, not far from zero."""
    match space:
        case spaces.Dict():
            return {key: _random(part, n, rng) for key, part in space.items()}
        case spaces.Tuple():
            return tuple(_random(part, n, rng) for part in space)
        case spaces.Box(low=low, high=high, dtype=dtype):
            shape = (n, *space.shape)
            drawn = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(256, size=shape)
            return np.clip(drawn, low, high).astype(zeros(space).dtype)
        case _:
            return zeros(space, (n,))
