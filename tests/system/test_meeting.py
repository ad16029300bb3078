"""Meeting: threads that run one at a time and meet."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlframe.system.meeting import Meeting, NotTogether

DEADLINE_S = 20.0


def results_of(bodies: Sequence[Callable[[Meeting, int], Any]]) -> list[Any]:
    """What each body returned, or the exception that ended it."""
    meeting, found = Meeting(len(bodies)), [None] * len(bodies)

    def run(seat: int) -> None:
        meeting.begin(seat)
        try:
            found[seat] = bodies[seat](meeting, seat)
        except Exception as error:
            found[seat] = error
        meeting.leave(seat)

    threads = [threading.Thread(target=run, args=(seat,), daemon=True) for seat in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)
    return found


def squares(brought: Sequence[Any]) -> list[Any]:
    return [x and x * x for x in brought]


def test_each_gets_its_own_result_of_what_all_brought() -> None:
    assert results_of([lambda m, s: m.meet(s, "square", s + 2, squares)] * 3) == [4, 9, 16]


def test_the_others_meet_without_one_that_has_left() -> None:
    def twice(meeting: Meeting, seat: int) -> list[int]:
        return [meeting.meet(seat, "square", n, squares) for n in (2, 3)]

    def once(meeting: Meeting, seat: int) -> int:
        return int(meeting.meet(seat, "square", 5, squares))

    assert results_of([twice, once, twice]) == [[4, 9], 25, [4, 9]]


def test_none_is_together_with_others_that_came_for_something_else() -> None:
    found = results_of([lambda m, s: m.meet(s, s, 1, squares)] * 2)
    assert [type(each) for each in found] == [NotTogether, NotTogether]


def test_an_error_of_the_common_work_is_raised_in_all() -> None:
    found = results_of([lambda m, s: m.meet(s, "square", "text", squares)] * 2)
    assert [type(each) for each in found] == [TypeError, TypeError]


def test_one_thread_runs_at_a_time_in_turn() -> None:
    order: list[int] = []

    def body(meeting: Meeting, seat: int) -> None:
        for _ in range(2):
            order.append(seat)
            time.sleep(0.01)  # another thread that ran would be next in the list
            order.append(seat)
            meeting.meet(seat, "square", 1, squares)

    results_of([body] * 3)
    turns = order[::2]
    assert order[1::2] == turns, "one at a time"
    assert sorted(turns[:3]) == sorted(turns[3:]) == [0, 1, 2]
