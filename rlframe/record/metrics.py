"""Metrics: the table of names, and means over a log interval."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.core.context import set_within
from rlframe.core.errors import shortened
from rlframe.core.reduction import LARGEST, combined, reduction_of

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "env_steps": "valid environment steps so far, over all ranks: the x-axis of everything (steps); of several "
        "learners, those of the one that has most",
        "updates": "optimizer updates so far (updates)",
        "agent_steps": "steps of agents so far, over all ranks, in environments of several agents (steps)",
        "episode/return_mean": "mean return of the last runner.window training episodes, with unclipped rewards",
        "episode/return_mean_least_exploring": "the same of the eighth of the environments that explores least, "
        "where levels of exploration differ between environments",
        "episode/return_std": "standard deviation of those returns",
        "episode/return_min": "lowest of those returns",
        "episode/return_max": "highest of those returns",
        "episode/length_mean": "mean length of the last runner.window training episodes (env_steps)",
        "episode/length_min": "shortest of those episodes (env_steps)",
        "episode/length_max": "longest of those episodes (env_steps)",
        "episode/discounted_return_mean": "mean over those episodes of the discounted return from their first step",
        "episode/nonzero_rewards_mean": "mean number of rewards that are not 0 in those episodes",
        "episode/count": "training episodes finished so far (episodes)",
        "episode/<policy>/return_mean": "mean return of an agent of this policy in those episodes, in environments of "
        "several agents; agent is the only policy",
        "env/<info name>": "mean over the last runner.window training episodes of a number in the environment's info: "
        "its mean over the episode, or what its name ends in: _sum, _last, _min, _max",
        "eval/return_mean": "mean return of the evaluation episodes, in separate environments",
        "eval/return_std": "standard deviation of those returns",
        "eval/return_min": "lowest of those returns",
        "eval/return_max": "highest of those returns",
        "eval/length_mean": "mean length of the evaluation episodes (env_steps)",
        "eval/length_min": "shortest of those episodes (env_steps)",
        "eval/length_max": "longest of those episodes (env_steps)",
        "eval/normalized_score": "100 (eval/return_mean - random) / (expert - random), by the dataset's scores of both",
        "eval/return_best": "highest eval/return_mean so far",
        "eval/since_best": "evaluations since that one (evaluations)",
        "eval/<policy>/return_mean": "mean return of an agent of this policy in the evaluation episodes, in "
        "environments of several agents; agent is the only policy",
        "eval/env/<info name>": "mean over the evaluation episodes of a number in the environment's info, as for env/",
        "eval/win_rate_<player>": "share of games won against a player of eval.opponents (0 to 1)",
        "eval/n_episodes": "episodes in the evaluation (episodes)",
        "eval/restarts": "worker processes of the evaluation replaced since the start (processes)",
        "estimate/<method>": "expected discounted return of the agent with its noise, estimated from a dataset",
        "estimate/<method>_low": "lower end of its 95 % interval",
        "estimate/<method>_high": "upper end of its 95 % interval",
        "estimate/effective_episodes": "episodes of the dataset that the ratios of whole episodes are worth (episodes)",
        "estimate/mean_ratio": "mean ratio of whole episodes, 1 in expectation if both probabilities are right",
        "league/elo": "Elo rating of the policy that learns, by its games against its past; untrained it has 0",
        "league/size": "past snapshots that opponents are drawn from (snapshots)",
        "league/games": "games against them so far that count, of one opponent from start to end (games)",
        "league/win_rate_mean": "share of the last 50 games or so won against a snapshot, a draw as half, mean over "
        "the snapshots that have played (0 to 1)",
        "league/win_rate_min": "the same against the hardest of them (0 to 1)",
        "time/elapsed_s": "wall time of the run, including evaluation and the time before each resume (s)",
        "time/env_steps_per_s": "env_steps per second of this interval, evaluation time excluded (steps/s)",
        "time/updates_per_s": "updates per second of this interval, evaluation time excluded (updates/s)",
        "time/fraction_sampling": "share of this interval spent collecting samples, or waiting for them (0 to 1)",
        "time/fraction_learning": "share of this interval spent in updates (0 to 1)",
        "time/fraction_evaluating": "share of this interval spent evaluating (0 to 1)",
        "time/fraction_recording": "share of this interval spent on logs and snapshots (0 to 1)",
        "time/fraction_sampler_waiting": "share of this interval in which AsyncRl's sampler waited (0 to 1)",
        "memory/resident_mb": "resident memory of the main process and all workers, shared pages counted in each (MB)",
        "memory/main_mb": "resident memory of the main process alone (MB)",
        "memory/gpu_mb": "most memory of tensors on the GPU so far (MB)",
        "system/cpus_used": "CPU time of the run's processes over the time of this interval (CPUs)",
        "system/cpus_busy": "load of the whole machine in this interval (CPUs)",
        "system/gpu_load": "share of the last moments in which the GPU computed (0 to 1)",
        "sampler/restarts": "worker processes replaced since the start, because they died or hung (processes)",
        "time/slowest_worker": "compute time of the busiest worker in this interval over the mean of all",
        "sampler/out_of_space": "observations outside their space's bounds, of those checked (docs/guides/sampling.md)",
        "replay/ratio": "rows sampled from replay per row received since learning started",
        "replay/rows": "valid rows in replay",
        "replay/restarts": "actors of replay=ray replaced since the start, whose rows were lost (actors)",
        "replay/dropped_updates": "updates due by algo.replay_ratio, skipped as sampling was faster (updates)",
        "record/disk_errors": "disk errors so far while writing snapshots or log rows; the rows were written later",
        "record/not_sent": "failed attempts to send rows to trackers since the start; the next attempt sends them",
        "record/not_copied": "failed attempts to copy the run by sync= since the start; the next attempt copies it",
        "async/staleness_mean": "updates between publishing the parameters that sampled a batch and its receipt, "
        "mean over the interval's batches (updates)",
        "async/staleness_max": "maximum of the same (updates)",
        "async/queue_mean": "batches in the queue when the learner asks for one, mean over the interval (batches)",
        "algo/fitness_mean": "mean return of a generation's episodes, of the rewards that are learned from",
        "algo/fitness_std": "standard deviation of those returns",
        "algo/fitness_max": "highest of those returns in the interval",
        "algo/return_std": "standard deviation of the returns of ARS's top directions, by which its step is divided",
        "algo/loss": "loss of the Q-function, without importance weights",
        "algo/q": "mean Q-value of the sampled actions",
        "algo/epsilon": "current probability of a random action in the first environment",
        "algo/parameter_noise": "standard deviation of the noise in the policy's parameters",
        "algo/exploration": "current level of other exploration in the first environment: standard deviation of "
        "the noise on actions in [-1, 1], or temperature of boltzmann",
        "algo/temperature": "learned weight of the entropy",
        "algo/advantage_weight": "mean weight of the data's actions in the policy's loss: 1 where all count alike",
        "algo/conservative_gap": "CQL: log of the summed exp(Q) of other actions, less Q of the data's, mean of the "
        "critics",
        "algo/conservative_weight": "CQL: current weight of that gap, scheduled or learned",
        "algo/policy_loss": "policy part of the loss, mean over the interval's updates",
        "algo/value_loss": "value part of the loss, before its coefficient",
        "algo/entropy": "mean entropy of the policy (nats)",
        "algo/kl": "approximate KL divergence from the sampling policy to the updated one (nats)",
        "algo/kl_coef": "current weight of PPO's KL penalty",
        "algo/clip_fraction": "share of rows whose probability ratio was clipped (0 to 1)",
        "algo/explained_variance": "1 - Var[return - value] / Var[return]: 1 is perfect, 0 no better than the mean",
        "algo/grad_norm": "norm of the gradient over all parameters, before clipping",
        "algo/bonus_mean": "mean exploration bonus of a step, as it is added to the reward (docs/guides/curiosity.md)",
        "algo/bonus_deviation": "standard deviation of its discounted sum, by which the bonus is divided",
        "algo/bonus_loss": "loss of the bonus's networks",
        "algo/skipped": "updates skipped so far because a loss or gradient was NaN or Inf (updates)",
        "algo/learning_rate": "current learning rate of the optimizer",
    }
)


def metrics_table() -> str:
    """`METRICS` as a Markdown table, as shown in docs/guides/metrics.md."""
    lines = ["| name | meaning |", "|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {meaning} |" for name, meaning in METRICS.items()]) + "\n"


_SUMMED = (
    *("sampler/restarts", "sampler/out_of_space", "eval/restarts", "replay/rows", "replay/restarts"),
    *("memory/resident_mb", "system/cpus_used"),
)


def of_learner(name: str, learner: str) -> str:
    """The name of a metric, or of a part of a snapshot, of one of several learners: algo/red/loss, agent/red.

    Of the only one, whose name is empty, it stays as it is.
    """
    group, _, rest = name.partition("/")
    return "/".join(part for part in (group, learner, rest) if part)


def without_learner(name: str) -> str:
    """The name of a metric without that of one of several learners."""
    group, _, rest = name.partition("/")
    return f"{group}/{rest.rpartition('/')[2]}" if rest else name


def signed(metric: str) -> tuple[str, float]:
    """A metric without the - that says that lower is better, and the sign with which higher is."""
    return metric.removeprefix("-"), -1.0 if metric.startswith("-") else 1.0


def step_of(row: Mapping[str, float]) -> int:
    """Where a row, or a snapshot, stands in its run: its env_steps, or its updates where no environment is stepped."""
    return int(row["env_steps"] or row.get("updates", 0))


def over_ranks(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One log row from the rows of all ranks: counters summed, `algo/` metrics `combined`, the rest from rank 0."""
    merged = dict(rows[0])
    for name in dict.fromkeys(name for row in rows for name in row):
        found = [row[name] for row in rows if name in row]
        plain = without_learner(name)
        if plain in _SUMMED:
            merged[name] = sum(found)
        elif plain in LARGEST:
            merged[name] = max(found)
        elif name.startswith("algo/"):
            merged[name] = combined(name, found)
    return merged


class Metrics:
    """Means over a log interval. Tensors are summed on their device and converted to floats once, in `flush`.

    Each metric is averaged over the `add` calls that have it. NaN is kept, to make a NaN loss visible. A name that ends
    in _sum, _last, _min or _max has that instead of the mean.
    """

    learner = ""  # the name of the one of several learners whose metrics are added now, which stands in theirs

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, ...], Tensor] = {}  # running sums [n] float64 of n names, on their device
        self._floats: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._reduced: dict[str, float] = {}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Add one number or one-element tensor per metric (else ValueError); those of means stay on their device."""
        if self.learner:
            values = {of_learner(name, self.learner): value for name, value in values.items()}
        tensors: dict[torch.device, dict[str, Tensor]] = {}
        for name, value in values.items():
            if reduce := reduction_of(name):
                number = _number(name, value)
                self._reduced[name] = reduce(self._reduced[name], number) if name in self._reduced else number
            elif isinstance(value, Tensor) and not (value.is_cpu and value.numel() == 1):
                if value.numel() != 1:
                    raise _not_one_number(name, value)
                tensors.setdefault(value.device, {})[name] = value.reshape(())
                self._counts.setdefault(name, 0)
            else:
                self._floats[name] = self._floats.get(name, 0.0) + _number(name, value)
                self._counts[name] = self._counts.get(name, 0) + 1
        for device, found in tensors.items():
            self._add_tensors(device, found)

    @torch.no_grad()
    def _add_tensors(self, device: torch.device, values: dict[str, Tensor]) -> None:
        """Add numbers of one device, all at once."""
        names = tuple(values)
        total = self._tensors.get(names)
        if total is None:
            total = self._tensors[names] = _zeros_on(device, len(names))
        elif total.device != device:  # loaded from a snapshot
            total = self._tensors[names] = _zeros_on(device, len(names)).copy_(total)
        total.add_(torch.stack([x if x.dtype is torch.float32 else x.to(total.dtype) for x in values.values()]))
        for name in names:
            self._counts[name] += 1

    def state_dict(self) -> dict[str, Any]:
        tensors = [(list(names), total.clone()) for names, total in self._tensors.items()]
        floats, counts, reduced = dict(self._floats), dict(self._counts), dict(self._reduced)
        return {"tensors": tensors, "floats": floats, "counts": counts, "reduced": reduced}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tensors = {tuple(names): total for names, total in state["tensors"]}
        self._floats = dict(state["floats"])
        self._counts, self._reduced = dict(state["counts"]), dict(state["reduced"])

    def flush(self) -> dict[str, float]:
        """The means since the last flush in order of first appearance, with one transfer per device."""
        sums = dict(self._floats)
        by_device: dict[torch.device, list[tuple[str, ...]]] = {}
        for names, total in self._tensors.items():
            by_device.setdefault(total.device, []).append(names)
        for groups in by_device.values():
            totals = torch.cat([self._tensors[names] for names in groups]).tolist()
            for name, number in zip(itertools.chain(*groups), totals, strict=True):
                sums[name] = sums.get(name, 0.0) + number
        means = {name: sums[name] / count for name, count in self._counts.items() if count}
        found = means | self._reduced
        self._tensors, self._floats, self._counts, self._reduced = {}, {}, {}, {}
        return found


def _number(name: str, value: Any) -> float:
    """The value as a float; a tensor on the CPU, or an array, may have any shape of one element."""
    try:
        return float(value.item() if isinstance(value, Tensor | np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise _not_one_number(name, value) from None


def _not_one_number(name: str, value: Any) -> ValueError:
    shape = getattr(value, "shape", None)
    found = f"shape {tuple(shape)}; take its mean" if shape else f"{type(value).__name__} {shortened(repr(value))}"
    return ValueError(f"metric {name!r} must be a single number, got {found}")


def _zeros_on(device: torch.device, n: int) -> Tensor:
    # Not an inference tensor, since sums continue outside of inference_mode. MPS has no float64.
    with torch.inference_mode(False):
        return torch.zeros(n, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


class Noted:
    """Keeps what is logged in an update that is recorded, which `add` is to get from each call of the record."""

    def __init__(self) -> None:
        self.values: tuple[dict[str, Tensor | float], ...] = ()

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Raises ValueError as `Metrics.add`."""
        for name, value in values.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise _not_one_number(name, value)
        self.values = (*self.values, {name: x.detach() if isinstance(x, Tensor) else x for name, x in values.items()})


_MAX_NAME = 100  # characters; a long line of names makes progress.csv unreadable
_NAME = re.compile(rf"[^\s/]{{1,{_MAX_NAME}}}/[^\s/]{{1,{_MAX_NAME}}}")
_collecting: ContextVar[Metrics | Noted] = ContextVar("rlframe_metrics")


def check_own_name(name: str) -> None:
    """Raise ValueError unless `name` is of the form group/name and no metric of rlframe's own."""
    if not _NAME.fullmatch(name):
        is_long = len(name) > _MAX_NAME
        example = "name" if is_long else "_".join(name.replace("/", " ").split()) or "name"
        limit = f", each of at most {_MAX_NAME} characters" if is_long else ""
        raise ValueError(f"metric {shortened(repr(name))} must be named group/name, such as my_group/{example}{limit}")
    if name in METRICS:
        raise ValueError(f"metric {name!r} is logged by rlframe itself; choose another name")


def collect_in(metrics: Metrics) -> AbstractContextManager[None]:
    """Inside the `with` block, `log` adds to these metrics."""
    return set_within(_collecting, metrics)


@contextmanager
def noting() -> Iterator[Noted]:
    """Inside the `with` block, values are kept and not logged."""
    with set_within(_collecting, noted := Noted()):
        yield noted


def log(name: str, value: Tensor | float) -> None:
    """Add a value to a metric of the training that runs in this context; without one, nothing is logged.

    Raises:
        ValueError: see `check_own_name`; or the value is not one number.
    """
    check_own_name(name)
    add({name: value})


def add(values: Mapping[str, Tensor | float]) -> None:
    """`log` for rlframe's own metrics, in METRICS."""
    metrics = _collecting.get(None)
    if metrics is not None:
        metrics.add(values)
