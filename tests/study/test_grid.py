"""The combinations of sweep.KEY, zip.KEY and repeats."""

import pytest

from rlframe.core.errors import ConfigError
from rlframe.study.grid import read_grid, split_values


def test_commas_in_brackets_do_not_split_values() -> None:
    assert split_values("[64,64],[256,256]") == ("[64,64]", "[256,256]")
    assert split_values("1e-3, 3e-4") == ("1e-3", "3e-4")
    assert split_values("{a: [1,2], b: 3},x") == ("{a: [1,2], b: 3}", "x")
    assert split_values("one") == ("one",)


def test_a_sweep_makes_every_combination() -> None:
    assert read_grid({"env": "x", "sweep.lr": "1,2", "sweep.clip": "a,b"}).combinations() == [
        {"lr": "1", "clip": "a"},
        {"lr": "1", "clip": "b"},
        {"lr": "2", "clip": "a"},
        {"lr": "2", "clip": "b"},
    ]


def test_zipped_keys_change_together_for_every_combination_of_the_swept() -> None:
    grid = read_grid({"zip.lr": "1,2", "sweep.seed": "0,1", "zip.clip": "a,b"})
    assert grid.n_runs() == 4
    assert grid.combinations() == [
        {"seed": "0", "lr": "1", "clip": "a"},
        {"seed": "0", "lr": "2", "clip": "b"},
        {"seed": "1", "lr": "1", "clip": "a"},
        {"seed": "1", "lr": "2", "clip": "b"},
    ]


def test_zipped_values_may_repeat_but_not_their_tuples() -> None:
    assert read_grid({"zip.a": "1,1", "zip.b": "2,3"}).n_runs() == 2
    with pytest.raises(ConfigError, match="contain a=1 b=2 twice"):
        read_grid({"zip.a": "1,1", "zip.b": "2,2"})


def test_without_a_grid_there_is_one_run() -> None:
    assert read_grid({"env": "x"}).combinations() == [{}]


@pytest.mark.parametrize(("given", "seeds"), [({}, ["0", "1", "2"]), ({"seed": "1e1"}, ["10", "11", "12"])])
def test_repeats_counts_seeds_from_the_given_one(given: dict[str, str], seeds: list[str]) -> None:
    assert read_grid({"repeats": "3", **given}).combinations() == [{"seed": seed} for seed in seeds]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sweep.lr": "1,,2"}, "without empty values"),
        ({"sweep.lr": ""}, "without empty values"),
        ({"sweep.": "1"}, "sweep.KEY=value"),
        ({"zip.": "1"}, "zip.KEY=value"),
        ({"sweep.lr": "1,2,1"}, "contains 1 twice"),
        ({"sweep.lr": "1,2", "lr": "3"}, "lr is given as 3 and as sweep.lr=1,2"),
        ({"zip.lr": "1,2", "lr": "3"}, "lr is given as 3 and as zip.lr=1,2"),
        ({"zip.lr": "1,2", "sweep.lr": "3"}, "lr is in both sweep.lr and zip.lr"),
        ({"zip.lr": "1,2", "zip.clip": "1,2,3"}, "zip.lr has 2, zip.clip has 3"),
        ({"repeats": "2", "sweep.seed": "0,1"}, "repeats=2 and sweep.seed=0,1 both set the seeds"),
        ({"repeats": "2", "zip.seed": "0,1"}, "repeats=2 and zip.seed=0,1 both set the seeds"),
        ({"repeats": "0"}, "repeats=0 must be from 1 to 5,000"),
        ({"repeats": "1e12"}, "must be from 1 to 5,000"),
        ({"repeats": "many"}, "repeats='many' must be a whole number"),
        ({"repeats": "5000", "sweep.lr": "1,2"}, "10,000 runs, more than 5,000"),
    ],
)
def test_an_invalid_grid_raises_an_error(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_grid(arguments)
