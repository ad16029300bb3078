"""Target networks: when they move, and how."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlframe.updates.progress import Progress


class TargetMoves:
    """When target networks move: every so many updates, or at the first update after every `steps` env_steps.

    env_steps count over all ranks. A runner that counts in updates (OfflineRl) has those for env_steps.
    """

    def __init__(self, steps: int, progress: Progress) -> None:
        """`steps`: 0 counts updates."""
        self.steps, self.progress = steps, progress
        self.last = 0  # env_steps at the last move

    def turn(self, interval: int) -> bool:
        """Whether the update that follows moves them, which then counts as a move; `interval`: in updates."""
        if not self.steps:
            return is_due(self.progress.updates, interval)
        now = self.progress.clock
        due = now // self.steps != self.last // self.steps  # less, if a sampler follows after learning from data
        self.last = now if due else self.last
        return due

    def state_dict(self) -> dict[str, int]:
        """When they moved last."""
        return {"last": self.last}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved state."""
        self.last = state["last"]


def is_due(updates: int, interval: int) -> bool:
    """Whether the update that follows so many is one of every `interval`: a step of the policy, or of the targets."""
    return (updates + 1) % interval == 0


@torch.no_grad()
def copy_statistics(target: nn.Module, online: nn.Module) -> None:
    """Give a target network the statistics and noise of the online one."""
    for place, buffer in zip(target.buffers(), online.buffers(), strict=True):
        place.copy_(buffer)


@torch.no_grad()
def copy_into(target: nn.Module, online: nn.Module, tau: float = 1.0) -> None:
    """Make a target network equal to the online one, statistics and noise included.

    With tau < 1 the parameters move only that far: target <- (1 - tau) target + tau online.
    """
    if tau < 1:
        soft_update([*target.parameters()], [*online.parameters()], tau)
        copy_statistics(target, online)
    else:
        torch._foreach_copy_([*target.parameters(), *target.buffers()], [*online.parameters(), *online.buffers()])


@torch.no_grad()
def soft_update(targets: list[Tensor], onlines: list[Tensor], tau: float | Tensor) -> None:
    """target <- (1 - tau) target + tau online, all tensors at once (Lillicrap et al. 2016, algorithm 1)."""
    if not targets:  # of critics without
        return
    if isinstance(tau, Tensor):  # on a GPU, where the kernel for numbers would wait for it
        moves = torch._foreach_mul(torch._foreach_sub(onlines, targets), tau)
        torch._foreach_add_(targets, moves)
    else:
        torch._foreach_lerp_(targets, onlines, tau)
