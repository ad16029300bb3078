"""The queue with real processes: slots, failures, retries, signals and cleanup."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlframe.study import QueueOptions, run_study
from rlframe.study.plan import PlannedRun, make_slots
from rlframe.study.process import RunProcess
from rlframe.system.affinity import read_topology
from tests.fork_server import Popen
from tests.processes import DEADLINE_S, is_running, until
from tests.study.worker import HERE

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-S", HERE]


def study(log_dir: Path, *does: str, n_seeds: int = 1, affinity: str = "auto", **options: Any) -> int:
    variants = [{"do": do} for do in does]
    return run_study(COMMAND, variants, range(n_seeds), str(log_dir), affinity, options=QueueOptions(**options))


def record(log_dir: Path) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads((log_dir / "experiment.json").read_text())["runs"]}


def states(log_dir: Path) -> dict[str, str]:
    return {name: entry["state"] for name, entry in record(log_dir).items()}


def cpus_in_all() -> int:
    return len(os.sched_getaffinity(0))


@pytest.mark.skipif(cpus_in_all() < 2, reason="needs two CPUs")
def test_runs_at_the_same_time_share_no_cpu_and_as_many_run_as_there_are_slots(tmp_path: Path) -> None:
    assert study(tmp_path, "meet", n_seeds=8, affinity="2cpu_1cpr") == 0
    traces = [(tmp_path / f"run_{seed}/trace").read_text().split() for seed in range(8)]
    together = 0
    for (cpus, begin, end), (other_cpus, other_begin, other_end) in combinations(traces, 2):
        if float(begin) < float(other_end) and float(other_begin) < float(end):
            together += 1
            assert cpus != other_cpus
    assert {cpus for cpus, _, _ in traces} == {str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:2]}
    assert together >= 4


def test_a_crash_is_reported_with_its_last_line_and_stops_no_other_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert study(tmp_path, "raise", "brief", n_seeds=2) == 1
    assert states(tmp_path) == {
        "do=raise/run_0": "failed",
        "do=raise/run_1": "failed",
        "do=brief/run_0": "done",
        "do=brief/run_1": "done",
    }
    failed = record(tmp_path)["do=raise/run_0"]
    assert failed["reason"] == "exit status 1: ValueError: the 42nd step went wrong"
    assert (failed["exit_status"], failed["attempts"]) == (1, 1)
    printed = capfd.readouterr().out
    assert "ValueError: the 42nd step went wrong" in printed
    assert "2 of 4 runs done, 2 failed" in printed


def test_a_hung_run_is_killed_with_its_children_and_its_log_has_the_stack(tmp_path: Path) -> None:
    assert study(tmp_path, "hang", "brief", stall_s=5.0) == 1
    assert states(tmp_path) == {"do=hang/run_0": "failed", "do=brief/run_0": "done"}
    assert "hung: no new line in its logs for 5 s" in record(tmp_path)["do=hang/run_0"]["reason"]
    assert "in _hang" in (tmp_path / "do=hang/run_0.log").read_text()
    for name in ("started", "child"):
        pid = int((tmp_path / "do=hang/run_0" / name).read_text())
        until(lambda pid=pid: not is_running(pid))


def test_time_in_which_nobody_looked_at_a_run_does_not_make_it_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    run = PlannedRun("", 0, {"seed": "0"}, tmp_path / "run_0", command, command)
    (slot,) = make_slots("none", read_topology(), 1)
    with closing(RunProcess(run, slot, resume=False)) as process:
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now)
        now += 3_600  # a laptop slept, or the study and its runs were stopped
        process.check_hung(60)
        assert not process.kill_reason
        for _ in range(5):
            now += 11
            process.check_hung(60)
        assert process.kill_reason.startswith("hung: no new line in its logs for 60 s")
        monkeypatch.undo()


def test_a_failed_run_is_retried_from_its_snapshot(tmp_path: Path) -> None:
    assert study(tmp_path, "flaky", retries=1) == 0
    assert (tmp_path / "run_0/resumed").exists()
    assert record(tmp_path)["run_0"]["attempts"] == 2
    log = (tmp_path / "run_0.log").read_text()
    assert log.count("--- ") == 2
    assert log.count("resume=true") == 1


def test_a_failed_run_without_a_snapshot_restarts_and_is_reported_after_its_retries(tmp_path: Path) -> None:
    assert study(tmp_path, "no_snapshot", retries=2) == 1
    assert (states(tmp_path)["run_0"], record(tmp_path)["run_0"]["attempts"]) == ("failed", 3)
    assert sorted(path.name for path in tmp_path.glob(".run_0.*")) == [".run_0.1", ".run_0.2"]
    assert not list(tmp_path.rglob("resumed"))


def test_a_run_with_a_wrong_configuration_is_not_retried(tmp_path: Path) -> None:
    assert study(tmp_path, "refuse", retries=5) == 1
    assert record(tmp_path)["run_0"]["attempts"] == 1


def test_a_missing_command_is_reported_as_a_failure(tmp_path: Path) -> None:
    assert run_study(["/no/such/program"], [{}], [0], str(tmp_path)) == 1
    assert "/no/such/program cannot be started" in record(tmp_path)["run_0"]["reason"]


def test_repeating_the_command_skips_finished_runs(tmp_path: Path) -> None:
    assert study(tmp_path, "brief", "raise") == 1
    finished = (tmp_path / "do=brief/run_0/trace").read_text()
    assert study(tmp_path, "brief", "raise") == 1
    assert (tmp_path / "do=brief/run_0/trace").read_text() == finished
    assert record(tmp_path)["do=brief/run_0"]["attempts"] == 1
    assert record(tmp_path)["do=raise/run_0"]["attempts"] == 2


def test_a_study_grows_by_seeds_and_repeats_a_run_whose_directory_was_removed(tmp_path: Path) -> None:
    assert study(tmp_path, "brief", n_seeds=2) == 0
    (tmp_path / "run_1/trace").unlink()
    (tmp_path / "run_1/started").unlink()
    (tmp_path / "run_1").rmdir()
    assert study(tmp_path, "brief", n_seeds=3) == 0
    assert [entry["attempts"] for entry in record(tmp_path).values()] == [1, 2, 1]


def test_runs_of_an_earlier_command_that_never_started_are_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study(tmp_path, "brief") == 0
    content = json.loads((tmp_path / "experiment.json").read_text())
    (done,) = content["runs"]
    begun = {**done, "state": "waiting", "name": "run_7"}
    none = {**begun, "has_directory": False}
    content["runs"] += [begun, {**none, "name": "run_8", "attempts": 0}]
    content["runs"] += [
        {**none, "name": f"run_{9 + i}", "state": state} for i, state in enumerate(("interrupted", "failed"))
    ]
    (tmp_path / "experiment.json").write_text(json.dumps(content))
    assert study(tmp_path, "brief", n_seeds=2) == 0
    assert states(tmp_path) == {"run_0": "done", "run_7": "waiting", "run_10": "failed", "run_1": "done"}
    said = "2 runs of an earlier command never started and are not in this one, so the study does without: run_8 and 1"
    assert said in capsys.readouterr().out


def test_a_run_that_made_no_directory_begins_with_other_arguments(tmp_path: Path) -> None:
    assert study(tmp_path, "absent") == 1
    assert study(tmp_path, "brief") == 0
    assert record(tmp_path)["run_0"]["arguments"]["do"] == "brief"


def test_a_run_whose_directory_is_removed_while_it_goes_on_is_repeated(tmp_path: Path) -> None:
    assert study(tmp_path, "vanish") == 0
    assert study(tmp_path, "vanish") == 0
    assert record(tmp_path)["run_0"]["attempts"] == 2


def test_a_directory_of_another_study_or_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study(tmp_path / "one", "none") == 0
    before = (tmp_path / "one/experiment.json").read_bytes()
    assert study(tmp_path / "one", "brief") == 2
    assert "was started with other arguments: do=none, now brief; repeat" in capsys.readouterr().err
    assert (tmp_path / "one/experiment.json").read_bytes() == before
    (tmp_path / "two/run_0").mkdir(parents=True)
    (tmp_path / "two/run_0/progress.csv").touch()
    assert study(tmp_path / "two", "brief") == 2
    assert "run_0 is not empty" in capsys.readouterr().err


def test_variants_must_not_set_keys_of_the_queue(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_study(COMMAND, [{"seed": 3}], [0]) == 2
    assert "a variant sets seed" in capsys.readouterr().err
    assert run_study(COMMAND, [], [0]) == 2
    assert "at least one variant" in capsys.readouterr().err


def test_a_study_leaves_no_open_descriptors_or_processes(tmp_path: Path) -> None:
    def open_descriptors() -> set[tuple[str, str]]:
        """Their numbers and what they are of; objects of tests before this one may close theirs at any time."""
        found = set()
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # that of the listing itself
                found.add((number, os.readlink(f"/proc/self/fd/{number}")))
        return found

    assert study(tmp_path / "one", "none", n_seeds=2) == 0
    before, others = open_descriptors(), psutil.Process().children()  # those of tests before this one
    assert study(tmp_path / "two", "none", "raise", n_seeds=2) == 1
    assert open_descriptors() - before == set()
    assert [child for child in psutil.Process().children() if child not in others] == []


@contextmanager
def queue(log_dir: Path, do: str, n_seeds: int, n_ready: int, mark: str) -> Iterator[Popen]:
    """A queue of two slots, not pinned, in a process of its own, once `n_ready` runs have left `mark`."""
    program = [sys.executable, HERE, "queue", str(log_dir), f"{min(2, cpus_in_all())}cpu_1cpr", do, str(n_seeds)]
    with Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    ) as process:
        try:
            until(lambda: len(list(log_dir.glob(f"run_*/{mark}"))) >= n_ready, DEADLINE_S)
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def pids(log_dir: Path, *names: str) -> list[int]:
    paths = [path for name in names for path in log_dir.glob(f"run_*/{name}")]
    until(lambda: all(path.read_text() for path in paths), DEADLINE_S)  # a file exists before its content
    return [int(path.read_text()) for path in paths]


def test_ctrl_c_waits_for_snapshots_and_the_same_command_finishes_the_rest(tmp_path: Path) -> None:
    n_slots = min(2, cpus_in_all())
    with queue(tmp_path, "first_brief_then_polite", 4, n_slots, "ready") as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, output
    assert f"waiting for {n_slots} snapshot" in output
    assert "Traceback" not in output
    ended = {name: entry["state"] for name, entry in record(tmp_path).items()}
    assert [ended.pop("run_0"), *sorted(ended.values())] == [
        "done",
        *["interrupted"] * n_slots,
        *["waiting"] * (3 - n_slots),
    ]
    assert len(list(tmp_path.glob("run_*/snapshot"))) == n_slots
    for seed in range(4):  # so that waiting runs also end by themselves
        (tmp_path / f"run_{seed}/snapshot/step_000000000100").mkdir(parents=True, exist_ok=True)
    assert study(tmp_path, "first_brief_then_polite", n_seeds=4) == 0
    assert set(states(tmp_path).values()) == {"done"}
    assert [record(tmp_path)[f"run_{seed}"]["attempts"] for seed in range(3)] == [1, 2, n_slots]
    assert not (tmp_path / "run_0/resumed").exists()


def test_a_second_ctrl_c_kills_runs_that_do_not_stop(tmp_path: Path) -> None:
    with queue(tmp_path, "hang", 3, min(2, cpus_in_all()), "child") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        deadline = time.monotonic() + DEADLINE_S
        while "signal again to stop at once" not in process.stdout.readline():
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    for pid in pids(tmp_path, "started", "child"):
        until(lambda pid=pid: not is_running(pid))
    assert sorted(set(states(tmp_path).values())) == ["interrupted", "waiting"]


def test_no_run_survives_a_killed_queue_and_the_same_command_continues(tmp_path: Path) -> None:
    with queue(tmp_path, "hang", 3, min(2, cpus_in_all()), "child") as process:
        running = pids(tmp_path, "started", "child")
        assert running
        assert all(is_running(pid) for pid in running)
        process.kill()
        process.wait(DEADLINE_S)
        for pid in running:
            until(lambda pid=pid: not is_running(pid))
    assert "running" in states(tmp_path).values()
    (tmp_path / "go").touch()
    assert study(tmp_path, "hang", n_seeds=3) == 0
    assert {entry["state"] for entry in record(tmp_path).values()} == {"done"}


def test_a_study_has_one_queue_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with queue(tmp_path, "polite", 1, 1, "ready"):
        assert study(tmp_path, "polite") == 2
        assert "is in use by a study" in capsys.readouterr().err
