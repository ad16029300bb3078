"""The grid of a study and the runs of it: values, order, names, commands and errors."""

from functools import partial
from pathlib import Path

import pytest

from rlframe.core.config import split_values
from rlframe.core.errors import ConfigError
from rlframe.study.plan import CommandTemplate, PlannedRun, in_order, make_runs, read_grid, varied

TEMPLATE = CommandTemplate(("train",), resumes_by_directory=True)
MAKE_RUN = partial(TEMPLATE.make_run, Path("study"), "")


def names(settings: list[dict[str, str]], seeds: tuple[str, ...] = (), order: str = "innermost") -> list[str]:
    combinations = [{**setting, "seed": seed} for setting in settings for seed in seeds] if seeds else settings
    return [run.name for run in in_order(make_runs(MAKE_RUN, {}, combinations), order)]


def test_seeds_vary_fastest_or_slowest_by_choice() -> None:
    settings = [{"lr": "1"}, {"lr": "2"}]
    assert names(settings, ("0", "7")) == ["lr=1/run_0", "lr=1/run_7", "lr=2/run_0", "lr=2/run_7"]
    assert names(settings, ("0", "7"), "outermost") == ["lr=1/run_0", "lr=2/run_0", "lr=1/run_7", "lr=2/run_7"]


def test_without_settings_runs_have_no_setting_directory() -> None:
    assert names([{}], ("3", "4")) == ["run_3", "run_4"]


def test_without_seeds_a_setting_has_one_run_with_the_given_id() -> None:
    assert [run.name for run in make_runs(MAKE_RUN, {}, [{"lr": "1"}], run_id=5)] == ["lr=1/run_5"]


def test_directory_names_need_no_quotes() -> None:
    assert names([{"model.hidden": "[64,64]"}]) == ["hidden=64x64/run_0"]
    assert names([{"env": "ALE/Pong-v5"}]) == ["env=ALE_Pong-v5/run_0"]


def test_keys_with_the_same_last_part_keep_their_full_name() -> None:
    assert names([{"algo.size": "1", "model.size": "2"}]) == ["algo.size=1,model.size=2/run_0"]


def test_duplicate_and_long_names_are_numbered() -> None:
    assert names([{"env": "a/b"}, {"env": "a:b"}]) == ["env=a_b/run_0", "setting_1/run_0"]
    assert names([{"env": "x" * 300}]) == ["setting_0/run_0"]


def test_commands_contain_all_arguments_of_a_run() -> None:
    def run(resumes_by_directory: bool) -> PlannedRun:
        template = CommandTemplate(("python", "-m", "train"), resumes_by_directory)
        make_run = partial(template.make_run, Path("study"), "")
        return make_runs(make_run, {"env": "x"}, [{"seed": "3", "lr": "1"}])[0]

    start = ("python", "-m", "train", "env=x", "lr=1", "seed=3", "log_dir=study/lr=1", "run_ID=3")
    assert run(True).command == run(False).command == start
    assert run(True).resume_command == ("python", "-m", "train", "resume=study/lr=1/run_3")
    assert run(False).resume_command == (*start, "resume=true")
    assert run(True).arguments == {"env": "x", "lr": "1", "seed": "3"}
    assert run(True).log == Path("study/lr=1/run_3.log")


def test_runs_of_a_named_experiment_have_their_own_folder() -> None:
    make_run = partial(TEMPLATE.make_run, Path("study"), "ppo")
    runs = make_runs(make_run, {}, [{"lr": "1", "seed": "0"}, {"lr": "2", "seed": "0"}])
    assert [run.name for run in runs] == ["ppo/lr=1/run_0", "ppo/lr=2/run_0"]
    assert [run.directory for run in runs] == [Path("study/ppo/lr=1/run_0"), Path("study/ppo/lr=2/run_0")]
    assert [run.name for run in make_runs(make_run, {}, [{}])] == ["ppo/run_0"]


def test_the_order_of_seeds_holds_over_settings_with_different_seeds() -> None:
    combinations = [{"lr": "1", "seed": "0"}, {"lr": "1", "seed": "1"}, {"lr": "2", "seed": "5"}]
    runs = in_order(make_runs(MAKE_RUN, {}, combinations), "outermost")
    assert [run.name for run in runs] == ["lr=1/run_0", "lr=2/run_5", "lr=1/run_1"]


def test_varied_arguments_are_those_that_differ() -> None:
    runs = make_runs(MAKE_RUN, {"env": "x"}, [{"lr": "1", "seed": "0"}, {"lr": "2", "seed": "0"}])
    assert varied(runs) == {"lr": ["1", "2"]}


def test_unknown_orders_invalid_seeds_and_repeated_settings_raise_errors() -> None:
    with pytest.raises(ConfigError, match="did you mean innermost"):
        names([{}], ("0",), "inermost")
    with pytest.raises(ConfigError, match=r"'1\.5' is not a whole number"):
        names([{}], ("1.5",))
    with pytest.raises(ConfigError, match="is given twice"):
        names([{"lr": "1"}, {"lr": "1"}])
    with pytest.raises(ConfigError, match="is given twice"):
        names([{"lr": "1"}], ("1", "01"))


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
