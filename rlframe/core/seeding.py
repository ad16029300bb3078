"""All random generators of a run, derived from one root seed so that no two streams overlap."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from rlframe.core.errors import ConfigError
from rlframe.core.ranks import current_ranks, first_env_of_rank


class Role(IntEnum):
    """The use of a generator. The numbers are part of each stream's key and never change."""

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
    TORCH = 10
    BONUS = 12
    PERTURBATION = 13
    POLICY = 14
    LEAGUE = 15
    MATCH = 16
    ESTIMATE = 20


# Roles with a separate stream per rank. Networks start equal on all ranks, and environments are keyed by their index
# over all ranks, so two ranks of 4 environments sample what one rank of 8 does.
PER_RANK = (Role.ALGO, Role.REPLAY, Role.TORCH)


def seed_sequence(root: int, role: Role, *key: int) -> np.random.SeedSequence:
    """The SeedSequence of (root seed, rank, role, key); `key` is often an environment's index over all ranks."""
    if isinstance(root, int) and root < 0:
        raise ConfigError(f"seed={root} must be at least 0")
    rank = current_ranks().rank if role in PER_RANK else 0
    return np.random.SeedSequence(entropy=root, spawn_key=(rank, int(role), *key))


def generator(root: int, role: Role, *key: int) -> np.random.Generator:
    return np.random.default_rng(seed_sequence(root, role, *key))


def generators(root: int, role: Role, n: int, first: int = 0) -> list[np.random.Generator]:
    """One generator per environment, for environments first .. first + n - 1, counted over all ranks."""
    return [generator(root, role, first + env) for env in range(n)]


_MASK = 2**64 - 1
STATE_WORDS = 6  # uint64 words of a packed PCG64 state, which has two 128-bit numbers


def pack_state(rng: np.random.Generator) -> list[int]:
    """The state of a PCG64 generator as STATE_WORDS uint64 words, for shared memory."""
    found = rng.bit_generator.state
    state, inc = found["state"]["state"], found["state"]["inc"]
    return [state >> 64, state & _MASK, inc >> 64, inc & _MASK, found["has_uint32"], found["uinteger"]]


def unpack_state(words: np.ndarray) -> dict[str, Any]:
    """The inverse of `pack_state`, for `bit_generator.state`."""
    high, low, inc_high, inc_low, has_uint32, uinteger = (int(word) for word in words)
    state = {"state": high << 64 | low, "inc": inc_high << 64 | inc_low}
    return {"bit_generator": "PCG64", "state": state, "has_uint32": has_uint32, "uinteger": uinteger}


def seed_int(root: int, role: Role, *key: int) -> int:
    """A seed below 2**31 for libraries that take an int (environments, torch)."""
    return int(seed_sequence(root, role, *key).generate_state(1, np.uint64)[0] >> np.uint64(33))


def env_seeds(root: int, role: Role, n: int) -> list[int]:
    """One seed for each of this rank's n environments, distinct over all ranks."""
    return distinct_seeds(root, role, first_env_of_rank(n) + n)[first_env_of_rank(n) :]


def distinct_seeds(root: int, role: Role, n: int) -> list[int]:
    """One seed below 2**31 for each of n environments, all distinct."""
    seeds: dict[int, None] = {}  # a list takes 1.8 s for 16,384
    for index in range(n):
        seed = seed_int(root, role, index)
        while seed in seeds:  # one in a million at 64 environments
            seed = (seed + 1) % 2**31
        seeds[seed] = None
    return list(seeds)


_CHUNK = 64  # seeds drawn at once: 0.3 us per seed instead of 9


class EpisodeSeeds:
    """Seeds of one environment's episodes. Episode 0 has the environment's own seed; the others are derived from it.

    Use either `[episode]` for a seed below 2**31 or `seek` for a part of one stream, which is faster than seeding.
    """

    def __init__(self, own: int) -> None:
        self.own = own
        self._stream: dict[str, Any] = {}  # initial state of the own seed's stream
        self._number, self._chunk = -1, [0]  # the cached chunk

    def __getitem__(self, episode: int) -> int:
        if episode == 0:
            return self.own
        number, place = divmod(episode, _CHUNK)
        if number != self._number:
            drawn = np.random.SeedSequence(self.own, spawn_key=(number,)).generate_state(_CHUNK)
            self._number, self._chunk = number, (drawn >> 1).tolist()
        return self._chunk[place]

    def seek(self, rng: np.random.Generator, episode: int) -> None:
        """Move a PCG64 generator to the episode's part of the own seed's stream, 2**64 numbers long."""
        self._stream = self._stream or dict(np.random.PCG64(self.own).state)
        bits: Any = rng.bit_generator
        bits.state = self._stream
        bits.advance(episode << 64)


def spawned(rngs: Sequence[np.random.Generator]) -> list[np.random.Generator]:
    """New generators seeded by the states of these."""
    return [np.random.default_rng(pack_state(rng)) for rng in rngs]


def new_round(rngs: Sequence[np.random.Generator]) -> int:
    """A round of episodes that is drawn from these generators, so that another draw gives another one."""
    return int(rngs[0].integers(1, 2**31))


def round_seed(own: int, round_: int) -> int:
    """The seed of an environment in a round: its own in round 0, else a derived one."""
    return int(np.random.SeedSequence(own, spawn_key=(0, round_)).generate_state(1)[0] >> 1) if round_ else own
