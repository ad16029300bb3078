"""Comparing trainings: the arithmetic, the refusals, and one real small comparison."""

import csv
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import compare, table
from benchmarks.parts import chart, solve
from benchmarks.parts.command import words_of
from benchmarks.parts.frameworks import Framework, all_frameworks
from benchmarks.parts.gate import Closed, Gate
from benchmarks.parts.rows import PPO, ROWS
from benchmarks.parts.turns import Ready, _variables, line
from rlframe.experiment.job import read_job
from rlframe.experiment.settings import from_flat
from tests.fork_server import run_python

ROOT = Path(__file__).parents[1]


def test_a_ratio_is_of_one_round_and_a_limit_is_the_sum_of_its_parts_times() -> None:
    known = all_frameworks({})
    row = ROWS["ppo_pong"]
    rounds = [
        {"rlframe": 600.0, "sbx": 200.0, **dict.fromkeys(compare.LIMIT, 2400.0)},
        {"rlframe": 300.0, "sbx": 150.0, **dict.fromkeys(compare.LIMIT, 1800.0)},
    ]
    over_sbx, over_limit = compare.comparisons(row, list(rounds[0]), known)
    assert (over_sbx.name, over_limit.asked) == ("over SBX *", 0.85)  # not the same work
    assert over_sbx.ratios(rounds) == pytest.approx([3.0, 2.0])
    assert over_limit.ratios(rounds) == pytest.approx([600 / 800, 300 / 600])


def test_without_rlframe_there_are_rates_but_no_ratios() -> None:
    assert compare.comparisons(ROWS["ppo_pong"], ["sb3", "sbx"], all_frameworks({})) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": "ppo_cartpol"}, "rows=ppo_cartpol: not one of ppo_cartpole, "),
        ({"frameworks": "rlframe,keras"}, "frameworks=keras: not one of rlframe, sb3, "),
        ({"rounds": 0}, "rounds=0 and seeds=10 must be at least 1"),
        ({"seconds": 0.0}, "seconds=0.0 above 0"),
        ({"ours": "threads=1 bf16"}, "'bf16' is not key=value"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_starts(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        compare.main(**arguments)  # type: ignore[arg-type]


def test_an_absent_peer_is_left_out_and_named_with_its_command() -> None:
    absent = Framework("Nobody", "no_such_package", (), "pip install nobody", "nowhere")
    here = all_frameworks({})["rlframe"]
    rows, known, notes = compare.available(["ppo_cartpole"], {"rlframe": here, "nobody": absent})
    assert (rows, list(known)) == (["ppo_cartpole"], ["rlframe"])
    assert notes == ["Nobody is not installed and left out: pip install nobody"]


def test_a_row_without_its_environment_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compare.NEEDS, "HalfCheetah-v5", {"no_such_package": "some-package"})
    rows, _, notes = compare.available(["sac_cheetah", "ppo_cartpole"], {})
    assert (rows, notes) == (["ppo_cartpole"], ["sac_cheetah is left out: pip install some-package"])


@pytest.mark.parametrize("name", ROWS)
def test_rlframe_is_told_to_do_the_work_of_the_row(name: str) -> None:
    row = ROWS[name]
    experiment = read_job(words_of(row, {})).experiment  # as launch reads them, with the algorithm's defaults
    algo, sampler, work = experiment.algo, experiment.sampler, row.work
    assert (experiment.env, experiment.threads, experiment.snapshot_mode) == (row.env, row.n_threads, "none")
    if isinstance(work, PPO):
        assert sampler.batch_T * sampler.batch_B == work.minibatch() * algo.minibatches
    else:
        assert algo.batch_size / algo.replay_ratio == work.every == sampler.batch_T
        assert algo.learning_starts == work.learning_starts < work.warm_up()
    if work.__class__ is not PPO and work.algo == "dqn":
        assert algo.target_interval * work.every == work.target_every
        assert algo.explore.epsilon == work.epsilon
        assert (algo.n_step, algo.double) == (1, False), "as others have it"


def test_words_of_the_user_win_over_those_of_the_row() -> None:
    words: Mapping[str, str] = compare.words_of("threads=2 algo.epochs=3")
    experiment = from_flat(words_of(ROWS["ppo_cartpole"], words))
    assert (experiment.threads, experiment.algo.epochs) == (2, 3)


def test_a_gate_times_whole_iterations_after_the_warm_up() -> None:
    here, there = multiprocessing.Pipe()
    gate, steps = Gate(there, warm_up=30), 0

    def train() -> None:
        nonlocal steps
        while True:
            gate(steps)
            steps += 10
            deadline = time.perf_counter() + 0.02
            while time.perf_counter() < deadline:
                pass

    for command in (0.05, 0.0):
        here.send(command)
    begin = time.perf_counter()
    with pytest.raises(Closed):
        train()
    passed = time.perf_counter() - begin
    assert isinstance(here.recv(), Ready)
    assert steps >= 40  # the warm-up's, and at least an iteration
    assert (steps - 30) / passed < here.recv() <= 10 / 0.02


def test_bars_are_relative_to_the_first_peer_and_leave_limits_out(tmp_path: Path) -> None:
    rates = [line("a", "rlframe", [6.0]), line("a", "SBX *", [3.0]), line("a", "limit: acting", [9.0])]
    rates.append(line("b", "rlframe", [5.0]))
    assert chart.relative(rates) == {"a": {"rlframe": 2.0, "SBX *": 1.0}, "b": {"rlframe": 1.0}}
    pytest.importorskip("matplotlib")
    chart.draw(rates, str(tmp_path / "bars.png"))
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_solving_is_read_from_complete_rows_of_the_log(tmp_path: Path) -> None:
    command, solved = solve.ours(3, tmp_path, {"threads": "1"})
    assert {"seed=3", "eval.n_episodes=100", "threads=1"} <= set(command)
    assert not solved()
    (tmp_path / "run_0").mkdir()
    with (tmp_path / "run_0/progress.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["env_steps", "eval/return_mean"], [0, 20.5], [10_000, 474.9], [20_000, "5e"]])
    assert not solved()
    with (tmp_path / "run_0/progress.csv").open("a", newline="") as file:
        csv.writer(file).writerow([30_000, 475.0])
    assert solved()


def test_the_clock_of_solving_stops_when_it_is_told(tmp_path: Path) -> None:
    found = tmp_path / "found"
    make = f"import pathlib, time; pathlib.Path({str(found)!r}).touch(); time.sleep(60)"
    assert 0 < solve.seconds(([sys.executable, "-c", make], found.exists), {}) < 50


def test_what_ends_unsolved_takes_for_ever_and_what_fails_says_why() -> None:
    assert solve.seconds(([sys.executable, "-c", ""], lambda: False), {}) == math.inf
    with pytest.raises(SystemExit, match="no such training"):
        solve.seconds(([sys.executable, "-c", "raise ValueError('no such training')"], lambda: False), {})


@pytest.mark.slow
def test_rlframe_alone_is_measured_for_real(tmp_path: Path) -> None:
    """Starts the command and a process that trains: some seconds."""
    out = tmp_path / "compare.json"
    words = ["rows=ppo_cartpole", "frameworks=rlframe", "rounds=1", "seconds=0.2", f"out={out}"]
    done = run_python([sys.executable, "-m", "benchmarks.compare", *words], cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    (rate,) = found["rates"]
    assert (rate["group"], rate["name"]) == ("ppo_cartpole", "rlframe")
    assert rate["median"] > 0
    assert "1 torch thread" in rate["where"]
    assert found["machine"]["cpu"]
    assert "ppo_cartpole" in done.stdout


def test_a_contender_has_the_kernels_that_its_libraries_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("RLFRAME_TEST", "kept")
    with _variables({"OMP_NUM_THREADS": "1"}):
        found = dict(os.environ)
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert (found["OMP_NUM_THREADS"], found["RLFRAME_TEST"]) == ("1", "kept")
    assert "OPENBLAS_CORETYPE" not in found


RESULT = {
    "machine": {"cpu": "AMD EPYC", "n_cpus": 2, "bf16_units": "amx_bf16", "torch": "2.13.0+cpu"},
    "seconds": 2.0,
    "rates": [
        {"group": "ppo_pong", "name": "rlframe", "median": 1042.4, "rounds": [1042.4, 1000.0, 1100.0]},
        {"group": "ppo_pong", "name": "SBX *", "median": 72.0, "rounds": [72.0, 72.0, 72.0]},
        {"group": "sac_cheetah", "name": "rlframe", "median": 175.0, "rounds": [175.0, 175.0, 175.0]},
    ],
    "ratios": [
        {"group": "ppo_pong", "name": "over SBX *", "median": 14.5, "rounds": [14.5, 13.0, 15.0]},
        {"group": "ppo_pong", "name": "over its limit", "median": 1.12, "rounds": [1.12, 1.0, 1.2]},
        {"group": "sac_cheetah", "name": "over Stable-Baselines3", "median": 2.17, "rounds": [2.17, 2.0, 2.3]},
    ],
}


def test_a_results_tables_replace_those_of_a_page() -> None:
    page = "above\n<!-- speed: short -->\nold\n<!-- speed: end -->\nbelow\n"
    expected = [
        "above",
        "<!-- speed: short -->",
        "One run on two cores of an AMD EPYC (amx_bf16), medians of three rounds of 2 s; PyTorch 2.13.0.",
        "",
        "| training | cores | rlframe, steps/s | over Stable-Baselines3 | over SBX |",
        "|---|---|---|---|---|",
        r"| PPO, ALE/Pong-v5 | 2 | 1,042 |  | 14.50 \* |",
        "| SAC, HalfCheetah-v5 | 1 | 175 | 2.17 |  |",
        "<!-- speed: end -->",
        "below",
    ]
    assert table.put(page, RESULT).splitlines() == expected
    long = table.put(page.replace("short", "long"), RESULT)
    assert r"| `ppo_pong` | 1,042, 1.12 (1.00 to 1.20) of its limit |  | 14.50 (13.00 to 15.00) \* |" in long
    assert table.put(table.put(page, RESULT), RESULT) == table.put(page, RESULT)


@pytest.mark.parametrize(
    ("page", "row"),
    [("README.md", r"\| PPO, CartPole-v1 \|"), ("docs/guides/speed.md", r"\| `ppo_cartpole` \| [\d,]+ \|")],
)
def test_the_pages_mark_the_place_of_their_tables(page: str, row: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(re.findall(row, table.put(text, RESULT))) == len(re.findall(row, text)) - 1


def test_a_page_without_a_place_is_refused() -> None:
    with pytest.raises(SystemExit, match="no line <!-- speed: short -->"):
        table.put("text", RESULT)
