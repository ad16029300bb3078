"""A ring of slots: order, blocking when full, and deaths of the child."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rlframe.core.errors import ConfigError
from rlframe.system.process import ChildDied, ChildHung, ChildProcess
from rlframe.system.ring import BatchRing, fill_handler
from rlframe.system.worker_main import PROGRESS, ParentLink
from tests.processes import is_running, until

PATIENT_S = 60.0


def work(parent: ParentLink, fill: Callable[[Any], None]) -> None:
    """Say that it is there, then fill slots until told to stop."""
    parent.send("here")
    parent.serve(fill_handler(parent.receive_memory().tree, fill))


def counting(fault: Callable[[int], None] = lambda number: None) -> Callable[[Any], None]:
    """Fills slots with 0, 1, 2 ...; before each, `fault` may do something."""
    numbers = iter(range(10**9))

    def fill(slot: Any) -> None:
        number = next(numbers)
        fault(number)
        slot["number"][...] = number

    return fill


@contextmanager
def ring_for(n_slots: int, fill: Callable[[Any], None]) -> Iterator[tuple[BatchRing, ChildProcess]]:
    """A ring and the child that fills it, of which nothing is left in the end."""
    ring = BatchRing({"number": np.zeros(3, np.int64)}, n_slots, "test")
    child = started(ring, fill)
    try:
        yield ring, child
    finally:
        child.stop()
        child.close(5.0)
        ring.memory.close()
        until(lambda: not is_running(child.pid))


def started(ring: BatchRing, fill: Callable[[Any], None]) -> ChildProcess:
    child = ChildProcess("filler", work, (fill,))
    child.send_memory(ring.memory)
    assert child.receive(PATIENT_S) == "here"
    ring.start(child)
    return child


def taken(ring: BatchRing, n: int, timeout_s: float = PATIENT_S) -> list[int]:
    """The numbers of the next n slots, each the same in all of its slot."""
    found = []
    for _ in range(n):
        slot = ring.slots[ring.get(timeout_s)]["number"]
        assert len(set(slot.tolist())) == 1
        found.append(int(slot[0]))
    return found


@pytest.mark.parametrize("n_slots", [1, 2, 5])
def test_slots_are_returned_in_order_without_gaps(n_slots: int) -> None:
    with ring_for(n_slots, counting()) as (ring, _):
        assert taken(ring, 200) == list(range(200))


def test_a_child_waits_while_all_slots_are_filled_or_in_use() -> None:
    with ring_for(3, counting()) as (ring, child):
        until(lambda: ring.n_ready == 3, PATIENT_S)
        index = ring.get(PATIENT_S)
        start = time.monotonic()
        until(lambda: time.monotonic() - start > 0.2)
        assert ring.n_ready == 2, "the third is ours until the next take"
        assert ring.slots[index]["number"].tolist() == [0, 0, 0]
        busy_s = child.busy_s
        until(lambda: time.monotonic() - start > 0.4)
        assert child.busy_s == busy_s, "who waits does not compute"
        assert taken(ring, 5) == [1, 2, 3, 4, 5]


def test_slots_filled_before_a_death_are_returned_before_the_error() -> None:
    def die(number: int) -> None:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with ring_for(4, counting(die)) as (ring, _):
        assert taken(ring, 2) == [0, 1]
        start = time.monotonic()
        with pytest.raises(ChildDied, match="SIGKILL"):
            ring.get(PATIENT_S)
        assert time.monotonic() - start < 30.0


def test_another_child_fills_all_slots_after_a_death() -> None:
    def die(number: int) -> None:
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    with ring_for(3, counting(die)) as (ring, _):
        with pytest.raises(ChildDied):
            taken(ring, 6)
        other = started(ring, counting())
        try:
            assert taken(ring, 10) == list(range(10))
        finally:
            other.stop()
            other.close(5.0)


def test_slots_filled_before_an_exception_are_returned_before_it() -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise ValueError("no third slot")

    with ring_for(2, counting(fail)) as (ring, _):
        assert taken(ring, 2) == [0, 1]
        with pytest.raises(ValueError, match="no third slot"):
            ring.get(PATIENT_S)


def test_a_slow_child_with_progress_is_not_killed() -> None:
    def work_slowly(parent: ParentLink, n_steps: int) -> None:
        def fill(slot: Any) -> None:
            for step in range(n_steps):
                time.sleep(0.2)
                parent.control[PROGRESS] = step

        work(parent, fill)

    ring = BatchRing(np.zeros(1), 1, "test")
    child = ChildProcess("slow", work_slowly, (10,))
    child.send_memory(ring.memory)
    assert child.receive(PATIENT_S) == "here"
    ring.start(child)
    assert ring.get(1.5) == 0
    child.stop()
    child.close(5.0)


def test_a_child_that_hangs_is_killed_after_its_deadline() -> None:
    def hang(number: int) -> None:
        while number:
            time.sleep(0.05)

    with ring_for(1, counting(hang)) as (ring, child):
        assert taken(ring, 1) == [0]
        with pytest.raises(ChildHung, match="in hang"):
            ring.get(1.0)
        until(lambda: not child.alive)


def test_a_ring_without_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_slots=0 must be at least 1"):
        BatchRing(np.zeros(1), 0, "test")
