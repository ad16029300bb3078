"""The time of each part of the training loop, and throughput."""

import pytest

from rlframe.record.timers import Timers


class Clock:
    """A clock that stands still between calls of `wait`."""

    now = 100.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the timers of a test read."""
    found = Clock()
    monkeypatch.setattr("rlframe.record.timers.perf_counter", lambda: found.now)
    return found


def test_evaluation_does_not_count_in_throughput(clock: Clock) -> None:
    timers = Timers()
    timers.begin(1_000, 0)
    with timers("sampling"):
        clock.wait(2.0)
    with timers("evaluating"):
        clock.wait(6.0)
    row = timers.flush(1_100, 4)
    assert (row["time/env_steps_per_s"], row["time/updates_per_s"], row["time/elapsed_s"]) == (50.0, 2.0, 8.0)
    assert (row["time/fraction_sampling"], row["time/fraction_evaluating"]) == (0.25, 0.75)


def test_a_part_inside_another_is_not_counted_twice(clock: Clock) -> None:
    timers = Timers()
    with timers("learning"):
        clock.wait(1.0)
        with timers("evaluating"):
            clock.wait(4.0)
    clock.wait(3.0)
    fractions = timers.fractions()
    assert (fractions["time/fraction_learning"], fractions["time/fraction_evaluating"]) == (0.125, 0.5)


def test_a_part_that_raises_is_counted_and_closed(clock: Clock) -> None:
    timers = Timers()

    def wait_and_fail() -> None:
        clock.wait(2.0)
        raise KeyError

    with pytest.raises(KeyError), timers("sampling"):
        wait_and_fail()
    with timers("learning"):
        clock.wait(6.0)
    fractions = timers.fractions()
    assert (fractions["time/fraction_sampling"], fractions["time/fraction_learning"]) == (0.25, 0.75)


def test_a_new_interval_starts_at_zero_and_elapsed_includes_time_before_a_resume(clock: Clock) -> None:
    timers = Timers(elapsed_s=100.0)
    with timers("sampling"):
        clock.wait(5.0)
    assert timers.flush(10, 1)["time/elapsed_s"] == 105.0
    assert timers.fractions()["time/fraction_sampling"] == 0.0
    assert timers.flush(10, 1)["time/env_steps_per_s"] == 0.0
