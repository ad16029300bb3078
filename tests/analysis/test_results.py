"""Result files: what is added from run directories is kept, and what does not belong together is refused."""

import json
import resource
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe import plot
from rlframe.analysis import add_runs as adding
from rlframe.analysis.add_runs import add_runs, in_turn
from rlframe.analysis.curves import find_experiments, read_run
from rlframe.analysis.results import Results, claim, read_results, read_seeds, short, spell_seeds
from rlframe.core.errors import ConfigError
from rlframe.record.directory import DirectoryLock
from rlframe.results import main
from tests.processes import DEADLINE_S

HEADER = "env_steps,updates,time/elapsed_s,algo/kl,eval/return_mean,episode/return_mean"


def run_dir(folder: Path, seed: int, returns: tuple[float, ...], ended: str = "completed", **config: Any) -> Path:
    """A run directory with an evaluation every 1,000 env_steps, and a row without one after each."""
    folder.mkdir(parents=True)
    rows = [f"{1000 * n},{10 * n},{1.26 * n},0.1,{x},\n{1000 * n + 500},,,0.1,,7" for n, x in enumerate(returns)]
    (folder / "progress.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    params = {
        "config": {"env": "CartPole-v1", "algo.clip": 0.2, "seed": seed, "log_dir": str(folder), **config},
        "command_line": [
            "rlframe/launch.py",
            "experiment=a/b",
            f"seed={seed}",
            "algo.clip=0.2",
            "log_dir=/tmp/x",
            "stack=[0,1]",
        ],
        "started": "2026-11-25T07:44:00+00:00",
        "versions": {"torch": "2.13"},
        "git": {"revision": "abc", "dirty": True},
        "host": {"name": "secret", "cpu": "Xeon", "cpu_count": 2, "os": "Linux-6.1"},
    }
    (folder / "params.json").write_text(json.dumps(params))
    (folder / "result.json").write_text(json.dumps({"ended": ended}))
    return folder


def test_a_file_has_the_evaluations_of_all_seeds_and_how_they_were_measured(tmp_path: Path) -> None:
    run_dir(tmp_path / "study/run_0", 0, (9.0, 123.4567891, 500.0))
    run_dir(tmp_path / "study/run_1", 1, (8.0, 400.0, 480.0))
    later, out = run_dir(tmp_path / "later", 7, (1.0, 2.0, 3.0)), tmp_path / "results/a/b.csv"
    assert main(["add", str(tmp_path / "study"), f"out={out}", "note=beside other work"]) == 0
    assert main(["add", str(later), f"out={out}"]) == 0
    assert out.read_text() == (
        "seed,env_steps,updates,time/elapsed_s,eval/return_mean\n"
        "0,0,0,0.0,9\n0,1000,10,1.3,123.457\n0,2000,20,2.5,500\n"
        "1,0,0,0.0,8\n1,1000,10,1.3,400\n1,2000,20,2.5,480\n"
        "7,0,0,0.0,1\n7,1000,10,1.3,2\n7,2000,20,2.5,3\n"
    )
    facts = json.loads(out.with_suffix(".json").read_text())
    assert facts["config"] == {"env": "CartPole-v1", "algo.clip": 0.2}
    first, second = facts["measured"]
    assert first == {
        "seeds": "0-1",
        "date": "2026-11-25",
        "command": "python -m rlframe.launch experiment=a/b algo.clip=0.2",
        "versions": {"torch": "2.13"},
        "revision": "abc and changes",
        "machine": {"cpu": "Xeon", "cpu_count": 2, "os": "Linux"},
        "ended": "completed",
        "note": "beside other work",
    }
    assert (second["seeds"], second.get("note")) == ("7", None)


def test_two_commands_that_add_to_one_file_take_turns(tmp_path: Path) -> None:
    """Else each writes the file that it has read, and the seeds of one are lost."""
    run, out = run_dir(tmp_path / "run_0", 0, (1.0, 2.0)), tmp_path / "results/out.csv"
    out.parent.mkdir()
    other = threading.Thread(target=add_runs, args=([run], out, (), "", False))
    with in_turn(out.parent):
        other.start()
        other.join(0.3)
        assert not out.exists()
    other.join(DEADLINE_S)
    assert out.exists()


def test_a_folder_that_a_run_or_study_holds_to_its_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_dir(tmp_path / "study/run_0", 0, (1.0, 2.0))
    monkeypatch.setattr(adding, "_WAIT_S", 0.1)
    with closing(DirectoryLock(tmp_path / "study", "a study", "log_dir")):
        assert main(["add", str(run), f"out={tmp_path / 'study/out.csv'}"]) == 2
    assert f"{tmp_path / 'study'} has been in use by another process for 0.1 s" in capsys.readouterr().err
    assert not (tmp_path / "study/out.csv").exists()


def test_adding_the_same_runs_again_changes_nothing(tmp_path: Path) -> None:
    run, out = run_dir(tmp_path / "run_0", 0, (1.0, 2.0)), tmp_path / "out.csv"
    add_runs([run], out, (), "", False)
    before = out.read_bytes(), out.with_suffix(".json").read_bytes()
    add_runs([tmp_path], out, (), "another note", False)
    assert (out.read_bytes(), out.with_suffix(".json").read_bytes()) == before


def test_columns_are_metrics_each_once_and_clocks_are_kept_in_any_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = run_dir(tmp_path / "run_0", 0, (1.0, 2.0)), tmp_path / "algo=ppo,clip=0.2.csv"
    assert main(["add", str(run), f"out={out}", "columns=env_steps,updates"]) == 2
    assert "columns=env_steps,updates are kept in any case; name a metric" in capsys.readouterr().err
    assert main(["add", str(run), f"out={out}", "columns=env_steps,algo/kl,algo/kl"]) == 0
    assert list(read_results(out).columns) == ["env_steps", "updates", "time/elapsed_s", "algo/kl"]
    given = ["metric=algo/kl", "low=0", "high=1"]
    assert main(["compare", f"A={out},{out}", *given]) == 0, "a file's name may have a comma"
    assert main(["table", str(out), "metric=algo/kl", "within=100k"]) == 2
    assert "within=, which needs bound=" in capsys.readouterr().err


def test_what_does_not_belong_together_is_refused_and_the_file_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    add_runs([run_dir(tmp_path / "first", 0, (1.0, 2.0))], out, (), "", False)
    before = out.read_bytes()
    wrong = {
        "algo.clip is 0.2 and 0.1": run_dir(tmp_path / "clip", 1, (1.0, 2.0), **{"algo.clip": 0.1}),
        "seed 0 of": run_dir(tmp_path / "other", 0, (1.0, 3.0)),
        "has not reached its end (interrupted)": run_dir(tmp_path / "short", 2, (1.0,), ended="interrupted"),
        "names no seed": run_dir(tmp_path / "seedless", None, (1.0,)),  # type: ignore[arg-type]
    }
    wrong["result.json is damaged"] = run_dir(tmp_path / "cut", 3, (1.0,))
    (tmp_path / "cut/result.json").write_text('{"ended": "comp')
    wrong[f"{tmp_path / 'emptied'} has no env_steps"] = run_dir(tmp_path / "emptied", 4, (1.0,))
    (tmp_path / "emptied/progress.csv").write_text("")
    for message, run in wrong.items():
        assert main(["add", str(run), f"out={out}"]) == 2
        error = capsys.readouterr().err
        assert message in error.splitlines()[-1]
        assert error.count("error: ") == 1
    assert out.read_bytes() == before
    add_runs([wrong["has not reached its end (interrupted)"]], out, (), "stopped by hand", True)
    assert read_results(out).measured[-1]["ended"] == "interrupted"
    longer = run_dir(tmp_path / "long", 2, (1.0, 4.0))
    add_runs([longer], out, (), "", False)
    assert [row[-1] for row in read_results(out).rows[2]] == ["1", "4"]
    assert [(x["seeds"], x["ended"]) for x in read_results(out).measured] == [("0, 2", "completed")]
    other = run_dir(tmp_path / "another", 2, (3.0, 4.0, 5.0))
    assert main(["add", str(other), f"out={out}"]) == 2
    assert "with other numbers; seeds are measured once" in capsys.readouterr().err


def test_a_study_of_several_settings_makes_a_file_of_each_in_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, out = tmp_path / "study", tmp_path / "kept"
    for clip in (0.1, 0.2):
        for seed in (0, 1):
            run_dir(study / f"ppo/clip={clip}/run_{seed}", seed, (clip,), **{"algo.clip": clip})
    with pytest.raises(ConfigError, match=r"algo\.clip is 0\.1 and 0\.2; write a file for each, by out=FOLDER/"):
        add_runs([study], tmp_path / "out.csv", (), "", False)
    assert main(["add", str(study), f"out={out}/"]) == 0
    files = [out / f"ppo/clip={clip}.csv" for clip in (0.1, 0.2)]
    assert [read_results(file).config["algo.clip"] for file in files] == [0.1, 0.2]
    assert all(set(read_results(file).rows) == {0, 1} for file in files)
    assert capsys.readouterr().out.splitlines()[1].startswith(f"{files[1]}: 2 seeds (0-1) of ")
    assert main(["add", *map(str, sorted(study.glob("ppo/*"))), f"out={out}/short/"]) == 0
    assert sorted(file.name for file in out.glob("short/*.csv")) == ["clip=0.1.csv", "clip=0.2.csv"]
    before = files[0].read_bytes()
    run_dir(study / "ppo/clip=0.1/run_2", 2, (1.0,), **{"algo.clip": 0.1})
    run_dir(study / "ppo/clip=0.2/run_3", 3, (1.0,), **{"algo.clip": 0.3})
    assert main(["add", str(study), f"out={out}/"]) == 2
    assert files[0].read_bytes() == before, "all files or none"


def test_a_study_of_which_a_run_has_not_begun_is_added_only_as_a_part_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, out = tmp_path / "study", tmp_path / "kept"
    run_dir(study / "clip=0.1/run_0", 0, (1.0,))
    waiting = {"name": "clip=0.1/run_1", "state": "waiting"}
    (study / "experiment.json").write_text(json.dumps({"runs": [{"name": "clip=0.1/run_0", "state": "done"}, waiting]}))
    for words in ([str(study), f"out={out}/"], [str(study / "clip=0.1"), f"out={out}.csv"]):
        assert main(["add", *words]) == 2
        assert "is not complete, as " in (said := capsys.readouterr().err)
        assert "clip=0.1/run_1 has no log; let the study end, by its command if it failed, or add partial=true" in said
        assert main(["add", *words, "partial=true"]) == 0


def test_what_is_no_result_file_is_refused_with_what_to_name(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run_0", 0, (1.0,))
    add_runs([run], tmp_path / "folder/out.csv", (), "", False)
    for path, said in (
        (tmp_path / "folder", "is a folder; name the result files in it, "),
        (run, "run_0 is not a result file"),
        (run / "progress.csv", "is the log of a run"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_results(path)


def test_runs_may_differ_in_what_only_rounds_otherwise_or_stops_them(tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [{"threads": 1, "stop": ""}, {"threads": 2, "stop": "env_steps >= 2"}]
    runs = [run_dir(tmp_path / str(seed), seed, (1.0, 2.0), **others[seed]) for seed in (0, 1)]
    assert set(add_runs(runs, tmp_path / "out.csv", (), "", False).rows) == {0, 1}


def test_a_file_of_your_own_is_known_by_its_contents(tmp_path: Path) -> None:
    """Seeds from two machines have it in different places; the same place may hold another one by now."""
    out, digests = tmp_path / "out.csv", {"./a.py": "1" * 16, "/there/a.py": "1" * 16, "/here/a.py": "2" * 16}
    runs = []
    for seed, (file, digest) in enumerate(digests.items()):
        run = run_dir(tmp_path / str(seed), seed, (1.0,), algo=f"{file}:Mine", callbacks=[f"{file}:Mine", "stop"])
        params = json.loads((run / "params.json").read_text())
        (run / "params.json").write_text(json.dumps({**params, "code": {file: digest}}))
        runs.append(run)
    assert add_runs(runs[:2], out, (), "", False).config["algo"] == "a.py@11111111:Mine"
    with pytest.raises(ConfigError, match=r"algo is a\.py@11111111:Mine and a\.py@22222222:Mine, callbacks"):
        add_runs(runs[2:], out, (), "", False)


def test_a_precision_that_the_machine_chose_is_no_difference(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    runs = [run_dir(tmp_path / str(seed), seed, (1.0,), precision=name) for seed, name in enumerate(("fp32", "bf16"))]
    for run, name in zip(runs, ("fp32", "bf16"), strict=True):
        params = json.loads((run / "params.json").read_text()) | {"chosen": {"precision": name}}
        (run / "params.json").write_text(json.dumps(params))
    found = add_runs(runs, out, (), "", False)
    assert "precision" not in found.config
    assert [(entry["seeds"], entry["chosen"]) for entry in found.measured] == [
        ("0", {"precision": "fp32"}),
        ("1", {"precision": "bf16"}),
    ]
    with pytest.raises(ConfigError, match="precision is null and fp32"):
        add_runs([run_dir(tmp_path / "asked", 2, (1.0,), precision="fp32")], out, (), "", False)


def test_a_resumed_run_is_of_the_settings_it_was_resumed_with(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run_0", 0, (1.0, 2.0))
    params = json.loads((run / "params.json").read_text()) | {"resumed": [{"changed": {"algo.clip": 0.3}}]}
    (run / "params.json").write_text(json.dumps(params))
    with pytest.raises(ConfigError, match=r"algo\.clip is 0\.3 and 0\.2"):
        add_runs([run, run_dir(tmp_path / "run_1", 1, (1.0, 2.0))], tmp_path / "out.csv", (), "", False)
    assert [found.label for found in find_experiments([tmp_path], [])] == ["algo.clip=0.3", "algo.clip=0.2"]


@pytest.mark.parametrize("rate", ["linear(1e-3,0)", "linear(1e-3,0,5000)"])
def test_a_run_that_schedules_went_over_twice_is_not_one_of_its_full_length(rate: str, tmp_path: Path) -> None:
    settings = {"algo.learning_rate": rate, "runner.n_steps": 3000}
    full = run_dir(tmp_path / "full", 0, (1.0, 2.0), **settings)
    longer = [run_dir(tmp_path / f"run_{i}", i, (1.0, 2.0), **settings | {"runner.n_steps": 1000}) for i in (1, 2)]
    for run in longer:
        params = json.loads((run / "params.json").read_text()) | {"resumed": []}
        params["resumed"] = [{"changed": {"runner.n_steps": 3000}}] * int(run.name[-1])  # the second was killed once
        (run / "params.json").write_text(json.dumps(params))
    assert add_runs(longer, tmp_path / "longer.csv", (), "", False).rows
    if "5000" in rate:  # whatever the length
        assert add_runs([full, *longer], tmp_path / "all.csv", (), "", False).rows
    else:
        with pytest.raises(ConfigError, match=r"runner\.n_steps is 3000 and 1000, then 3000"):
            add_runs([full, *longer], tmp_path / "all.csv", (), "", False)


def test_an_evaluation_that_came_late_has_the_clocks_of_its_env_steps(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run_0", 0, (1.0, 2.0))
    with (run / "progress.csv").open("a") as log:
        log.write("1000,,,,3.0,\n500,,,,2.5,\n2000,20,2.52,,,\n")
    columns, late = read_run(run).columns, slice(-3, -1)
    assert columns["updates"][late].tolist() == [10.0, 5.0]
    np.testing.assert_allclose(columns["time/elapsed_s"][late], [1.26, 0.63])
    (run / "progress.csv").write_text(f"{HEADER}\n0,1000,1.0,,,\n0,3000,3.0,,,\n0,2000,,,7.0,\n")  # from data
    assert read_run(run).columns["time/elapsed_s"].tolist() == [1.0, 3.0, 2.0]


def test_a_full_disk_leaves_the_result_file_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.csv"
    add_runs([run_dir(tmp_path / "run_0", 0, (1.0, 2.0))], out, (), "", False)
    before = out.read_bytes(), out.with_suffix(".json").read_bytes()
    other, limits = run_dir(tmp_path / "run_1", 1, (3.0, 4.0)), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before[0]) + 3, limits[1]))
        assert main(["add", str(other), f"out={out}"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (out.read_bytes(), out.with_suffix(".json").read_bytes()) == before
    assert "out.csv cannot be written: File too large" in capsys.readouterr().err


def test_another_file_of_the_name_of_the_facts_is_not_overwritten(tmp_path: Path) -> None:
    run, facts = run_dir(tmp_path / "run_0", 0, (1.0, 2.0)), tmp_path / "package.json"
    facts.write_text("mine")
    with pytest.raises(ConfigError, match=r"would overwrite .*package\.json, which is not of a result file"):
        add_runs([run], tmp_path / "package.csv", (), "", False)
    assert facts.read_text() == "mine"
    assert not (tmp_path / "package.csv").exists()
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.json cannot be written: it is a directory"):
        add_runs([run], tmp_path / "folder.csv", (), "", False)
    add_runs([run], tmp_path / "out.csv", (), "", False)
    (tmp_path / "out.json").write_text('{"config": {}, "measured": [1]}')
    with pytest.raises(ConfigError, match=r"out\.json is damaged: .* of objects with `seeds`"):
        add_runs([run], tmp_path / "out.csv", (), "", False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seed,updates\n0,1\n", "its first columns must be seed,env_steps"),
        ("seed,env_steps,y\n0,1,much\n", "could not convert string to float: 'much'"),
        ("seed,env_steps,y\n", "has no rows"),
        ("seed,env_steps,y,y\n0,1,2,3\n", "it has the column y twice"),
        ("seed,env_steps,y\n0,-1,2\n", "a row has env_steps=-1"),
        ("seed,env_steps,y\n0,inf,2\n", "a row has env_steps=inf"),
        ("seed,env_steps,y\n0,1,2\n0,2,\n", "the row of env_steps=2 has no value"),
        ("seed,env_steps,y\n0,1,2\n0,2,2\n0,1,2\n", "seed 0 has a row twice"),
        ("seed,env_steps,y\n0,1,2\n", "has the seeds 0, and its JSON file says that 0-1 were measured"),
    ],
)
def test_a_damaged_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text(content)
    (tmp_path / "out.json").write_text('{"config": {}, "measured": [{"seeds": "0-1"}]}')
    with pytest.raises(ConfigError, match=message):
        read_results(tmp_path / "out.csv")


def of(rows: dict[int, list[tuple[float, float]]]) -> Results:
    texts = {seed: [(str(x), str(y)) for x, y in points] for seed, points in rows.items()}
    return Results(Path("x.csv"), ("env_steps", "score"), texts, {}, [])


def test_a_claim_counts_the_seeds_that_reach_the_bound_in_time_and_says_when() -> None:
    results = of(
        {0: [(0, 0), (60_047, 475), (100_000, 3)], 1: [(0, 500), (70_008, 500)], 2: [(0, 0), (100_068, 474.9)]}
    )
    assert claim(results, "score", 475, 100_000) == "475 on 2 of 3 seeds, at 60k to 70k env_steps"
    assert claim(results, "score", 475, 65_000) == "475 on 1 of 3 seeds, at 60k env_steps"
    assert claim(results, "score", 474.9, 100_000) == "474.9 on 3 of 3 seeds, at 60k to 100k env_steps"
    assert claim(results, "score", 501) == "501 on 0 of 3 seeds"
    np.testing.assert_array_equal(results.final("score"), [3, 500, 474.9])
    np.testing.assert_allclose(results.at("score", 100_000), [3, np.nan, 474.9 * 100_000 / 100_068])


def test_an_evaluation_that_came_late_stands_where_it_belongs() -> None:
    results = of({0: [(0, 0), (2_000, 8), (1_000, 5)]})
    assert results.final("score") == [8]
    assert results.at("score", 500) == [2.5]


def test_steps_and_seeds_are_spelled_shortly() -> None:
    assert [short(x) for x in (500, 1004, 7502, 9999, 21951, 704_000, 999_600, 1_203_200, 2e8, 1e9, 2.5e9)] == [
        *("500", "1k", "7.5k", "10k", "22k", "704k", "1M", "1.2M", "200M", "1000M", "2500M")
    ]
    assert spell_seeds([20, 0, 1, 2, 22, 21, 5]) == "0-2, 5, 20-22"
    assert read_seeds("0-2, 5, 20-22") == [0, 1, 2, 5, 20, 21, 22]


def test_a_result_file_is_drawn_as_its_runs_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    study, out = tmp_path / "study", tmp_path / "out.csv"
    for seed in range(3):
        run_dir(study / f"run_{seed}", seed, (9.0, 20.0 + seed, 50.0 - seed))
    add_runs([study], out, (), "", False)
    printed = []
    for path in (study, out):
        assert plot.main([str(path), "labels=ppo", "x=updates", f"out={tmp_path / 'x.png'}"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "ppo: eval/return_mean 49.0 [48.0, 50.0] at updates 20, 3 seeds" in printed[0]
