"""Being asked to stop: by a signal, politely the first time and at once the second, or by the end of the time given."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlframe.core.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OUT_OF_TIME = 1  # what a request answers when the time is over; above it are signals
_LOOK_S = 0.25


def _nobody(signum: int) -> None:
    """There is nobody to tell."""


class StopRequest:
    """Whether somebody asked this process to stop, and by which signal (0: nobody)."""

    def __init__(
        self, grace_s: float = math.inf, max_time_s: float = 0.0, pass_on: Callable[[int], None] = _nobody
    ) -> None:
        """Args:
        grace_s: after the first signal, before its work is broken in upon as by a second one.
        max_time_s: from now, after which the request answers that the time is over; 0: never.
        pass_on: tells others of the first signal.
        """
        self.signum, self._pass_on = 0, pass_on
        self._grace_s, self._insists_s = grace_s, math.inf
        self._ends_s = time.monotonic() + max_time_s if max_time_s else math.inf
        self._protected = 0

    def __bool__(self) -> bool:
        return self.reason() != 0

    def reason(self) -> int:
        """0: go on; OUT_OF_TIME; or OUT_OF_TIME + the signal: so that the largest of several is what counts most."""
        if self.signum:
            return OUT_OF_TIME + self.signum
        return OUT_OF_TIME if time.monotonic() >= self._ends_s else 0

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside, the grace does not end: what is written here is worth more than the seconds it takes."""
        self._protected += 1
        try:
            yield
        finally:
            self._protected -= 1

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            _leave_terminal()
        if not self.signum:
            self.signum, self._insists_s = signum, time.monotonic() + self._grace_s
            self._pass_on(signum)
        elif signum != signal.SIGHUP:  # which one closed terminal sends several times
            late = time.monotonic() >= self._insists_s
            how = f"nowhere to save from within {self._grace_s:g} s" if late else "stopped at once"
            raise Interrupted(
                self.signum if late else signum, f"{how}; what was learned since the last snapshot is lost"
            )

    def _insist(self, done: threading.Event, main: int) -> None:
        """A thread's life: once the grace is over, send a second signal."""
        while not done.wait(_LOOK_S):
            if self.signum and not self._protected and time.monotonic() >= self._insists_s:
                signal.pthread_kill(main, signal.SIGTERM)
                return


@contextmanager
def stop_request(
    grace_s: float = math.inf, max_time_s: float = 0.0, pass_on: Callable[[int], None] = _nobody
) -> Iterator[StopRequest]:
    """Inside, SIGINT, SIGTERM and SIGHUP set the request instead of breaking in; the second one raises `Interrupted`.

    A SIGHUP that is ignored, as under nohup, stays so. Outside the main thread, where Python delivers no signals, only
    the time can set the request. The arguments are those of `StopRequest`.
    """
    request = StopRequest(grace_s, max_time_s, pass_on)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    heard = [signum for signum in SIGNALS if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, request._receive) for signum in heard}
    done = threading.Event()
    if math.isfinite(grace_s):
        watch = threading.Thread(
            target=request._insist, args=(done, threading.get_ident()), name="grace of a signal", daemon=True
        )
        watch.start()
    try:
        yield request
    finally:
        done.set()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _leave_terminal() -> None:
    """Let output that would go to a terminal that is gone, where each write is an error, go nowhere."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
