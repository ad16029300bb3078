"""The runs of a grid: order, names, commands and errors."""

from functools import partial
from pathlib import Path

import pytest

from rlframe.core.errors import ConfigError
from rlframe.study.plan import CommandTemplate, PlannedRun, in_order, make_runs, varied

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
