"""The evidence in results/: every preset's claim is that of its result file, and no file is lost."""

import importlib.util
import os
import re
import shlex
import types
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks import defaults, equal_clock
from benchmarks.parts.kept_rows import rows_in
from rlframe import launch, plot, results
from rlframe.analysis.figures import is_drawn_from
from rlframe.analysis.results import claim, find_curves, read_results, read_seeds
from rlframe.experiment.presets import preset_names, presets_dir

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
WITHOUT = (
    (RESULTS / "without_curves.txt").read_text(encoding="utf-8").split()
)  # presets that nobody has measured in this form yet

OTHER_FIGURES = ("equal_clock", "search", "speed")  # of benchmarks, and of a study's directory, which is not kept
OTHERS = ("compiled", "defaults", "equal_clock", "search")  # experiments with files of their own form
FILES = [path for path in RESULTS.glob("*/*.csv") if path.parent.name not in OTHERS]


def preset(name: str) -> dict:
    return yaml.safe_load((presets_dir() / f"{name}.yaml").read_text(encoding="utf-8"))


def test_every_preset_has_its_curves_but_those_that_are_listed() -> None:
    lost = [name for name in preset_names() if not (RESULTS / f"{name}.csv").exists()]
    assert sorted(lost) == WITHOUT, (
        "a preset leaves the list when its result file is there, and joins it while it is new"
    )


@pytest.mark.parametrize("name", sorted({*preset_names()} - {*WITHOUT}))
def test_a_preset_claims_what_its_result_file_has(name: str) -> None:
    content, found = preset(name), read_results(RESULTS / f"{name}.csv")
    assert "expect" in content, f"experiments/{name}.yaml has a result file and needs `expect` and `measured`"
    expect, measured = content["expect"], content["measured"]
    assert sorted(found.rows) == read_seeds(str(measured["seeds"]))
    says = claim(found, expect["metric"], expect["bound"], expect["env_steps"])
    assert str(measured["reached"]).startswith(says), f"experiments/{name}.yaml: `reached` must begin with: {says}"


@pytest.mark.parametrize("name", sorted({*preset_names()} - {*WITHOUT}))
def test_a_preset_has_the_median_wall_time_and_all_processors_of_its_seeds(name: str) -> None:
    measured, found = preset(name)["measured"], read_results(RESULTS / f"{name}.csv")
    times = [found.column(seed, "time/elapsed_s") for seed in found.rows] if "time/elapsed_s" in found.columns else []
    if ends := [np.nanmax(each) for each in times if np.isfinite(each).any()]:
        median = float(np.median(ends))
        assert measured["wall_s"] == pytest.approx(median, rel=0.01, abs=1), f"experiments/{name}.yaml: `wall_s`"
    processors = {each.get("machine", {}).get("cpu", "") for each in found.measured}
    brands = {brand for brand in ("EPYC", "Xeon") if any(brand in cpu for cpu in processors)}
    assert all(brand in measured["machine"] for brand in brands), f"experiments/{name}.yaml: `machine` lacks one"


@pytest.mark.parametrize(
    "name", [name for name in WITHOUT if preset(name).get("measured", "unmeasured") != "unmeasured"]
)
def test_a_preset_without_curves_names_seeds_and_what_they_reached(name: str) -> None:
    measured = preset(name)["measured"]
    assert read_seeds(str(measured["seeds"]))
    assert re.search(r"\d", str(measured["reached"]))


def test_every_result_file_says_how_it_was_measured() -> None:
    assert len(FILES) > 60
    for path in FILES:
        found = read_results(path)
        assert sorted(found.rows) == sorted(seed for each in found.measured for seed in read_seeds(each["seeds"]))
        assert all(each.get("command") or each.get("note") for each in found.measured), path


@pytest.fixture(scope="module")
def tables() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("result_tables", ROOT / "docs/result_tables.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_readme_and_docs_are_those_of_the_result_files(tables: types.ModuleType) -> None:
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- results: begin -->") == len(tables._TABLE.findall(text)) > 0
        assert tables.written(text) == text, f"{page.name} is not up to date: python docs/result_tables.py"


@pytest.mark.parametrize(("name", "seconds"), [("curves.csv", equal_clock.SECONDS), ("xeon.csv", 1800)])
def test_the_tables_and_figure_of_the_equal_clock_are_those_of_its_curves(name: str, seconds: float) -> None:
    out = equal_clock.OUT.with_name(name)
    rows = equal_clock.within(rows_in(ROOT / out, equal_clock.COLUMNS), seconds)
    if out == equal_clock.OUT:
        assert is_drawn_from(ROOT / "docs/images/equal_clock.png", equal_clock.drawn_numbers(rows))
    page = (ROOT / "docs/guides/speed.md").read_text(encoding="utf-8")
    command = f"python -m benchmarks.equal_clock show=true out={out} seconds={seconds}"
    assert equal_clock.table(rows) in page, f"docs/guides/speed.md is not up to date: {command}"


def test_the_table_of_defaults_is_that_of_its_returns() -> None:
    table = defaults.table(rows_in(ROOT / defaults.OUT, defaults.COLUMNS))
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert table in page, "docs/results.md is not up to date: python -m benchmarks.defaults show=true"


def test_the_result_files_of_other_experiments_are_there_and_the_docs_say_what_they_are() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), Path(equal_clock.__file__)]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"results/(\w+/\w+\.(?:csv|json))", text))
    assert [name for name in named if not (RESULTS / name).is_file()] == []
    alone = [path for path in RESULTS.glob("*/*.json") if not path.with_suffix(".csv").exists()]
    others = [path for folder in OTHERS for path in (RESULTS / folder).glob("*.csv")]
    assert {str(path.relative_to(RESULTS)) for path in (*alone, *others)} <= named


def test_the_figures_of_the_docs_are_drawn_from_the_files_as_they_are() -> None:
    lines = (RESULTS / "README.md").read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    drawn = [plot.parse(shlex.split(line)[3:]) for line in lines if line.startswith("python -m rlframe.plot ")]
    for options in drawn:
        experiments = find_curves([ROOT / path for path in options.dirs], options.labels)
        columns = plot.drawn_columns(experiments, options.decided(experiments))
        assert is_drawn_from(ROOT / options.out, columns), f"{options.out} is not up to date: see results/README.md"
    images = {str(path.relative_to(ROOT)) for path in (ROOT / "docs/images").glob("*.png")}
    assert images - {str(options.out) for options in drawn} == {f"docs/images/{name}.png" for name in OTHER_FIGURES}


def test_every_result_file_is_in_the_results() -> None:
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    names = [str(path.relative_to(RESULTS).with_suffix("")) for path in FILES]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_a_table_has_what_its_header_asks_and_keeps_what_is_written_by_hand(tables: types.ModuleType) -> None:
    table = "| what | seeds | mean at the end | reached |\n|-|\n| QMIX `multi_agent/qmix_two_step` | old | 3 |"
    assert tables.refresh(table).splitlines()[2] == (
        "| QMIX `multi_agent/qmix_two_step` | 10 | 8.00 [8.00, 8.00] "
        "| 8 on 10 of 10 seeds, at 1k to 2k env_steps, of 5k |"
    )
    stopped = tables.refresh(
        "| what | each seed at the end | mean at the end |\n|-|\n| `classic/sac_mountaincar_ou` | | |"
    )
    assert (
        stopped.splitlines()[2]
        == "| `classic/sac_mountaincar_ou` | 96.7, 93.6, 94.1, 92.6, 93.3 | 94.1 [93.0, 95.4] ‡ |"
    )
    for row, message in (("| PPO |", "names no preset"), ("| `a/b` |", "a/b is neither a preset nor a file")):
        with pytest.raises(SystemExit, match=message):
            tables.refresh(f"| what |\n|-|\n{row}")


@pytest.mark.slow
def test_a_study_of_seeds_becomes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, out = tmp_path / "study", tmp_path / "ppo.csv"
    words = ["runner.n_steps=4000", "runner.log_interval_steps=2000", "sampler=serial", f"log_dir={study}"]
    assert launch.main(["experiment=classic/ppo_cartpole", "sweep.seed=0,1", *words]) == 0
    assert results.main(["add", str(study), f"out={out}"]) == 0
    assert results.main(["table", str(out), "bound=1", "at=2k"]) == 0
    assert "| 2 | 1 on 2 of 2 seeds, at 2" in capsys.readouterr().out
    measured = read_results(out).measured
    assert [each["seeds"] for each in measured] == ["0-1"]
    assert measured[0]["command"].startswith("python -m rlframe.launch experiment=classic/ppo_cartpole runner.n_steps=")
    assert measured[0]["machine"]["cpu_count"] == os.cpu_count()
