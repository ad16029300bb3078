"""Strength of players by the games that they played: Elo ratings, and which opponents to learn from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_SCALE = 400 / math.log(10)  # Elo points per unit of log odds
_PRIOR_GAMES = 1.0  # drawn games that each pair is given, without which a player that always won has no finite rating
_MOST_ROUNDS, _TOLERANCE = 10_000, 1e-9


def expected_score(rating: float, other: float) -> float:
    """The score that a player is expected to get of a game: 1 a win, 0.5 a draw, 0 a loss.

    E = 1 / (1 + 10^((R' - R) / 400))   (Elo 1978, The Rating of Chessplayers, 8.4)
    """
    return 1 / (1 + 10 ** ((other - rating) / 400))


def elo_update(rating: float, other: float, score: float, k: float) -> float:
    """The rating of a player after a game with this score: R + k (score - E).   (Elo 1978, 1.6)"""
    return rating + k * (score - expected_score(rating, other))


def elo_ratings(scores: np.ndarray, games: np.ndarray) -> np.ndarray:
    """The ratings under which the results of a table of players are most likely; their mean is 0.

    Bradley-Terry strengths by the iteration p_i <- W_i / sum_j n_ij / (p_i + p_j)   (Hunter 2004, eq. 3), as Elo
    400 log10 p. Each pair that played is given one drawn game more, which keeps ratings finite.

    Args:
        scores: [N, N], what the player of the row scored in all games against that of the column.
        games: [N, N] symmetric, their number; the diagonal is ignored.
    Returns:
        ratings [N], in Elo points.
    """
    n = len(games)
    played = (games > 0) & ~np.eye(n, dtype=bool)
    total = np.where(played, games + _PRIOR_GAMES, 0.0)
    won = np.where(played, scores + _PRIOR_GAMES / 2, 0.0).sum(1)
    strength: np.ndarray = np.ones(n)
    for _ in range(_MOST_ROUNDS):
        against = (total / (strength[:, None] + strength[None])).sum(1)
        found = np.where(against > 0, won / np.maximum(against, 1e-300), 1.0)
        found /= np.exp(np.log(found).mean())
        if np.abs(np.log(found / strength)).max() < _TOLERANCE:
            break
        strength = found
    return np.log(found) * _SCALE


def hard_opponents(win_rates: Sequence[float], power: float) -> np.ndarray:
    """Probabilities [N] with which opponents are drawn: more often who is harder to beat.

    P(j) = f(w_j) / sum f,  f(w) = (1 - w)^power   (Vinyals et al. 2019, prioritized fictitious self-play, f_hard)

    Args:
        win_rates: of the learner against each.    power: 0: all alike.
    """
    weights = (1 - np.asarray(win_rates, float)) ** power
    total = weights.sum()
    return weights / total if total > 0 else np.full(len(weights), 1 / len(weights))
