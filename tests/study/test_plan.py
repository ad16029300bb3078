"""The runs of a grid: order, names, commands and errors."""

from functools import partial
from pathlib import Path

import pytest

from rlframe.core.errors import ConfigError
from rlframe.study.plan import CommandTemplate, Run, expand_grid, make_runs, read_grid, split_values

MAKE_RUN = partial(CommandTemplate(("train",), resumes_by_directory=True).make_run, Path("study"))


def names(settings: list[dict[str, str]], seeds: tuple[str, ...] = (), order: str = "innermost") -> list[str]:
    return [run.name for run in make_runs(MAKE_RUN, {}, settings, seeds, order)]


def test_commas_in_brackets_do_not_split_values() -> None:
    assert split_values("[64,64],[256,256]") == ("[64,64]", "[256,256]")
    assert split_values("1e-3, 3e-4") == ("1e-3", "3e-4")
    assert split_values("{a: [1,2], b: 3},x") == ("{a: [1,2], b: 3}", "x")
    assert split_values("one") == ("one",)


def test_a_grid_expands_to_every_combination() -> None:
    grid = read_grid({"env": "x", "sweep.lr": "1,2", "sweep.clip": "a,b"})
    assert grid == {"lr": ("1", "2"), "clip": ("a", "b")}
    assert expand_grid(grid) == [
        {"lr": "1", "clip": "a"},
        {"lr": "1", "clip": "b"},
        {"lr": "2", "clip": "a"},
        {"lr": "2", "clip": "b"},
    ]


def test_seeds_vary_fastest_or_slowest_by_choice() -> None:
    settings = [{"lr": "1"}, {"lr": "2"}]
    assert names(settings, ("0", "7")) == ["lr=1/run_0", "lr=1/run_7", "lr=2/run_0", "lr=2/run_7"]
    assert names(settings, ("0", "7"), "outermost") == ["lr=1/run_0", "lr=2/run_0", "lr=1/run_7", "lr=2/run_7"]


def test_without_settings_runs_have_no_setting_directory() -> None:
    assert names([{}], ("3", "4")) == ["run_3", "run_4"]


def test_without_seeds_a_setting_has_one_run_with_the_given_id() -> None:
    assert [run.name for run in make_runs(MAKE_RUN, {}, [{"lr": "1"}], (), "innermost", run_id=5)] == ["lr=1/run_5"]


def test_directory_names_need_no_quotes() -> None:
    assert names([{"model.hidden": "[64,64]"}]) == ["hidden=64x64/run_0"]
    assert names([{"env": "ALE/Pong-v5"}]) == ["env=ALE_Pong-v5/run_0"]


def test_keys_with_the_same_last_part_keep_their_full_name() -> None:
    assert names([{"algo.size": "1", "model.size": "2"}]) == ["algo.size=1,model.size=2/run_0"]


def test_duplicate_and_long_names_are_numbered() -> None:
    assert names([{"env": "a/b"}, {"env": "a:b"}]) == ["env=a_b/run_0", "setting_1/run_0"]
    assert names([{"env": "x" * 300}]) == ["setting_0/run_0"]


def test_commands_contain_all_arguments_of_a_run() -> None:
    def run(resumes_by_directory: bool) -> Run:
        template = CommandTemplate(("python", "-m", "train"), resumes_by_directory)
        return make_runs(partial(template.make_run, Path("study")), {"env": "x"}, [{"lr": "1"}], ("3",), "innermost")[0]

    start = ("python", "-m", "train", "env=x", "lr=1", "seed=3", "log_dir=study/lr=1", "run_ID=3")
    assert run(True).command == run(False).command == start
    assert run(True).resume_command == ("python", "-m", "train", "resume=study/lr=1/run_3")
    assert run(False).resume_command == (*start, "resume=true")
    assert run(True).arguments == {"env": "x", "lr": "1", "seed": "3"}
    assert run(True).log == Path("study/lr=1/run_3.log")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sweep.lr": "1,,2"}, "without empty values"),
        ({"sweep.lr": ""}, "without empty values"),
        ({"sweep.": "1"}, "sweep.KEY=value"),
        ({"sweep.lr": "1,2,1"}, "contains 1 twice"),
        ({"sweep.lr": "1,2", "lr": "3"}, "lr is given as 3 and swept over 1,2"),
    ],
)
def test_an_invalid_grid_raises_an_error(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_grid(arguments)


def test_unknown_orders_invalid_seeds_and_repeated_settings_raise_errors() -> None:
    with pytest.raises(ConfigError, match="did you mean innermost"):
        names([{}], ("0",), "inermost")
    with pytest.raises(ConfigError, match=r"'1\.5' is not a whole number"):
        names([{}], ("1.5",))
    with pytest.raises(ConfigError, match="is given twice"):
        names([{"lr": "1"}, {"lr": "1"}])
