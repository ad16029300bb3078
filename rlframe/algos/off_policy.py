"""What off-policy algorithms share: the replay ratio, priorities, target networks, saved generators."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor, nn

from rlframe.algos.base import Progress
from rlframe.core.errors import ConfigError
from rlframe.core.ranks import current_ranks
from rlframe.models import ModelConfig

_MOST_BATCHES = 8  # whose updates are carried over
PRIORITY_EPSILON = 1e-6  # added to priorities, so that every row may be drawn again (Schaul et al. 2016, section 3.3)


class ReplayRatio:
    """Counts the updates that are due: each env_step calls for `replay_ratio / batch_size` of one, exactly.

    Counting starts at `learn_from` env_steps: earlier rows are learned from, but call for no update. An update takes
    batch_size rows on every rank, each from its own replay, and env_steps count over all ranks, so each env_step calls
    for 1 / world_size of that, and the same number is due on all ranks.
    If batches keep coming faster than updates are made (AsyncRl), updates for more than 8 batches are dropped and
    counted: they would only be made later, all at once, on data that has hardly changed.
    """

    def __init__(self, replay_ratio: float, batch_size: int, learn_from: int) -> None:
        """Args:
            replay_ratio: rows learned from for each row received.    batch_size: rows of an update, of each rank.
            learn_from: env_steps, over all ranks, before the first update.
        Raises:
            ValueError: a number out of range.
        """
        if replay_ratio <= 0 or batch_size < 1 or learn_from < 0:
            raise ValueError(
                f"algo.replay_ratio={replay_ratio} must be above 0, algo.batch_size={batch_size} at least 1 and "
                f"algo.learn_from={learn_from} at least 0"
            )
        self.ranks, self.ready = current_ranks(), False  # ready: every rank has rows to sample
        self.batch_size, self.learn_from = batch_size * self.ranks.world_size, learn_from
        rate = Fraction(replay_ratio).limit_denominator(10**6) / self.batch_size  # updates an env_step
        self._share, self._whole = rate.as_integer_ratio()  # counts are integers: parts of which _whole are an update
        self._pending = self._dropped = 0

    def receive(self, before: int, after: int) -> None:
        """Count the env_steps of a batch: so many had come before it, so many after it."""
        more = self._share * max(after - max(before, self.learn_from), 0)
        if self.ready:  # else updates were impossible, not too slow
            dropped = max(self._pending - _MOST_BATCHES * max(more, self._whole), 0)
            self._pending -= dropped
            self._dropped += dropped
        self._pending += more

    def due(self, n_choices: int = 1) -> int:
        """Whole updates that are due; 0 before every rank has rows to sample (`n_choices` in this one's replay)."""
        due = self._pending // self._whole
        if due and not self.ready:
            self.ready = self.ranks.every(n_choices > 0)
        return due if self.ready else 0

    def count_update(self) -> None:
        """An update was made."""
        self._pending -= self._whole

    def drop(self) -> None:
        """Drop all pending updates."""
        self._dropped, self._pending = self._dropped + self._pending, 0

    @property
    def pending(self) -> Fraction:
        """Updates called for and not made yet."""
        return Fraction(self._pending, self._whole)

    @property
    def dropped(self) -> Fraction:
        """Updates dropped."""
        return Fraction(self._dropped, self._whole)

    def reached(self, progress: Progress) -> float:
        """Rows learned from so far for each env_step since learning began; 0 before."""
        counted = progress.env_steps - self.learn_from
        return progress.updates * self.batch_size / counted if counted > 0 else 0.0

    def counters(self, progress: Progress) -> dict[str, float]:
        """The ratio reached and the updates dropped, for the log."""
        dropped = {"replay/forgone": float(self.dropped)} if self._dropped else {}
        return {"replay/ratio": self.reached(progress), **dropped}

    def state_dict(self) -> dict[str, list[int]]:
        """Both counts, exactly."""
        return {"pending": list(self.pending.as_integer_ratio()), "dropped": list(self.dropped.as_integer_ratio())}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Continue from saved counts."""
        self._pending, self._dropped = (int(Fraction(*state[name]) * self._whole) for name in ("pending", "dropped"))


def priorities(error: Tensor) -> Tensor:
    """Priorities [n] from the size of errors [n]; the lowest one for rows whose error is NaN or Inf."""
    return error.nan_to_num(nan=0.0, posinf=0.0) + PRIORITY_EPSILON


@torch.no_grad()
def copy_into(target: nn.Module, online: nn.Module) -> None:
    """Make a target network equal to the online one, statistics and noise included."""
    torch._foreach_copy_([*target.parameters(), *target.buffers()], [*online.parameters(), *online.buffers()])


@torch.no_grad()
def soft_update(targets: list[nn.Parameter], onlines: list[nn.Parameter], tau: float) -> None:
    """target <- (1 - tau) target + tau online, all parameters at once (Lillicrap et al. 2016, algorithm 1)."""
    torch._foreach_lerp_(targets, onlines, tau)  # type: ignore[arg-type]  # which takes lists of tensors


def check_feedforward(model: ModelConfig, algo: str, other: str) -> None:
    """Raises:
    ConfigError: the model has memory, which `algo` does not train.
    """
    if model.memory != "none":
        raise ConfigError(f"model.memory={model.memory}: {algo} learns from single rows; use {other} or memory=none")


def load_generator(rng: torch.Generator, state: Tensor) -> None:
    """Set a generator to a saved state; if that is of another kind of device, to one that follows from it."""
    if state.numel() == rng.get_state().numel():
        rng.set_state(state.cpu())
    else:
        digest = hashlib.blake2b(state.cpu().numpy().tobytes(), digest_size=8).digest()
        rng.manual_seed(int.from_bytes(digest, "little") >> 1)
