"""Random streams never overlap."""

import itertools

import numpy as np
import pytest

from rlframe.core import seeding
from rlframe.core.errors import ConfigError
from rlframe.core.ranks import SingleRank, use_ranks
from rlframe.core.seeding import PER_RANK, EpisodeSeeds, Role, env_seeds, generator, generators, seed_int


class Rank(SingleRank):
    """One of three, without the others."""

    world_size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank


def draws(*args: int, rank: int = 0) -> tuple[float, ...]:
    root, role, *key = args
    with use_ranks(Rank(rank)):
        return tuple(generator(root, Role(role), *key).random(4))


def test_root_role_and_key_each_give_another_stream() -> None:
    streams = [
        draws(root, role, *key) for root, role, key in itertools.product((0, 1), Role, ((), (0,), (1,), (0, 0), (0, 1)))
    ]
    assert len(set(streams)) == len(streams) == 2 * len(Role) * 5


@pytest.mark.parametrize("role", Role)
def test_ranks_have_separate_streams_for_per_rank_roles_only(role: Role) -> None:
    assert (draws(1, role, rank=0) == draws(1, role, rank=2)) == (role not in PER_RANK)
    assert draws(1, role, rank=0) == tuple(generator(1, role).random(4))


def test_ranks_share_out_the_environments_that_one_rank_would_have() -> None:
    seeds, noise = [], []
    for rank in range(3):
        with use_ranks(Rank(rank)):
            seeds += env_seeds(4, Role.ENV, 2)
            noise += [rng.random() for rng in generators(4, Role.NOISE, 2, 2 * rank)]
    assert seeds == env_seeds(4, Role.ENV, 6)
    assert noise == [rng.random() for rng in generators(4, Role.NOISE, 6)]


def test_role_numbers_never_change() -> None:
    numbers = {"MODEL": 0, "ENV": 1, "NOISE": 2, "ALGO": 3, "EVAL_ENV": 4, "EVAL_NOISE": 5, "DECORRELATION": 6}
    numbers |= {"REPLAY": 7, "CRITIC": 8, "RESTART": 9, "TORCH": 10, "BONUS": 12, "PERTURBATION": 13, "POLICY": 14}
    numbers |= {"LEAGUE": 15, "MATCH": 16, "ESTIMATE": 20}
    assert numbers.items() <= {role.name: int(role) for role in Role}.items()


def test_a_stream_is_the_same_on_every_machine_and_version() -> None:
    assert seed_int(0, Role.ENV, 0) == 295_303_277
    assert env_seeds(0, Role.ENV, 2) == [295_303_277, 573_520_700]


def test_seed_int_fits_libraries_that_take_31_bits() -> None:
    seeds = [seed_int(root, Role.MODEL) for root in range(200)]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == 200


def test_env_seeds_are_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(set(env_seeds(0, Role.ENV, 2000))) == 2000
    last = 2**31 - 1
    monkeypatch.setattr(seeding, "seed_int", lambda root, role, index: [last, 5, last, 5][index])
    assert env_seeds(0, Role.ENV, 4) == [last, 5, 0, 6], "where two are drawn alike"


@pytest.mark.parametrize("root", range(5))
def test_training_and_evaluation_seeds_are_disjoint_on_all_ranks(root: int) -> None:
    groups = []
    for role, rank in itertools.product((Role.ENV, Role.EVAL_ENV), range(3)):
        with use_ranks(Rank(rank)):
            groups.append(env_seeds(root, role, 64))
    assert len(set(itertools.chain(*groups))) == 64 * 6


def test_neighbouring_roots_do_not_share_env_seeds() -> None:
    assert not set(env_seeds(0, Role.ENV, 64)) & set(env_seeds(1, Role.ENV, 64))


def test_a_negative_root_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed=-1 must be at least 0"):
        generator(-1, Role.ENV)


def test_an_episodes_part_of_a_stream_depends_on_seed_and_episode_alone() -> None:
    rng, other = np.random.default_rng(0), np.random.default_rng(99)
    seeds, drawn = EpisodeSeeds(7), []
    for episode in (1, 2, 1):
        seeds.seek(rng, episode)
        drawn.append(rng.random(3).tolist())
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]
    EpisodeSeeds(7).seek(other, 2)
    assert other.random(3).tolist() == drawn[1]
    EpisodeSeeds(8).seek(other, 2)
    assert other.random(3).tolist() != drawn[1]
