"""Tables of result files, against numbers worked out by hand."""

from pathlib import Path

import numpy as np
import pytest

from rlframe.analysis.aggregates import mean
from rlframe.analysis.tables import estimate, number
from rlframe.results import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Result files of two algorithms on two tasks, of returns 0 to 10 and -200 to -100, evaluated at 1k and 2k."""
    returns = {
        "a_one": [(2, 4), (6, 8)],
        "b_one": [(1, 2), (1, 2)],
        "a_two": [(-180, -150), (-160, -130)],
        "b_two": [(-190, -130), (-190, -170)],
    }
    (tmp_path / "t").mkdir()
    for name, seeds in returns.items():
        rows = [f"{seed},{1000 * (n + 1)},{x}\n" for seed, each in enumerate(seeds) for n, x in enumerate(each)]
        (tmp_path / f"t/{name}.csv").write_text("seed,env_steps,eval/return_mean\n" + "".join(rows))
        env = name.rpartition("_")[2]
        (tmp_path / f"t/{name}.json").write_text(f'{{"config": {{"env": "{env}"}}, "measured": []}}')
    for name, level in (("a_one", 1), ("hard", 2)):
        (tmp_path / f"t/{name}.csv").write_text((tmp_path / "t/a_one.csv").read_text())
        own = f'{{"env": "one", "env_kwargs": {{"level": {level}}}}}'
        (tmp_path / f"t/{name}.json").write_text(f'{{"config": {own}, "measured": []}}')
    (tmp_path / "t/data.csv").write_text("seed,env_steps,updates,eval/return_mean\n0,0,1000,3\n")
    (tmp_path / "t/data.json").write_text('{"config": {"env": "one"}, "measured": []}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_table_has_marks_the_end_and_when_a_bound_was_reached(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", "t/a_one.csv", "t/b_one.csv", "at=1500,9k", "bound=4", "within=2k"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| results | seeds | reached | at 1.5k | at 9k | at the end | IQM |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| t/a_one | 2 | 4 on 2 of 2 seeds, at 1k to 2k env_steps | 5.00 | - | 6.00 | 6.00 |",
        "| t/b_one | 2 | 4 on 0 of 2 seeds | 1.50 | - | 2.00 | 2.00 |",
    ]


def test_seeds_that_do_not_end_together_are_told_where_ends_are_compared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(folder / "t/b_one.csv", "a") as file:
        file.write("2,1000,3\n")
    told = "t/b_one.csv: seeds end at 1k to 2k env_steps, and each counts where it ends; at= compares at one\n"
    for words, says in (
        (["table", "t/b_one.csv"], told),
        (["compare", "b=t/b_one.csv"], told),
        (["compare", "b=t/b_one.csv", "at=1k"], ""),
        (["table", "t/a_one.csv"], ""),
    ):
        assert main(words) == 0
        assert capsys.readouterr().err == says


def test_an_interval_needs_three_seeds_of_each_task() -> None:
    two, three = np.array([4.0, 8.0]), np.array([4.0, 4.0, 4.0])
    assert estimate(mean, [three]) == "4.00 [4.00, 4.00]"
    assert estimate(mean, [two]) == "6.00"
    assert estimate(mean, [three, two]) == "5.00"


def test_algorithms_are_compared_by_normalised_scores(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["a=t/a_one.csv,t/a_two.csv", "b=t/b_one.csv,t/b_two.csv", "low=0,-200", "high=10,-100"]
    assert main(["compare", *words]) == 0  # a: 0.4 and 0.8, 0.5 and 0.7; b: 0.2 twice, 0.7 and 0.3
    rows = [row.strip("| ").split(" | ") for row in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["algorithm", "seeds a task", "mean", "median", "IQM", "optimality gap"]
    values = [[cell.split(" ")[0] for cell in row] for row in rows]
    assert values[2] == ["a", "2", "0.60", "0.60", "0.60", "0.40"]
    assert values[3] == ["b", "2", "0.35", "0.35", "0.25", "0.65"]
    assert values[7] == ["a", "b", "0.81"]  # on the first task 4 of 4 pairs, on the second 2.5 of 4
    assert values[8] == ["b", "a", "0.19"]
    assert main(["compare", *words, "at=1k"]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| a | 2 | 0.35 | ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a=t/a_one.csv,t/a_two.csv"], "2 tasks need low= and high="),
        (["a=t/a_one.csv", "b=t/b_one.csv,t/b_two.csv"], "a has 1 file, b 2"),
        (["a=t/a_one.csv", "b=t/b_two.csv"], "one and two are compared"),
        (["a=t/a_one.csv", "low=1", "high=0"], "must be below high"),
        (["a=t/a_one.csv", "low=1,2", "high=3"], "low= has 2 numbers for 1 task"),
        (["a=t/lost.csv"], "t/lost.csv does not exist"),
        (["a=t/a_one.csv", "b=t/hard.csv"], 'env_kwargs={"level": 1} and {"level": 2} are compared; name the tasks'),
        (["a=t/a_one.csv", "low=3"], "low= and high= are the returns that score 0 and 1; give both, or none"),
        (["a=t/a_one.csv", "b=t/data.csv", "at=1k"], "they have no clock in common; leave at= and out="),
        (["a=t/a_one.csv", "at=1kk"], "at='1kk' must be numbers"),
        (["a=t"], "a=t is a directory, not a result file; name its files, such as a=t/a_one.csv"),
        (["a=."], "a=. is a directory, not a result file; make one of its runs by: rlframe results add DIR out=FI"),
        (["a=t/a_one"], "a=t/a_one does not exist; did you mean a=t/a_one.csv?"),
        (["a=t/a_one.csv", "at=5q"], "at='5q' must be numbers"),
        (["a=t/a_one.csv", "metric=eval/return"], "has no 'eval/return'; it has env_steps, eval/return_mean; did you"),
    ],
)
def test_a_wrong_comparison_is_refused(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_figure_that_is_no_image_replaces_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    before = (folder / "t/a_one.csv").read_text()
    assert main(["compare", "a=t/a_one.csv", "out=t/a_one.csv"]) == 2
    assert "out=t/a_one.csv has no ending that says what kind of image it is" in capsys.readouterr().err
    assert (folder / "t/a_one.csv").read_text() == before


def test_a_comparison_is_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (folder / "t/b_one.csv").write_text("seed,env_steps,eval/return_mean\n0,500,1\n0,1500,2\n")
    assert main(["compare", "a=t/a_one.csv", "b=t/b_one.csv", "at=2k", "out=x.png"]) == 0
    assert (folder / "x.png").stat().st_size > 10_000
    assert capsys.readouterr().err == "b: without a profile, as not all of its runs have a score at 2000\n"


def test_numbers_have_three_digits_or_more() -> None:
    assert [number(x) for x in (6482.4, -158.2, 99.95, 52.34, 9.996, 0.2, -0.25, float("nan"))] == [
        *("6,482", "-158", "100", "52.3", "10.0", "0.20", "-0.25", "-")
    ]
