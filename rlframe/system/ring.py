"""A ring of shared-memory slots that a child process fills ahead of its parent, which reads them in order.

Slots are passed by the child's commands: a free slot is a queued command, a filled one a finished command. Waiting
therefore sleeps, a full ring blocks the child, and a death or hang is noticed. See benchmarks/handover.py for the cost.
"""

from collections.abc import Callable

import numpy as np

from rlframe.core.errors import ConfigError
from rlframe.core.struct import Tree, zeros_like
from rlframe.system.process import SLICE_S, ChildProcess
from rlframe.system.shared import share_zeros
from rlframe.system.worker_main import Handler

FILL = 0  # the command


class BatchRing:
    """The parent's side. Send `memory` to the child before `start`; `slots` are its trees of arrays."""

    def __init__(self, example: Tree, n_slots: int, label: str) -> None:
        """Create slots of zeros with the shapes and dtypes of `example`, or raise ConfigError if memory is short."""
        if n_slots < 1:
            raise ConfigError(f"n_slots={n_slots} must be at least 1")
        one = zeros_like(example, ())
        self.memory = share_zeros({"slots": (one,) * n_slots, "filled": np.zeros(1, np.int64)}, label)
        self.slots: tuple[Tree, ...] = self.memory.tree["slots"]
        self._filled = self.memory.tree["filled"]  # slots filled by this child so far
        self._taken = 0  # and read by the parent
        self._holds = False
        self._waited = False  # for a slot that `get` has not returned yet

    def start(self, child: ChildProcess) -> None:
        """Let a new child fill all slots. Slots that a previous child filled and `get` has not returned are lost."""
        self._child, self._taken, self._holds, self._waited = child, 0, False, False
        self._filled[0] = 0
        for _ in self.slots:
            child.queue_command(FILL)

    @property
    def n_ready(self) -> int:
        """Filled slots that `get` has not returned yet."""
        return int(self._filled[0]) - self._taken

    @property
    def is_full(self) -> bool:
        """Whether the child has no slot to fill."""
        return self.n_ready + self._holds >= len(self.slots)

    def free(self) -> None:
        """Let the child fill the slot of `get`."""
        if self._holds:
            self._holds = False
            self._child.queue_command(FILL)

    def free_if_single(self) -> None:
        """The same, if there is no other: the child would stand still, and with others it would be further ahead."""
        if len(self.slots) == 1:
            self.free()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to SLICE_S seconds for a filled slot, and return whether there is one; frees the slot of `get`.

        Raises as `ChildProcess.check` with this timeout, once all filled slots are read.
        """
        self.free()
        if not self._waited:
            self._waited = self._child.wait(SLICE_S) or self._child.check(SLICE_S, timeout_s)
        return self._waited

    def get(self, timeout_s: float) -> int:
        """The index of the oldest filled slot. It stays valid until the next `wait` or `get`.

        Raises as `wait`, which it repeats.
        """
        while not self.wait(timeout_s):
            pass
        self._waited = False
        if not self.n_ready:  # a failure also ends the command
            self._child.receive(timeout_s)
        self._taken, self._holds = self._taken + 1, True
        return (self._taken - 1) % len(self.slots)


def fill_handler(memory: Tree, fill: Callable[[Tree], None]) -> Handler:
    """The child's side: a handler of the command FILL that calls `fill(slot)` on the received memory."""
    slots, filled = memory["slots"], memory["filled"]

    def handle(command: int, argument: int) -> None:
        fill(slots[int(filled[0]) % len(slots)])
        filled[0] += 1

    return handle
