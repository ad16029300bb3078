"""EpisodeCutter: from batches of any sampler to whole episodes, for recording."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space

from rlframe.core.spaces import action_decoder, zeros
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.core.types import Samples
from rlframe.data.episodes import SAMPLED_ACTION, Episode, sampled_numbers

LOG_PROB = "log_prob"  # in the info of episodes
Behaviour = Callable[[Samples], Any]  # see EpisodeCutter.add


def as_acted(samples: Samples) -> Any:
    """What acting has computed, if it has."""
    return getattr(samples.info, LOG_PROB, None)


def unknown(samples: Samples) -> np.ndarray:
    """For actions whose probabilities are not known."""
    return np.full(samples.valid.shape, np.nan, np.float32)


class EpisodeCutter:
    """Follows the environments of one stream. An episode that something interrupts is dropped."""

    def __init__(
        self, observation_space: Space, action_space: Space, with_info: bool = True, decorrelated: bool = False
    ) -> None:
        """Args:
        with_info: what acting has computed is recorded too, which holds of actions drawn from the policy.
        decorrelated: the sampler made random steps before its first batch, whose first rows begin no episode.
        """
        self._with_info, self._decorrelated = with_info, decorrelated
        self._action_space, self._decode = action_space, action_decoder(action_space)
        self._example = zeros(observation_space), zeros(action_space), 0, 0, 0
        self._open: dict[int, list[tuple[Tree, ...]]] = {}  # parts of the running episodes, by environment
        self._end = -1  # time of the row after the last batch
        self._begins: np.ndarray = np.zeros(0, np.bool_)  # [B] whether an episode begins there
        self.n_dropped = 0  # episodes

    def add(self, samples: Samples, behaviour: Behaviour = as_acted) -> list[tuple[int, Episode]]:
        """The episodes that end in a batch [T, B] and their environments, ordered by environment, then time.

        `behaviour`: gives the log-probabilities [T, B] of a batch's actions, or None.
        """
        rows = samples.numpy()
        log_prob = behaviour(rows) if self._with_info else None
        info = {LOG_PROB: log_prob.astype(np.float32)} if isinstance(log_prob, np.ndarray) else {}
        columns: tuple[Tree, ...] = (
            rows.inputs.observation,
            rows.action,
            rows.reward,
            rows.terminated,
            rows.truncated,
            info,
        )
        valid, first = rows.valid, rows.inputs.first
        T, B = valid.shape
        if samples.start != self._end:
            self._drop(list(self._open))
            self._begins = np.zeros(B, np.bool_)
        restarted = first[0]
        if self._decorrelated:
            first = np.concatenate([first[:1] & self._begins, first[1:]])
        self._end, self._begins = samples.start + T, rows.inputs.first[T].copy()
        ended, reset = (rows.terminated | rows.truncated) & valid, ~valid & first[1:]
        found = []
        for b in range(B):
            if b in self._open and restarted[b]:  # its environment was reset since
                self._drop([b])
            begin = 0
            for t in np.flatnonzero(ended[:, b] | reset[:, b]).tolist():
                if ended[t, b]:
                    self._take(columns, valid, first, b, begin, t + 1)
                    if b in self._open:
                        last = map_tree(lambda x, t=t, b=b: x[t + 1, b][None].copy(), rows.inputs.observation)
                        found.append((b, self._closed(b, last)))
                    else:  # it began before this recording
                        self.n_dropped += 1
                elif b in self._open or valid[begin:t, b].any():
                    self._drop([b])
                begin = t + 1
            self._take(columns, valid, first, b, begin, T)
        return found

    def _take(
        self, columns: tuple[Tree, ...], valid: np.ndarray, first: np.ndarray, b: int, begin: int, end: int
    ) -> None:
        """Copy the valid ones of the rows begin..end-1 of an environment; a new episode begins where `first` is set."""
        at = begin + np.flatnonzero(valid[begin:end, b])
        if b not in self._open:
            starts = np.flatnonzero(first[at, b])
            at = at[starts[0] :] if len(starts) else at[:0]
        if len(at):
            part = tuple(map_tree(lambda x: x[at, b], column) for column in columns)
            self._open.setdefault(b, []).append(part)

    def _closed(self, b: int, last: Tree) -> Episode:
        parts = self._open.pop(b)
        joined = [map_tree(lambda *x: np.concatenate(x), *column) for column in zip(*parts, strict=True)]
        seen, action, reward, terminated, truncated, info = joined
        observation = map_tree(lambda x, y: np.concatenate([x, y]), seen, last)
        if info and (sampled := sampled_numbers(self._action_space, action)) is not None:
            info = {**info, SAMPLED_ACTION: sampled}
        return Episode(observation, self._decode(action), reward, terminated, truncated, info)

    def _drop(self, which: list[int]) -> None:
        for b in which:
            self._open.pop(b, None)
            self.n_dropped += 1

    def state_dict(self) -> dict[str, Any]:
        """The rows of the running episodes."""
        parts = [(b, part) for b, found in self._open.items() for part in found]
        names = list(parts[0][1][-1]) if parts else []
        return {
            "open": [[b, leaves(part)] for b, part in parts],
            "info": names,
            "end": self._end,
            "begins": self._begins,
            "n_dropped": self.n_dropped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._open, self._end, self.n_dropped = {}, state["end"], state["n_dropped"]
        self._begins = state["begins"]
        example: Tree = (*self._example, dict.fromkeys(state["info"], 0))
        for b, arrays in state["open"]:
            rows = iter(arrays)
            self._open.setdefault(b, []).append(map_tree(lambda _, rows=rows: next(rows), example))
