"""Experience in RLlib's JSON lines: read as episodes. Rows that are pickled are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rlframe.core.errors import ConfigError, one_line, printable
from rlframe.core.files import open_regular_file
from rlframe.core.spaces import action_decoder, action_parts, box_scaling
from rlframe.data.episodes import SAMPLED_ACTION, Episode, sampled_numbers, shifted
from rlframe.data.reading import fitted

_MOST_BYTES, _LINE_BYTES = 1 << 40, 1 << 28
_ENDS = {"terminateds": "terminated", "terminated": "terminated", "truncateds": "truncated", "truncated": "truncated"}


def read_json_lines(
    path: Path, observation_space: Space, action_space: Space, normalized: bool = False
) -> Iterator[Episode]:
    """The episodes of a file of sample batches; an episode that goes over several lines, between others, is joined.

    Without new_obs, the last step of an episode that is not terminated is left out: what followed it is not known.

    `normalized`: actions of a Box go from -1 to 1, as RLlib writes those of its own policies (normalize_actions=True).

    Raises:
        ConfigError: a line is no sample batch of one policy, or holds pickled rows; the message names the line.
    """
    running: dict[Any, list[dict[str, Any]]] = {}  # rows of episodes that have not ended, by eps_id
    with open_regular_file(path, _MOST_BYTES) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES), b""), 1):
            if not line.strip():
                continue
            try:
                for row in _rows(json.loads(line)):
                    running.setdefault(row["eps_id"], []).append(row)
                    if row["terminated"] or row["truncated"]:
                        yield from _episode(running.pop(row["eps_id"]), observation_space, action_space, normalized)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: {printable(one_line(error))}") from None
    for eps_id, rows in running.items():
        try:
            yield from _episode(rows, observation_space, action_space, normalized)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, episode {eps_id}, which does not end: {printable(one_line(error))}") from None


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a line."""
    if not isinstance(batch, Mapping):
        raise ValueError("it is no sample batch")
    if batch.get("type") == "MultiAgentBatch":
        policies = batch["policy_batches"]
        if len(policies) != 1:
            raise ValueError(f"it has {len(policies)} policies, and only batches of one are imported")
        batch = next(iter(policies.values()))
    columns = {key: x for key, x in batch.items() if key not in ("type", "count")}
    if missing := [name for name in ("obs", "actions", "rewards") if name not in columns]:
        raise ValueError(f"it lacks {missing[0]}")
    for key, x in columns.items():
        if isinstance(x, str):
            raise ValueError(f"{key} is pickled, which is never read; write it with compress_columns=[]")
    n = len(columns["rewards"])
    names = {"obs", "new_obs", "actions", "rewards", "action_logp", "eps_id", "dones", *_ENDS} & columns.keys()
    if wrong := [name for name in names if len(columns[name]) != n]:
        raise ValueError(f"{wrong[0]} has {len(columns[wrong[0]])} rows and rewards {n}")
    for i in range(n):
        row = {name: columns[name][i] for name in names}
        ends = {_ENDS[name]: bool(row[name]) for name in names & _ENDS.keys()}
        done = {"terminated": bool(row.get("dones", False)), "truncated": False}
        yield {"eps_id": 0, **row, **done, **ends}


def _episode(
    rows: list[dict[str, Any]], observation_space: Space, action_space: Space, normalized: bool
) -> Iterator[Episode]:
    """The episode of these rows, if it has a step."""
    seen = [row["obs"] for row in rows]
    if rows[-1]["terminated"] or "new_obs" in rows[-1]:
        seen.append(rows[-1].get("new_obs", rows[-1]["obs"]))
    else:
        rows = rows[:-1]
    if not rows:
        return
    last = {**rows[-1], "truncated": not rows[-1]["terminated"]}
    info = {}
    if all("action_logp" in row for row in rows):
        log_prob = np.array([row["action_logp"] for row in rows], np.float32)
        info["log_prob"] = log_prob if normalized else log_prob + _log_scale(action_space)
    every = [*rows[:-1], last]
    action = _array(action_space, [row["actions"] for row in rows], "actions")
    if normalized:
        drawn = action.astype(np.float32)
        action = action_decoder(action_space)(drawn)
        if info and (numbers := sampled_numbers(action_space, drawn)) is not None:
            info[SAMPLED_ACTION] = numbers
    reward = np.array([row["rewards"] for row in rows], np.float32)
    if not np.isfinite(reward).all():
        raise ValueError("rewards have NaN or Inf")
    yield Episode(
        shifted(observation_space, _array(observation_space, seen, "obs"), -1),
        action,
        reward,
        np.array([row["terminated"] for row in every], np.bool_),
        np.array([row["truncated"] for row in every], np.bool_),
        info,
    )


def _log_scale(action_space: Space) -> float:
    """What is added to the log of a density of actions to make it that of canonical ones, of which Boxes are scaled."""
    boxes = [box for _, box in action_parts(action_space) if isinstance(box, spaces.Box)]
    return float(sum(np.log(box_scaling(box)[0]).sum() for box in boxes))


def _array(space: Space, values: list[Any], name: str) -> np.ndarray:
    """Values [n, *space.shape]; raises ValueError if they do not fit."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        raise ValueError(f"{name}: only one array is imported, not {type(space).__name__}")
    return fitted(space, np.array(values), len(values), name)
