"""Episodes as metrics; those of an evaluated run as lines of text, JSON, rows of CSV and a table."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlframe.core.errors import ConfigError, aligned, decimals, pluralize, printable
from rlframe.core.files import as_csv, iter_csv, number_in, write_output
from rlframe.core.types import Trajectory
from rlframe.record.directory import finite
from rlframe.record.metrics import step_of

RETURN_MEAN = "eval/return_mean"  # what training compares agents by
_HEADER = ("run", "trained for", "episodes", "return", "min", "max", "length")
_COLUMNS = ("run", "snapshot", "env_steps", "updates", "episode", "env", "seed", "return", "length", "end")


def summarize(trajectories: list[Trajectory], group: str) -> dict[str, Any]:
    """Mean, spread and length of episodes as metrics of `group`; empty if there are none."""
    if not trajectories:
        return {}
    returns = [t.return_ for t in trajectories]
    return {
        f"{group}/return_mean": statistics.fmean(returns),
        f"{group}/return_std": statistics.pstdev(returns),
        f"{group}/return_min": min(returns),
        f"{group}/return_max": max(returns),
        f"{group}/length_mean": statistics.fmean(t.length for t in trajectories),
        f"{group}/length_min": min(t.length for t in trajectories),
        f"{group}/length_max": max(t.length for t in trajectories),
    }


_OF_AGENTS = "episode/"  # how the names of numbers begin that environments of several agents have
_OF_POLICY = re.compile(rf"{_OF_AGENTS}(.+)/return")  # of the return of a policy's agents


def metric_of(diagnostic: str) -> str:
    """The metric of a number that an episode has beside its return: env/<name>, or episode/<policy>/return as it is."""
    name = printable(diagnostic).replace("\n", r"\n")  # a row of a log is a line
    return name if name.startswith(_OF_AGENTS) else f"env/{name}"


def diagnostic_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each number that episodes have beside their return, over those that have it, by its name."""
    found: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.diagnostics.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}  # fmean raises for inf beside -inf


def policy_returns(means: Mapping[str, float]) -> dict[str, float]:
    """Of such means the return of each policy's agents, by policy; empty if environments have a single agent."""
    found = ((_OF_POLICY.fullmatch(name), mean) for name, mean in sorted(means.items()))
    return {match[1]: mean for match, mean in found if match}


def evaluated(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Episodes as metrics of an evaluation; in environments of several agents also eval/<policy>/return_mean.

    Numbers of infos are eval/env/<name>, each the mean over the episodes that have it.
    """
    means = diagnostic_means(trajectories)
    of_policies = {f"eval/{name}/return_mean": mean for name, mean in policy_returns(means).items()}
    of_infos = {f"eval/{metric_of(name)}": mean for name, mean in means.items() if not name.startswith(_OF_AGENTS)}
    return {**summarize(list(trajectories), "eval"), **of_policies, **of_infos}


@dataclass(frozen=True)
class Evaluation:
    """The episodes that one snapshot played."""

    run: str  # as on the command line
    snapshot: Path
    trained_for: str  # of the snapshot: 100,000 env_steps
    env_steps: int
    updates: int
    seeds: Sequence[int]  # of the first reset of each environment
    episodes: Sequence[Trajectory]

    def summary(self) -> dict[str, float]:
        return evaluated(self.episodes)

    def lines(self) -> str:
        """A line for each episode, and one for all."""
        texts = [
            f"Episode #{number}: return: {decimals(episode.return_)} length: {episode.length} {_end(episode)}"
            + _by_policy([episode])
            for number, episode in enumerate(self.episodes)
        ]
        mean, std, low, high, length = self._numbers()
        n = pluralize(len(self.episodes), "episode")
        whole = f"{n}: return {mean} +- {std} (min {low}, max {high}), length {length}"
        texts.append(whole + _by_policy(self.episodes))
        return "\n".join(texts)

    def _numbers(self) -> list[str]:
        """Mean, deviation, least and greatest return, and mean length."""
        summary = self.summary()
        found = [summary[name] for name in (RETURN_MEAN, "eval/return_std", "eval/return_min", "eval/return_max")]
        return [decimals(x) for x in (*found, summary["eval/length_mean"])]

    def facts(self) -> dict[str, Any]:
        """The summary and every episode, for JSON."""
        rows = [{"return": e.return_, "length": e.length, "terminated": e.terminated, **_own(e)} for e in self.episodes]
        facts = {"snapshot": str(self.snapshot), "env_steps": self.env_steps, "updates": self.updates}
        return {"run": self.run, **facts, "n_episodes": len(rows), **self.summary(), "episodes": rows}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each episode, for CSV; the environment's own statistics are env/<name>."""
        found = []
        for number, e in enumerate(self.episodes):
            where = (self.run, self.snapshot.name, self.env_steps, self.updates, number, e.env, self.seeds[e.env])
            found.append({**dict(zip(_COLUMNS, (*where, e.return_, e.length, _end(e)), strict=True)), **_own(e)})
        return found

    def cells(self) -> tuple[str, ...]:
        """The texts below _HEADER."""
        mean, std, *rest = self._numbers()
        return (printable(self.run), self.trained_for, str(len(self.episodes)), f"{mean} +- {std}", *rest)


def _by_policy(episodes: Sequence[Trajectory]) -> str:
    """Of episodes with several agents, the mean return of an agent, by policy."""
    found = policy_returns(diagnostic_means(episodes))
    return f"; an agent's: {', '.join(f'{name} {decimals(value)}' for name, value in found.items())}" if found else ""


def _own(episode: Trajectory) -> dict[str, float]:
    """The environment's own numbers, as metrics."""
    return {metric_of(name): value for name, value in episode.diagnostics.items()}


def _end(episode: Trajectory) -> str:
    return "terminated" if episode.terminated else "truncated"


def table(evaluations: Sequence[Evaluation]) -> str:
    """One line for each run."""
    lines = [_HEADER, *(each.cells() for each in evaluations)]
    return "\n".join(aligned(lines, "<" + ">" * (len(_HEADER) - 1)))


def write(out: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write the episodes to FILE.csv, or as JSON to any other file: an object, or with several runs a list of them."""
    if out.suffix != ".csv":
        facts = [finite(each.facts()) for each in evaluations]
        write_output(out, json.dumps(facts if len(facts) > 1 else facts[0], indent=2) + "\n")
        return
    rows = [row for each in evaluations for row in each.rows()]
    columns = dict.fromkeys(name for row in rows for name in row)
    write_output(out, as_csv([columns, *([row.get(name, "") for name in columns] for row in rows)]))


def logged_return(log: Path, step: int) -> float:
    """The mean return of the evaluation that a run logged in its progress.csv at a step (see `step_of`).

    Raises:
        ConfigError: it made none then.
    """
    rows = iter_csv(log)
    columns = next(rows, [])
    numbers = (zip(columns, map(number_in, row), strict=True) for row in rows)
    known = ({name: x for name, x in row if math.isfinite(x)} for row in numbers)
    logged = {step_of(row): row[RETURN_MEAN] for row in known if "env_steps" in row and RETURN_MEAN in row}
    if step in logged:
        return logged[step]
    others = f"it did at {', '.join(map(str, [*logged][-5:]))}" if logged else "it never did"
    raise ConfigError(f"{log}: the run did not evaluate at step {step} of its snapshot; {others}")
