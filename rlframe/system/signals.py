"""Requests to stop a run, by a signal or a time limit, and deadlines. A second signal interrupts the current work."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlframe.core.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # sent to all processes of a terminal or job
OUT_OF_TIME = 1  # reason of a request by time limit; larger reasons are signals
GRACE = "RLFRAME_GRACE_S"  # environment variable of a queued run, for which the queue waits
_POLL_S, _GRACE_S = 0.25, 7.0
_AGAIN_S = 0.02  # until the destructor has ended


def _ignore(signum: int) -> None:
    """Default of `forward`."""


class StopRequest:
    """Whether this process should stop, because of a signal (`signum`, 0 for none) or a time limit."""

    def __init__(
        self, grace_s: float = math.inf, max_time_s: float = 0.0, forward: Callable[[int], None] = _ignore
    ) -> None:
        """Args:
        grace_s: seconds after the first signal before the work is interrupted as by a second one.
        max_time_s: time limit from now on; 0: none.
        forward: called with the first signal.
        """
        self.signum, self._forward = 0, forward
        self._grace_s, self._grace_ends_s = grace_s, math.inf
        self._ends_s = time.monotonic() + max_time_s if max_time_s else math.inf
        self._protected = 0

    def __bool__(self) -> bool:
        return self.reason() != 0

    def reason(self) -> int:
        """0 to continue, OUT_OF_TIME, or OUT_OF_TIME + signal; the maximum over ranks is the strongest reason."""
        if self.signum:
            return OUT_OF_TIME + self.signum
        return OUT_OF_TIME if time.monotonic() >= self._ends_s else 0

    @contextmanager
    def protect(self) -> Iterator[None]:
        """Suspend the grace period inside the block, for writing a snapshot, with which it begins anew."""
        self._protected += 1
        try:
            yield
        finally:
            if self.signum:  # else what follows the last snapshot would be interrupted where that took long
                self._grace_ends_s = time.monotonic() + self._grace_s
            self._protected -= 1

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            _leave_terminal()
        if not self.signum:
            self.signum, self._grace_ends_s = signum, time.monotonic() + self._grace_s
            self._forward(signum)
        elif signum != signal.SIGHUP:  # closing a terminal sends several
            late = time.monotonic() >= self._grace_ends_s
            how = f"no snapshot possible within {self._grace_s:g} s" if late else "stopped at once"
            raise Interrupted(self.signum if late else signum, f"{how}; training since the last snapshot is lost")

    def _enforce_grace(self, done: threading.Event, main: int) -> None:
        while not done.wait(_POLL_S):
            if self.signum and not self._protected and time.monotonic() >= self._grace_ends_s:
                signal.pthread_kill(main, signal.SIGTERM)
                return


@contextmanager
def stop_request(
    grace_s: float = math.inf, max_time_s: float = 0.0, forward: Callable[[int], None] = _ignore
) -> Iterator[StopRequest]:
    """Within the block, the first SIGINT, SIGTERM or SIGHUP sets the request; the second one raises `Interrupted`.

    An ignored SIGHUP (nohup) stays ignored. Only the time limit works outside the main thread.
    """
    request = StopRequest(grace_s, max_time_s, forward)
    _requests.append(request)
    try:
        yield from _handled(request, grace_s)
    finally:
        _requests.remove(request)


def snapshot_grace_s() -> float:
    """Seconds from a signal to the snapshot, within which the update or batch in progress must end."""
    return float(os.environ.get(GRACE, _GRACE_S))


_requests: list[StopRequest] = []  # of the blocks that this process is in


def asked_to_stop() -> bool:
    """Whether a signal asks this process to stop; those of a terminal also end the processes that it has started."""
    return any(request.signum for request in _requests)


def _handled(request: StopRequest, grace_s: float) -> Iterator[StopRequest]:
    """The request, which signals set meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    with handling(request._receive), _raised_again():
        done, main = threading.Event(), threading.get_ident()
        if math.isfinite(grace_s):
            threading.Thread(
                target=request._enforce_grace, args=(done, main), name="signal grace period", daemon=True
            ).start()
        try:
            yield request
        finally:
            done.set()


@contextmanager
def _raised_again() -> Iterator[None]:
    """Within the block, an Interrupted that is raised in a destructor, where Python drops it, is raised once more."""
    before, main = sys.unraisablehook, threading.get_ident()

    def again(signum: int) -> None:
        if sys.unraisablehook is hook:  # the block has not ended
            signal.pthread_kill(main, signum)

    def hook(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, Interrupted):
            threading.Timer(_AGAIN_S, again, (unraisable.exc_value.exit_status - 128,)).start()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def handling(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block, `receive` handles SIGNALS; an ignored SIGHUP stays ignored. Only works in the main thread."""
    handled = [signum for signum in SIGNALS if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, receive) for signum in handled}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class DeadlinePassed(BaseException):
    """The block of `deadline` took too long; no Exception, so that the code inside does not catch it by accident."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlinePassed in the block after `seconds`, in blocking calls too. Only works in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        raise DeadlinePassed

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, end)
    before, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, before - time.monotonic() + start) if before else 0.0)
        signal.signal(signal.SIGALRM, handler)


def _leave_terminal() -> None:
    """Redirect output to a closed terminal, where each write fails, to /dev/null."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
