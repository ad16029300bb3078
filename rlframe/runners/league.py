"""League: past snapshots of the learning policy, which play the opponents in its episodes; `agents.league`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chz
import torch

from rlframe.agents import Agent
from rlframe.core.config import choice, count, fraction, names, number
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import idle_while
from rlframe.core.multi_agent import SHARED, opponent_name
from rlframe.core.seeding import Role, generator
from rlframe.core.types import Samples, Trajectory
from rlframe.ops.ratings import elo_update, hard_opponents
from rlframe.record import metrics
from rlframe.runners.callbacks import Callback, Training

_K = 16.0  # Elo points between a sure win that is lost and the same that is won
_LEAST_WEIGHT = 0.02  # of a game in a win rate: that of the last 50 games or so counts, as the learner changes


@chz.chz
class LeagueConfig:
    """Self-play against past snapshots of the policy that learns. Without it, it plays all seats itself."""

    IDLE = idle_while("draw", "power", "self_play", "interval_steps", "games", "size", opponents=0)

    opponents: int = count(0, "opponents at a time, each a past snapshot; 0: no league", low=0, high=64)
    draw: str = choice("pfsp", ("latest", "uniform", "pfsp"), "how snapshots are drawn; pfsp: those that win more")
    power: float = number(1.0, "of pfsp: drawn in proportion to (1 - win rate of the learner) ** power")
    self_play: float = fraction(0.5, "share of episodes in which the policy plays all seats, and learns from all")
    interval_steps: int = count(50_000, "env_steps between snapshots of the policy")
    games: int = count(50, "that an opponent plays, from start to end, before another one is drawn")
    size: int = count(20, "snapshots that are kept, in memory and in the run's snapshots; the oldest are dropped")
    members: tuple[str, ...] = names((), "[RUN,RUN]: runs or snapshots of others, which are drawn too and stay")

    @chz.validate
    def _check(self) -> None:
        if self.members and not self.opponents:
            raise ConfigError("agents.league.members are drawn by opponents: give agents.league.opponents too")
        if self.opponents >= self.size:
            raise ConfigError(
                f"agents.league.size={self.size} must be above agents.league.opponents={self.opponents}: those that "
                f"play are kept"
            )


@dataclass(eq=False)
class Past:
    """A past snapshot of the learning policy, or one of another run."""

    number: int  # those of other runs have -1, -2 and so on
    env_steps: int
    weights: dict[str, Any]  # on the CPU
    elo: float  # of the learner when it was taken; of another run's, by its games
    win_rate: float = 0.5  # of the learner against it, mostly in the last games
    n_games: int = 0


class League(Callback):
    """Owns the past snapshots and the weights of the opponents' agents, which it replaces between batches.

    A game counts, for win rates and Elo, if its opponent was the same from its start to its end. The learner's score is
    1, 0.5 or 0 as its return is higher than, equal to or lower than the opponent's. A snapshot keeps the rating that
    the learner had when it was taken, and the first one has 0. One of another run begins with 0, and its games count
    for it too.
    """

    def __init__(
        self,
        learner: Agent,
        opponents: Sequence[Agent],
        config: LeagueConfig,
        seed: int = 0,
        members: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Args:
        opponents: agents of the learner's kind, one for each policy opponent_0, opponent_1 and so on.
        members: weights from other runs.
        """
        self._learner, self._opponents, self.config = learner, list(opponents), config
        self._rng = generator(seed, Role.LEAGUE)
        self.elo, self.n_games, self._taken = 0.0, 0, -1
        self.past = [Past(-1 - k, 0, dict(weights), 0.0) for k, weights in enumerate(members)]
        self.playing: list[Past] = []  # by opponent
        self._rows = [0] * len(self._opponents)  # of each environment since the opponent came
        self._games = [0] * len(self._opponents)  # that it played since
        self._played: list[tuple[Past, int]] = []  # who played the newest batch, and its rows by then

    def on_start(self, runner: Training) -> None:
        if not self.playing:
            self._add(0)
            self._seat_all([self.past[-1]] * len(self._opponents))

    def on_batch(self, samples: Samples) -> None:
        """Take a snapshot, and draw other opponents for the next batch, where they are due."""
        T, env_steps = len(samples.reward), self.runner.env_steps
        self._played = [(past, rows + T) for past, rows in zip(self.playing, self._rows, strict=True)]
        self._rows = [rows for _, rows in self._played]
        if env_steps // self.config.interval_steps > self._taken // self.config.interval_steps:
            self._add(env_steps)
        for slot, games in enumerate(self._games):
            if games >= self.config.games:
                self._seat(slot, self._draw())

    def on_episode(self, trajectory: Trajectory) -> None:
        returns = trajectory.diagnostics
        for slot, (past, rows) in enumerate(self._played):
            other = returns.get(f"episode/{opponent_name(slot)}/return")
            if other is not None and trajectory.age <= rows:
                own = returns[f"episode/{SHARED}/return"]
                self._count(slot, past, 0.5 + 0.5 * ((own > other) - (own < other)))

    def _count(self, slot: int, past: Past, score: float) -> None:
        """Count a game of the learner with this score."""
        self.n_games += 1
        past.n_games += 1
        past.win_rate += max(_LEAST_WEIGHT, 1 / (past.n_games + 1)) * (score - past.win_rate)
        own, other = self.elo, past.elo
        self.elo = elo_update(own, other, score, _K)
        if past.number < 0:
            past.elo = elo_update(other, own, 1 - score, _K)
        if self.playing[slot] is past:
            self._games[slot] += 1

    def _add(self, env_steps: int) -> None:
        """Take a snapshot of the learner."""
        own = [past for past in self.past if past.number >= 0]
        self.past.append(Past(own[-1].number + 1 if own else 0, env_steps, _copied(self._learner), self.elo))
        self._taken = env_steps
        if len(own) >= self.config.size:
            self.past.remove(next(past for past in own if past not in self.playing))

    def _draw(self) -> Past:
        kind, n = self.config.draw, len(self.past)
        if kind == "latest":
            return self.past[-1]
        power = self.config.power if kind == "pfsp" else 0.0
        return self.past[int(self._rng.choice(n, p=hard_opponents([past.win_rate for past in self.past], power)))]

    def _seat(self, slot: int, past: Past) -> None:
        """Let a past snapshot play an opponent from the next batch on."""
        if self.playing[slot] is not past:
            self._rows[slot] = 0
            self._opponents[slot].load_state_dict(past.weights)
        self.playing[slot], self._games[slot] = past, 0

    def _seat_all(self, playing: Sequence[Past]) -> None:
        self.playing = list(playing)
        for agent, past in zip(self._opponents, playing, strict=True):
            agent.load_state_dict(past.weights)

    def on_log(self, row: Mapping[str, float]) -> None:
        rates = [past.win_rate for past in self.past if past.n_games]
        found = {"league/elo": self.elo, "league/size": len(self.past), "league/games": self.n_games}
        if rates:
            found |= {"league/win_rate_mean": sum(rates) / len(rates), "league/win_rate_min": min(rates)}
        metrics.add(found)

    def state_dict(self) -> dict[str, Any]:
        return {
            "elo": self.elo,
            "n_games": self.n_games,
            "taken": self._taken,
            "past": [dict(vars(past)) for past in self.past],
            "playing": [past.number for past in self.playing],
            "rows": list(self._rows),
            "games": list(self._games),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["rows"]) != len(self._opponents):
            raise ConfigError(
                f"agents.league.opponents={len(self._opponents)}, and the run was saved with {len(state['rows'])}"
            )
        self.elo, self.n_games, self._taken = state["elo"], state["n_games"], state["taken"]
        self.past = [Past(**each) for each in state["past"]]
        by_number = {past.number: past for past in self.past}
        if playing := [by_number[number] for number in state["playing"]]:  # none before the training began
            self._seat_all(playing)
        self._rows, self._games = list(state["rows"]), list(state["games"])
        self._rng.bit_generator.state = state["rng"]


def _copied(agent: Agent) -> dict[str, Any]:
    """The weights of an agent as they are now, on the CPU."""
    return {
        name: x.detach().cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in agent.state_dict().items()
    }
