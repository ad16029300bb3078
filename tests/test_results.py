"""The evidence in results/: every preset's claim is that of its result file, and no file is lost."""

from pathlib import Path

import pytest
import yaml

from rlframe.analysis.results import claim, read_results, read_seeds
from rlframe.experiment.presets import preset_names, presets_dir

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
WITHOUT = (RESULTS / "without_curves.txt").read_text(encoding="utf-8").split()  # it can only become shorter


def preset(name: str) -> dict:
    return yaml.safe_load((presets_dir() / f"{name}.yaml").read_text(encoding="utf-8"))


def test_every_preset_has_its_curves_but_those_that_are_listed() -> None:
    lost = [name for name in preset_names() if not (RESULTS / f"{name}.csv").exists()]
    assert sorted(lost) == WITHOUT, "a preset whose result file is there leaves the list; no other may join it"


@pytest.mark.parametrize("name", sorted({*preset_names()} - {*WITHOUT}))
def test_a_preset_claims_what_its_result_file_has(name: str) -> None:
    content, results = preset(name), read_results(RESULTS / f"{name}.csv")
    expect, measured = content["expect"], content["measured"]
    assert sorted(results.rows) == read_seeds(str(measured["seeds"]))
    found = claim(results, expect["metric"], expect["bound"], expect["env_steps"])
    assert str(measured["reached"]).startswith(found), f"experiments/{name}.yaml: `reached` must begin with: {found}"


@pytest.mark.parametrize(
    "name", [name for name in WITHOUT if preset(name).get("measured", "unmeasured") != "unmeasured"]
)
def test_a_preset_without_curves_names_seeds_and_what_they_reached(name: str) -> None:
    assert read_seeds(str(preset(name)["measured"]["seeds"]))


def test_every_result_file_says_how_it_was_measured() -> None:
    files = [path for path in RESULTS.glob("*/*.csv") if path.parent.name not in ("compiled", "defaults", "search")]
    assert len(files) > 60
    for path in files:
        results = read_results(path)
        assert sorted(results.rows) == sorted(seed for each in results.measured for seed in read_seeds(each["seeds"]))
        assert all(each.get("command") or each.get("note") for each in results.measured), path
