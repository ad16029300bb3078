"""Every generator of a run comes from here: one root seed, spread by who asks, so that no two streams overlap."""

from enum import IntEnum
from typing import Any

import numpy as np

from rlframe.core.ranks import current_ranks, first_of_rank


class Role(IntEnum):
    """Who draws. Part of the key of a stream, so the numbers never change."""

    MODEL = 0
    ENV = 1
    NOISE = 2
    ALGO = 3
    EVAL_ENV = 4
    EVAL_NOISE = 5
    DECORRELATION = 6
    REPLAY = 7
    CRITIC = 8
    RESTART = 9


# Every rank draws these for itself. Networks begin equal on all ranks, and what belongs to an environment goes by its
# index over all ranks: so two ranks of 4 environments sample what one rank of 8 does.
OF_RANK = (Role.ALGO, Role.REPLAY)


def seed_sequence(root: int, role: Role, *key: int) -> np.random.SeedSequence:
    """The stream of (root seed, rank, role, key); `key` is, for example, an environment's index over all ranks."""
    rank = current_ranks().rank if role in OF_RANK else 0
    return np.random.SeedSequence(entropy=root, spawn_key=(rank, int(role), *key))


def generator(root: int, role: Role, *key: int) -> np.random.Generator:
    """A NumPy generator of its own stream."""
    return np.random.default_rng(seed_sequence(root, role, *key))


def generators(root: int, role: Role, n: int, first: int = 0) -> list[np.random.Generator]:
    """One generator for each of the environments from `first` on, over all ranks, whichever process they are in."""
    return [generator(root, role, first + env) for env in range(n)]


_MASK = 2**64 - 1
STATE_WORDS = 6  # of a generator's state as uint64: PCG64 counts in two numbers of 128 bits


def pack_state(rng: np.random.Generator) -> list[int]:
    """The state of one of our generators as STATE_WORDS words of 64 bits, for shared memory."""
    found = rng.bit_generator.state
    state, inc = found["state"]["state"], found["state"]["inc"]
    return [state >> 64, state & _MASK, inc >> 64, inc & _MASK, found["has_uint32"], found["uinteger"]]


def unpack_state(words: np.ndarray) -> dict[str, Any]:
    """What `pack_state` packed, as `bit_generator.state` takes it."""
    high, low, inc_high, inc_low, has_uint32, uinteger = (int(word) for word in words)
    state = {"state": high << 64 | low, "inc": inc_high << 64 | inc_low}
    return {"bit_generator": "PCG64", "state": state, "has_uint32": has_uint32, "uinteger": uinteger}


def seed_int(root: int, role: Role, *key: int) -> int:
    """A seed below 2**31 for libraries that take an int (environments, torch)."""
    return int(seed_sequence(root, role, *key).generate_state(1, np.uint64)[0] >> np.uint64(33))


def env_seeds(root: int, role: Role, n: int) -> list[int]:
    """One seed for each of this rank's n environments; all ranks' are different."""
    return distinct_seeds(root, role, first_of_rank(n) + n)[first_of_rank(n) :]


def distinct_seeds(root: int, role: Role, n: int) -> list[int]:
    """One seed for each of n environments, all different.

    A collision of the 31-bit draws (one in a million at 64 environments) is moved to the next free number.
    """
    seeds: list[int] = []
    for index in range(n):
        seed = seed_int(root, role, index)
        while seed in seeds:
            seed = (seed + 1) % 2**31
        seeds.append(seed)
    return seeds


_CHUNK = 64  # seeds drawn at once: one alone takes 9 us, of 64 each takes 0.3


class EpisodeSeeds:
    """The randomness of one environment's episodes: that of the first is its own seed, the others follow from it.

    Either by seeds below 2**31, or by parts of one stream: a generator is moved in 3 us, and seeded in 20.
    """

    def __init__(self, own: int) -> None:
        self.own = own
        self._stream: dict[str, Any] = {}  # where it begins
        self._number, self._chunk = -1, [0]  # the chunk at hand

    def __getitem__(self, episode: int) -> int:
        if episode == 0:
            return self.own
        number, place = divmod(episode, _CHUNK)
        if number != self._number:
            drawn = np.random.SeedSequence(self.own, spawn_key=(number,)).generate_state(_CHUNK)
            self._number, self._chunk = number, (drawn >> 1).tolist()
        return self._chunk[place]

    def move(self, rng: np.random.Generator, episode: int) -> None:
        """Let a generator of PCG64 draw the episode's part of the stream of the own seed: its next 2**64 numbers."""
        self._stream = self._stream or dict(np.random.PCG64(self.own).state)
        bits: Any = rng.bit_generator
        bits.state = self._stream
        bits.advance(episode << 64)


def seed_of_round(own: int, round_: int) -> int:
    """The seed of an environment in round 0, its own, or in another, where all its episodes are others."""
    if not round_:
        return own
    return int(np.random.SeedSequence(own, spawn_key=(0, round_)).generate_state(1)[0] >> 1)
