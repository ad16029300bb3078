"""`rlframe.evaluate RUN_A RUN_B ...` of several agents: all play each other, and a table of the results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import combinations
from pathlib import Path

from rlframe.core.command_line import KeyValues
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, SnapshotError, printable
from rlframe.core.files import prepare_json, write_output
from rlframe.core.multi_agent import JointSpace
from rlframe.deploy.load import Trained, load_chosen
from rlframe.evaluation import matches
from rlframe.evaluation.matches import RANDOM, FunctionPlayer, Pair, Player, PolicyPlayer, Table
from rlframe.system.env_vars import env_vars_set

KEYS = ("n_episodes", "explore", "seed", "snapshot", "out", "device", "trust")


def is_player(name: str) -> bool:
    """Whether a word of the command line is a player that is no run: random, or module:function."""
    return not Path(name).exists() and (name == RANDOM or (":" in name and "=" not in name))


def are_matches(names: Sequence[str], words: KeyValues) -> bool:
    """Whether these are to play each other: several, of which one is no run, or the first one's has several agents."""
    if len(names) < 2:
        return False
    if any(is_player(name) for name in names):
        return True
    device, trust = words.text("device", "auto"), words.flag("trust")
    snapshot = words.text("snapshot")
    with suppress(ConfigError, SnapshotError):  # it is loaded again, with the keys of the command line
        first = load_chosen(Path(names[0]), snapshot, device, trust)[1]
        return isinstance(first.observation_space, JointSpace)
    return False


def play_runs(names: Sequence[str], words: KeyValues) -> int:
    """Print the table of all pairs, and write `out`; returns the exit status.

    Raises:
        ConfigError: a key is wrong, a player cannot play the environment, or none is a run.
    """
    if unknown := [key for key in words.remaining if key not in KEYS]:
        known = ", ".join(KEYS)
        raise ConfigError(f"{unknown[0]} has no meaning in matches, which have {known}{nearest(unknown[0], KEYS)}")
    if len({*names}) < len(names):
        raise ConfigError(f"a player is given twice: {', '.join(names)}")
    n_episodes, explore = words.count("n_episodes", 100), words.flag("explore", True)
    seed, device, trust = words.count("seed", 0), words.text("device", "auto"), words.flag("trust")
    snapshot, out = words.text("snapshot"), words.text("out")
    if n_episodes < 1:
        raise ConfigError(f"n_episodes={n_episodes} must be at least 1")
    if out:
        prepare_json(Path(out))
    runs = {name: load_chosen(Path(name), snapshot, device, trust)[1] for name in names if not is_player(name)}
    if not runs:
        raise ConfigError(f"none of {', '.join(names)} is a run directory, whose environment is played")
    first = next(iter(runs.values()))
    players = [_player(name, runs, explore) for name in names]
    with env_vars_set(first.experiment.env_vars), closing(Table(first.env)) as table:
        pairs = [table.play(*two, n_episodes, seed) for two in combinations(players, 2)]
    print(matches.lines(pairs))
    if out:
        _write(Path(out), pairs)
    return 0


def _player(name: str, runs: dict[str, Trained], explore: bool) -> Player:
    if name not in runs:
        return FunctionPlayer(name)
    run = runs[name]
    print(printable(f"{name}: {run.snapshot}, trained for {run.trained_for}"))
    return PolicyPlayer(name, run.agent, (run.observation_space, run.action_space), run.env.policies, explore)


def _write(out: Path, pairs: Sequence[Pair]) -> None:
    rows = [
        {
            "player": pair.first,
            "against": pair.second,
            "games": pair.games,
            "won": pair.won,
            "drawn": pair.drawn,
            "lost": pair.lost,
            "score": pair.score,
            "return_mean": pair.returns[0] / pair.games,
            "return_mean_against": pair.returns[1] / pair.games,
        }
        for pair in pairs
    ]
    elo = {name: rating for name, (rating, _) in matches.ratings(pairs).items()}
    write_output(out, json.dumps({"pairs": rows, "elo": elo}, indent=2) + "\n")
