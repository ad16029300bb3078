"""Every generator of a run comes from here: one root seed, spread by who asks, so that no two streams overlap."""

from enum import IntEnum

import numpy as np


class Role(IntEnum):
    """Who draws. Part of the key of a stream, so the numbers never change."""

    MODEL = 0
    ENV = 1
    NOISE = 2
    ALGO = 3
    EVAL_ENV = 4
    EVAL_NOISE = 5
    DECORRELATION = 6


def seed_sequence(root: int, role: Role, *key: int, rank: int = 0) -> np.random.SeedSequence:
    """The stream of (root seed, rank, role, key); `key` is, for example, an environment's index."""
    return np.random.SeedSequence(entropy=root, spawn_key=(rank, int(role), *key))


def generator(root: int, role: Role, *key: int, rank: int = 0) -> np.random.Generator:
    """A NumPy generator of its own stream."""
    return np.random.default_rng(seed_sequence(root, role, *key, rank=rank))


def generators(root: int, role: Role, n: int, first: int = 0) -> list[np.random.Generator]:
    """One generator for each of the environments from `first` on, whichever process they are in."""
    return [generator(root, role, first + env) for env in range(n)]


def seed_int(root: int, role: Role, *key: int, rank: int = 0) -> int:
    """A seed below 2**31 for libraries that take an int (environments, torch)."""
    return int(seed_sequence(root, role, *key, rank=rank).generate_state(1, np.uint64)[0] >> np.uint64(33))


def env_seeds(root: int, role: Role, n: int, *key: int, rank: int = 0) -> list[int]:
    """One seed per environment, all different.

    A collision of the 31-bit draws (one in a million at 64 environments) is moved to the next free number.
    """
    seeds: list[int] = []
    for index in range(n):
        seed = seed_int(root, role, *key, index, rank=rank)
        while seed in seeds:
            seed = (seed + 1) % 2**31
        seeds.append(seed)
    return seeds
