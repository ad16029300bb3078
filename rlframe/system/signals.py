"""Being asked to stop: the first SIGINT or SIGTERM asks politely, the second ends the process's work at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rlframe.core.errors import Interrupted


class StopRequest:
    """Whether somebody asked this process to stop, and by which signal (0: nobody)."""

    def __init__(self) -> None:
        self.signum = 0

    def __bool__(self) -> bool:
        return self.signum != 0

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.signum:
            raise Interrupted(signum, "stopped at once; what was learned since the last snapshot is lost")
        self.signum = signum


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Inside, SIGINT and SIGTERM set the request instead of breaking in; the second one raises `Interrupted`.

    Outside the main thread, where Python delivers no signals, the request is simply never set.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {signum: signal.signal(signum, request._receive) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
