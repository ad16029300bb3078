"""A ring of slots of shared memory that a child process fills ahead of its parent, who empties them in order.

What carries them are the child's commands: a free slot is a command that is begun, a filled one a command that is
done. So whoever has no slot sleeps until there is one, a child that is ahead is held back, a death or a hang shows in
the wait, and no slot is passed over. Handing one over costs what a command does (see benchmarks/handover.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlframe.core.errors import ConfigError
from rlframe.core.struct import Tree, zeros_like
from rlframe.system.process import SLICE_S, Child
from rlframe.system.shared import share
from rlframe.system.worker_main import Handler

FILL = 0  # the command


class Ring:
    """The parent's side. `memory` is to be handed over to the child before `start`; `slots` are its trees of arrays."""

    def __init__(self, example: Tree, n_slots: int, label: str) -> None:
        """Slots of zeros with the shapes and dtypes of `example`.

        Raises:
            ConfigError: there is no slot, or not that much memory.
        """
        if n_slots < 1:
            raise ConfigError(f"n_slots={n_slots} must be at least 1")
        one = zeros_like(example, ())
        self.memory = share({"slots": (one,) * n_slots, "filled": np.zeros(1, np.int64)}, label)
        self.slots: tuple[Tree, ...] = self.memory.tree["slots"]
        self._filled = self.memory.tree["filled"]  # slots by this child so far
        self._taken = 0  # of those
        self._holds = False

    def start(self, child: Child) -> None:
        """Let a child that has done nothing yet fill all slots: the first one, or another in place of one that died.

        What that one had filled and nobody has taken is lost.
        """
        self._child, self._taken, self._holds = child, 0, False
        self._filled[0] = 0
        for _ in self.slots:
            child.begin_another(FILL)

    @property
    def n_ready(self) -> int:
        """Slots that are filled and not yet taken; looking costs nothing."""
        return int(self._filled[0]) - self._taken

    def take(self, timeout_s: float) -> int:
        """The index of the slot that was filled first; it stays as it is until the next `take`, which gives it back.

        Args:
            timeout_s: without a sign of life of the child, after which it is taken for hung and killed.
        Raises:
            ChildDied: it died, and all that it had filled has been taken.    ChildHung: likewise, killed by us.
            The work's own exception: it raised.
        """
        if self._holds:
            self._holds = False
            self._child.begin_another(FILL)
        while not (self._child.wait(SLICE_S) or self._child.check(SLICE_S, timeout_s)):
            pass
        if not self.n_ready:  # a failure ends a command too
            self._child.receive(timeout_s)
        self._taken, self._holds = self._taken + 1, True
        return (self._taken - 1) % len(self.slots)


def filling(memory: Tree, fill: Callable[[Tree], None]) -> Handler:
    """The child's side: what carries out the command FILL, by `fill(slot)`, in the memory that it was handed."""
    slots, filled = memory["slots"], memory["filled"]

    def handle(command: int, argument: int) -> None:
        fill(slots[int(filled[0]) % len(slots)])
        filled[0] += 1

    return handle
