"""Players of known strength for matches and evaluations: functions of (observation, action_space, rng)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space

from rlframe.core.spaces import ACTION_MASK

_IN_A_ROW = 4
_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))


def connect_four_one_ply(observation: Mapping[str, Any], action_space: Space, rng: np.random.Generator) -> int:
    """Plays PettingZoo's connect_four: wins if it can, else blocks if the opponent would win, else moves at random.

    Args:
        observation: observation [6, 7, 2], own pieces and the other's, row 0 on top; action_mask [7].
    """
    boards, allowed = np.asarray(observation["observation"], bool), np.flatnonzero(observation[ACTION_MASK])
    free: np.ndarray = ~np.any(boards, -1)
    landing = {int(column): int(np.flatnonzero(free[:, column])[-1]) for column in allowed}
    for plane in (0, 1):
        winning = [column for column, row in landing.items() if _wins(boards[..., plane], row, column)]
        if winning:
            return int(rng.choice(winning))
    return int(rng.choice(allowed))


def _wins(board: np.ndarray, row: int, column: int) -> bool:
    """Whether a piece at this empty place makes four in a row with those of `board` [6, 7] bool."""
    return any(
        1 + _count(board, row, column, down, right) + _count(board, row, column, -down, -right) >= _IN_A_ROW
        for down, right in _DIRECTIONS
    )


def _count(board: np.ndarray, row: int, column: int, down: int, right: int) -> int:
    """Pieces in one direction from a place, without a gap."""
    n = 0
    while True:
        row, column = row + down, column + right
        if not (0 <= row < board.shape[0] and 0 <= column < board.shape[1] and board[row, column]):
            return n
        n += 1
