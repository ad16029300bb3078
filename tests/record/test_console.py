"""What a run shows, on a terminal and without one."""

import errno
import io
import logging
import re
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from rlframe.record import console, logger_context
from rlframe.record.console import NotebookConsole, PlainConsole, format_duration, format_number
from rlframe.record.rich_console import LiveConsole

ROW = {
    "env_steps": 25_600,
    "updates": 40,
    "episode/return_mean": 132.41,
    "eval/return_mean": float("nan"),
    "algo/value_loss": 0.012345,
    "estimate/fqe": 41.5,
    "estimate/fqe_low": 40.5,
    "algo/grad_norm": 3.0,
    "time/env_steps_per_s": 12_345.4,
}


def test_a_plain_line_has_the_key_metrics_speed_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(console, "perf_counter", lambda: now[0])
    plain = PlainConsole()
    plain.progress(0, 51_200)
    now[0] += 12.0
    plain.write(ROW)
    assert capsys.readouterr().out == (
        "env_steps 25,600 | episode/return_mean 132.4 | estimate/fqe 41.50 | algo/value_loss 0.01235 | 12,345 steps/s "
        "| 00:12 left\n"
    )


def test_progress_alone_prints_a_plain_line_after_each_half_a_minute_without_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(console, "perf_counter", lambda: now[0])
    plain = PlainConsole()
    for now[0] in range(80):
        if now[0] == 40:
            plain.write({"env_steps": 40})
        plain.progress(now[0], 100)
    plain.close()
    steps = [line.partition(" |")[0] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["env_steps 30", "env_steps 40", "env_steps 70"]


def test_time_left_of_a_resumed_run_counts_from_where_it_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console, "perf_counter", lambda: now[0])
    pace = console.Pace()
    pace.n_steps = 1_000
    pace.update(800)
    now[0] = 10.0
    pace.update(900)
    assert pace.per_s() == 10.0
    assert pace.time_left() == "00:10 left"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (25_600, "25,600"),
            (132.41, "132.4"),
            (0.0123456, "0.01235"),
            (3e-5, "3.000e-05"),
            (0.0, "0"),
            (500.0, "500"),
        ),
        *(
            (12_345.6, "12,346"),
            (-0.5, "-0.5000"),
            (float("nan"), "nan"),
            (float("-inf"), "-inf"),
            (2.5e9, "2.500e+09"),
        ),
        (9.9999, "10.000"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


def test_durations_are_read_at_a_glance() -> None:
    assert [format_duration(s) for s in (12, 59.6, 3_723, 180_000)] == ["00:12", "01:00", "1:02:03", "2d 02:00:00"]


def terminal(width: int = 120) -> RichConsole:
    return RichConsole(file=io.StringIO(), force_terminal=True, width=width, height=50, color_system=None)


def shown(screen: RichConsole) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_the_table_has_groups_values_changes_and_the_bar() -> None:
    screen = terminal()
    table = LiveConsole("runs/[x]/run_0", screen)
    table.progress(0, 51_200)
    table.write(ROW)
    table.write(ROW | {"env_steps": 51_200, "episode/return_mean": 152.41, "env/weird[red]name": 1.0})
    table.close()
    last = shown(screen).rpartition("╭")[2]
    for text in (
        "runs/[x]/run_0",
        "episode",
        "152.4",
        "▲ 20",
        "weird[red]name",
        "100%",
        "51,200 / 51,200 env_steps",
    ):
        assert text in last


def test_a_run_that_learns_from_data_alone_counts_its_updates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = terminal()
    row = {"env_steps": 0, "updates": 5_000, "time/env_steps_per_s": 0.0, "time/updates_per_s": 812.3}
    for each in (LiveConsole("run", screen), PlainConsole()):
        each.progress(0, 100_000, "updates")
        each.write(row)
        each.close()
    assert "5,000 / 100,000 updates" in shown(screen)
    assert "812 updates/s" in shown(screen)
    assert "updates 5,000 | 812 updates/s" in capsys.readouterr().out
    plain = PlainConsole()
    monkeypatch.setattr(console, "_SILENCE_S", 0.0)
    plain.progress(6_000, 100_000, "updates")
    assert capsys.readouterr().out.startswith("updates 6,000")


def test_a_notebook_shows_the_bar_before_the_first_row_as_in_a_resumed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    NotebookConsole().progress(5, 100)
    assert [data["text/plain"] for data in shown] == ["5%, 5 / 100 env_steps"]


def test_a_metric_that_is_not_in_a_row_keeps_its_value() -> None:
    screen = terminal()
    table = LiveConsole("run", screen)
    table.write({"env_steps": 1, "eval/return_mean": 475.25})
    table.write({"env_steps": 2, "algo/value_loss": 1.0})
    table.close()
    assert "475.2" in shown(screen).rpartition("╭")[2]


def test_the_bar_moves_at_most_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawn = [0.0], []
    monkeypatch.setattr(console, "perf_counter", lambda: now[0])
    table = LiveConsole("run", terminal())
    monkeypatch.setattr(table._live, "update", lambda *_, **__: drawn.append(now[0]))
    for step in range(1_000):
        now[0] = step / 1_000
        table.progress(step, 1_000)
    table.close()
    assert 3 <= len(drawn) - 1 <= 4


def test_a_message_is_printed_as_it_is() -> None:
    screen = terminal()
    table = LiveConsole("run", screen)
    table.message("worker [red]3[/red] is ready")
    table.close()
    assert "worker [red]3[/red] is ready\n" in shown(screen)


@pytest.mark.parametrize(("width", "n_columns"), [(40, 1), (80, 1), (100, 2), (200, 4)])
def test_the_table_fits_a_terminal_of_any_width(width: int, n_columns: int) -> None:
    screen = terminal(width)
    table = LiveConsole("run", screen)
    table.write(ROW)
    table.close()
    lines = shown(screen).rpartition("╭")[2].splitlines()
    assert {len(line) for line in lines[1:-1]} == {width}
    for name, number in (("value_loss", "0.01235"), ("return_mean", "132.4"), ("env_steps_per_s", "12,345")):
        assert any(re.search(rf"\b{name} +{number}\b", line) for line in lines), "nothing is cut off"
    groups = {"run", "episode", "eval", "algo", "estimate", "time"}
    assert max(len(groups.intersection(line.split())) for line in lines[1:]) == n_columns, "as many as fit"


def test_what_the_encoding_of_the_output_lacks_is_printed_with_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", printed)
    PlainConsole().message("caf\xe9")
    assert printed.buffer.getvalue() == b"caf\\xe9\n"  # type: ignore[attr-defined]


class Full(io.StringIO):
    """Standard output in a file of a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_under_standard_output_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", Full())
    with logger_context(tmp_path, snapshot_errors="continue", loggers=[]) as run:
        logging.getLogger("rlframe").info("a message")
        for step in (1, 2):
            run.log({"env_steps": step})
    assert len((run.directory / "progress.csv").read_text().splitlines()) == 3
