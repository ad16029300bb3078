"""How many deaths of processes a run bears: so many within an hour, and few in a row that came to nothing."""

from __future__ import annotations

import time
from collections import deque

_WINDOW_S = 3600.0
_FRUITLESS = 5  # deaths in a row of one process without anything done
_BACK_OFF_S = 0.1  # before the second fruitless start in a row; doubled each time


class Restarts:
    """Counts the processes that replaced one that died. `n` is their number since the start."""

    def __init__(self, most: int, field: str, who: str, what: str) -> None:
        """Args:
        most: within an hour.    field: the setting that says so.    who: of them, in the plural.
        what: the least that each is expected to finish.
        """
        self.n = 0
        self._most, self._field, self._who, self._what = most, field, who, what
        self._recent: deque[float] = deque()  # when they were, within the window

    def objection(self, fruitless: int) -> str:
        """Count a death, the `fruitless`th in a row with nothing done; why no other process may follow, or nothing."""
        self.n += 1
        now = time.monotonic()
        self._recent.append(now)
        while self._recent[0] < now - _WINDOW_S:
            self._recent.popleft()
        if fruitless >= _FRUITLESS:
            return f"so it did {fruitless} times in a row without finishing {self._what}"
        if len(self._recent) > self._most:
            return f"that were {len(self._recent)} deaths of {self._who} within an hour, and {self._field}={self._most}"
        return ""

    def back_off(self, fruitless: int) -> None:
        """Wait a little before a start that may be as vain as the last."""
        if fruitless > 1:
            time.sleep(_BACK_OFF_S * 2.0 ** (fruitless - 2))
