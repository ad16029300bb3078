"""What a runner logs and saves beside the training state: metrics, timers, episodes, snapshots, skipped updates."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.algos.base import Progress, SkippedUpdate, UpdateMetrics
from rlframe.core.config import nearest
from rlframe.core.errors import PartError, ReadableError, RecordError, warn_once
from rlframe.core.ranks import Ranks
from rlframe.core.struct import Struct, Tree
from rlframe.core.types import Trajectory
from rlframe.evaluation.report import summarize
from rlframe.record import Metrics, Timers, current_run
from rlframe.record.metrics import over_ranks
from rlframe.record.rank_state import RankEntry, write_rank_state
from rlframe.runners.stop_rule import StopRule
from rlframe.system.usage import Usage

if TYPE_CHECKING:
    from rlframe.runners.base import Runner

WINDOW = 100  # episodes in episode/return_mean and similar metrics, over all ranks

_logger = logging.getLogger("rlframe")


class TrainingLog:
    """Owned by a runner and saved with it: everything that the next row of the log is made from."""

    def __init__(self, ranks: Ranks, stop: str) -> None:
        """`stop`: the text of a StopRule; empty: none."""
        self._rule = StopRule(stop) if stop else None
        self.rule_holds = False  # on the newest values
        self.ranks, self.metrics, self.timers, self._usage = ranks, Metrics(), Timers(), Usage()
        self.recent: deque[Trajectory] = deque()  # of this rank
        self.greediest: deque[Trajectory] = deque()  # the same of the environments that explore least
        self.set_window(WINDOW)
        self.unrecorded: list[dict[str, Any]] = []  # rows for episodes.csv
        self.env_seeds: Sequence[int] = ()  # of this rank's environments, for episodes.csv
        self.n_episodes = 0  # of this rank
        self.last = -1  # the runner's clock at the last row; -1: there is no row yet
        self.score = math.nan  # of the last row
        self.latest: dict[str, float] = {}  # the newest value of every metric

    def set_window(self, n_episodes: int) -> None:
        """The number of episodes, over all ranks, in episode/return_mean and similar metrics from now on."""
        n_own = -(-n_episodes // self.ranks.n_samplers)
        self.recent, self.greediest = deque(self.recent, n_own), deque(self.greediest, n_own)

    def add_episodes(self, finished: Sequence[Trajectory], env_steps: int, greediest: range = range(0)) -> None:
        """Note the episodes that ended at the latest at `env_steps`; `greediest`: see Algorithm."""
        self.n_episodes += len(finished)
        self.recent.extend(finished)
        self.greediest.extend(each for each in finished if each.env in greediest)
        self.unrecorded += [self._described(each, env_steps) for each in finished]

    def _described(self, episode: Trajectory, env_steps: int) -> dict[str, Any]:
        seed = {"seed": self.env_seeds[episode.env]} if self.env_seeds else {}
        return {
            "env_steps": env_steps,
            "env": self.ranks.rank * len(self.env_seeds) + episode.env,
            **seed,
            "return": episode.return_,
            "length": episode.length,
            "end": "terminated" if episode.terminated else "truncated",
            **{f"env/{name}": value for name, value in episode.diagnostics.items()},
        }

    def record_episodes(self) -> None:
        """Write the episodes of all ranks that are not yet in episodes.csv."""
        rows = [row for rows in self.ranks.gather(self.unrecorded) for row in rows]
        current_run().log_episodes(rows)
        self.unrecorded = []

    def follow(self, metrics: Mapping[str, float]) -> None:
        """Follow the stop rule on the newest values, with these."""
        self.latest |= metrics
        if self._rule is None:
            return
        self.rule_holds = self._rule(self.latest)
        if self.latest.get("updates") and (missing := self._rule.missing(self.latest)):
            known = nearest(missing[0], self.latest)
            warn_once(f"stop={self._rule.text!r}: this run has no metric {missing[0]!r} so far{known}")

    def row(
        self, progress: Progress, evaluation: Mapping[str, float], counters: Mapping[str, float]
    ) -> dict[str, float]:
        """The row of the interval that ends now, over all ranks; the next interval starts."""
        own = {
            "env_steps": progress.env_steps,
            "updates": progress.updates,
            **evaluation,
            **self._episodes(),
            **counters,
            **self._usage.metrics(),
            **_gpu_usage(),
            **self.timers.flush(progress.env_steps, progress.updates),
            **self.metrics.flush(),
        }
        return over_ranks(self.ranks.gather(own))

    def _episodes(self) -> dict[str, float]:
        own = [[*map(astuple, each)] for each in (self.recent, self.greediest)]
        recent, greediest = (
            [Trajectory(*row) for rows in each for row in rows] for each in zip(*self.ranks.gather(own), strict=True)
        )
        row = summarize(recent, "episode")
        if greediest:
            row["episode/return_mean_greediest"] = statistics.fmean(each.return_ for each in greediest)
        if recent:
            row["episode/discounted_return_mean"] = statistics.fmean(each.discounted_return for each in recent)
            row["episode/nonzero_rewards_mean"] = statistics.fmean(each.nonzero_rewards for each in recent)
        if n_episodes := self.ranks.sum(self.n_episodes):
            row["episode/count"] = n_episodes
        values: dict[str, list[float]] = {}
        for trajectory in recent:
            for name, value in trajectory.diagnostics.items():
                values.setdefault(name, []).append(value)
        return {**row, **{f"env/{name}": sum(found) / len(found) for name, found in values.items()}}

    def state_dict(self) -> dict[str, Any]:
        return {
            "reported": self.last,
            "score": self.score,
            "latest": dict(self.latest),
            "metrics": self.metrics.state_dict(),
            "n_episodes": self.n_episodes,
            "elapsed_s": self.timers.elapsed_s(),
            "recent": [list(astuple(trajectory)) for trajectory in self.recent],
            "greediest": [list(astuple(trajectory)) for trajectory in self.greediest],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last, self.score, self.n_episodes = state["reported"], state["score"], state["n_episodes"]
        self.follow(state["latest"])
        self.metrics.load_state_dict(state["metrics"])
        self.timers = Timers(state["elapsed_s"])
        self.recent.extend(Trajectory(*row) for row in state["recent"])
        self.greediest.extend(Trajectory(*row) for row in state["greediest"])


def _gpu_usage() -> dict[str, float]:
    """Of the current GPU, if this process uses one."""
    if not torch.cuda.is_initialized():
        return {}
    found = {"memory/gpu_mb": torch.cuda.max_memory_allocated() / 1e6}
    with suppress(ModuleNotFoundError, RuntimeError):  # its load needs NVIDIA's management library
        found["system/gpu_load"] = torch.cuda.utilization() / 100
    return found


def torch_rng_states(agent: Agent) -> dict[str, Tensor]:
    """States of torch's own generators, by kind of device, from which users' networks draw (dropout)."""
    device = next(agent.parameters()).device
    own = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **own}


def load_torch_rng(states: Mapping[str, Tensor], agent: Agent) -> None:
    """Continue from saved states; a GPU's is left out if the agent is not on one now."""
    torch.set_rng_state(states["cpu"].cpu())
    device = next(agent.parameters()).device
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


def save_snapshot(runner: Runner, final: bool) -> None:
    """Write a snapshot of all ranks if the run's snapshot mode wants one; `final`: the training ends.

    Raises:
        RecordError: the disk is full or the directory is gone, and the run must stop then.
    """
    run, ranks, env_steps = current_run(), runner.ranks, runner.env_steps

    def write_others(folder: Path) -> list[RankEntry]:
        """Every rank but the first writes its state into the folder of the snapshot."""
        folder = Path(ranks.broadcast(str(folder)))
        own = [write_rank_state(folder, ranks.rank, runner.state_dict())] if ranks.rank else []
        return [part for parts in ranks.gather(own) for part in parts]

    runner.log.record_episodes()  # of all env_steps of the snapshot
    if not ranks.broadcast(run.snapshot_due(env_steps, final)):
        return
    updates = runner.algo.progress.updates
    with runner.stop.protect():
        path = run.snapshot(
            runner.state_dict, env_steps, runner.log.score, updates=updates, final=final, other_ranks=write_others
        )
    if ranks.broadcast(path is not None):
        runner.callbacks.call("on_snapshot", env_steps)


def write_result(runner: Runner, how: str, why: str) -> None:
    """Write result.json: how and why the training ended, and its scores.

    `how`: completed, stopped (by a callback), out_of_time, interrupted or failed.
    """
    evaluations, latest = runner.evaluations, runner.log.latest
    scored = math.isfinite(evaluations.best)
    current_run().write_result(
        {
            "ended": how,
            "reason": why,
            "env_steps": runner.env_steps,
            "updates": runner.algo.progress.updates,
            "elapsed_s": round(runner.log.timers.elapsed_s(), 3),
            "score": runner.score_name,
            "final_score": latest.get(runner.score_name),
            "final_env_steps": evaluations.final_env_steps if scored else runner.env_steps,
            "best_score": evaluations.best if scored else None,
            "best_env_steps": evaluations.best_env_steps if scored else None,
            "metrics": latest,
        }
    )


def save_after_error(runner: Runner) -> None:
    """Write a last snapshot; if that fails too, only log it: the first error is the one to report."""
    try:
        save_snapshot(runner, final=True)
    except (RecordError, PartError) as error:
        _logger.warning("%s", error)


def describe_resumed(reasons: Sequence[str]) -> str:
    """What the log says; `reasons`: of each environment, why its episode starts anew, empty where it continues."""
    lost = [reason for reason in reasons if reason]
    if not lost:
        return "the run continues exactly, running episodes included"
    anew = f"{len(lost)} of {len(reasons)} running episodes start anew ({'; '.join(dict.fromkeys(lost))})"
    return f"parameters, optimizer and counts continue; {anew}"


def describe_tree(tree: Tree, name: str) -> list[str]:
    """A line for each array: its name, shape, type and range."""
    plain = _plain(tree)
    if isinstance(plain, dict | list):
        items = plain.items() if isinstance(plain, dict) else enumerate(plain)
        return [line for key, value in items for line in describe_tree(value, f"{name}.{key}")]
    x = torch.as_tensor(plain)
    values = x.double() if x.numel() else x.new_zeros(1, dtype=torch.float64)
    of = f"{values.min():.4g} to {values.max():.4g}, mean {values.mean():.4g}"
    return [f"  {name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}: {of}"]


class Diverged(ReadableError):
    """A loss, gradient or parameter became NaN or Inf; the state since is not worth saving."""


def skip_update(runner: Runner, metrics: UpdateMetrics) -> None:
    """Save the update that was skipped, if it is the first one, and warn.

    Raises:
        Diverged: `limits.nonfinite` is stop.
    """
    skipped = runner.algo.progress.skipped_updates.pop()
    if runner.limits.nonfinite == "stop":
        newest = current_run().newest_snapshot()
        raise Diverged(
            f"{save_skipped_update(runner.agent, runner.algo, skipped, metrics)}. "
            f"The last good snapshot is {newest or 'none'}. Try a lower learning rate ({skipped.rate}) or "
            f"smaller rewards; runner.nonfinite=skip skips such updates"
        )
    if not runner.skips_updates:  # the first one is saved, all are counted
        text = save_skipped_update(runner.agent, runner.algo, skipped, metrics)
        _logger.warning("%s; runner.nonfinite=skip continues", text)
    runner.skips_updates = True


def save_skipped_update(agent: Agent, algo: Algorithm, skipped: SkippedUpdate, metrics: UpdateMetrics) -> str:
    """Save its batch, the agent and the generators in the run directory; returns a sentence that describes it."""
    batch = _plain(skipped.batch)
    nonfinite = _not_finite(batch, "")
    names = {id(parameter): name for name, parameter in agent.named_parameters()}
    facts = {
        "updates": skipped.updates,
        "env_steps": algo.progress.env_steps,
        **skipped.facts,
        "not_finite_in_batch": nonfinite,
        "not_finite_gradients": [
            names.get(id(x), f"a parameter of the algorithm, of shape {list(x.shape)}") for x in skipped.parameters
        ],
        "metrics": {name: float(value) for name, value in metrics.items()},
    }
    state = {"batch": batch, "agent": agent.state_dict(), "generators": _generators(algo)}
    ranks = algo.progress.ranks
    name = f"nonfinite_{skipped.updates}" + (f"_rank_{ranks.rank}" if ranks.rank else "")
    path = current_run().dump(name, state, facts)
    in_batch = ", ".join(f"{place} ({n} values)" for place, n in nonfinite.items()) or "no value of the batch"
    return (
        f"update {skipped.updates:,} at env_steps {algo.progress.env_steps:,} was not applied: loss "
        f"{skipped.facts['loss']:g}, gradient norm {skipped.facts['grad_norm']:g}; NaN or Inf in {in_batch}"
        + (f"; its batch is in {path}" if path else "")
    )


def _plain(tree: Tree) -> Any:
    """A tree with Structs as dicts and tuples as lists."""
    if isinstance(tree, Struct):
        return {field.name: _plain(getattr(tree, field.name)) for field in fields(tree)}
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return [_plain(value) for value in tree]
    return tree


def _not_finite(tree: Any, path: str) -> dict[str, int]:
    """The number of values that are not finite, by the path of their array; arrays without any are left out."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {
            place: n for key, value in items for place, n in _not_finite(value, f"{path}.{key}".lstrip(".")).items()
        }
    n = int((~torch.as_tensor(tree).isfinite()).sum())
    return {path: n} if n else {}


def _generators(algo: Algorithm) -> dict[str, Any]:
    """The states of the algorithm's own generators after the update, by attribute name."""
    found: dict[str, Any] = {}
    for name, value in vars(algo).items():
        if isinstance(value, torch.Generator):
            found[name] = value.get_state()
        elif isinstance(value, np.random.Generator):
            found[name] = value.bit_generator.state
    return found
