"""The replay interface that off-policy algorithms use, and the two kinds of batch a replay returns.

`ReplayBuffer` and `DividedReplay` (buffer.py) and `ShardedReplay` (ray.py) are this package's. A user's own only has to
satisfy `Replay`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from rlframe.core.struct import Struct, Tree, map_tree
from rlframe.core.types import AgentInputs, Array, Samples


@dataclass(frozen=True, eq=False)
class Transitions(Struct):
    """n sampled transitions as read-only tensors on the learner's device; some of them share memory."""

    inputs: AgentInputs  # [n] row t
    action: Tree  # [n]
    return_: Tensor  # [n] float32: r[t] + γ r[t+1] + ... of up to n_step rewards, cut at the episode's end
    bootstrap: Tensor  # [n] float32: the factor on V(next_inputs), γ^k, or 0 if terminated within the k steps
    next_inputs: AgentInputs  # [n] row t+k: the last observation of a truncated episode; anything if terminated
    weight: Tensor  # [n] float32 importance weights, at most 1; ones if uniform
    index: Array  # [n] int64 unique row numbers, for `update_priorities`; an overwritten row's is never reused
    drawn: Tree = ()  # [n, ...] numbers that an algorithm draws for its update; () from replay

    @property
    def acted_on(self) -> Tree:
        """The observations [rows, *obs] at which somebody acted."""
        return self.inputs.observation


@dataclass(frozen=True, eq=False)
class Sequences(Struct):
    """n sampled sequences of L rows, each starting at row 0 of a sampler's batch; masks as in Samples."""

    inputs: AgentInputs  # [L+1, n]; bootstrap from row L, which follows the sequence
    action: Tree  # [L, n]
    reward: Tensor  # [L, n] float32
    terminated: Tensor  # [L, n] bool
    truncated: Tensor  # [L, n] bool
    valid: Tensor  # [L, n] bool
    state: Tree  # [n] the agent's recurrent state before row 0, as it was when acting
    weight: Tensor  # [n] float32 importance weights, at most 1; ones if uniform
    index: np.ndarray  # [n] int64 unique number of row 0, as in Transitions

    @property
    def acted_on(self) -> Tree:
        """The observations [rows, *obs] at which somebody acted."""
        return map_tree(lambda x: x[:-1][self.valid], self.inputs.observation)


Batch_co = TypeVar("Batch_co", covariant=True)  # Transitions or Sequences


class Replay(Protocol[Batch_co]):
    """The replay methods that algorithms call. They need a Replay[Transitions], R2D1 and BC with memory [Sequences].

    A replay of transitions samples row t of an environment only if `samples.valid[t]` is set and row t+1 is stored:
    that row is always the next observation, also after the last step of an episode. A uniform replay may ignore
    `beta` and priorities and return ones as `weight`. `str(replay)` is logged once at the start of a run.
    """

    @property
    def n_rows(self) -> int:
        """Number of valid rows stored; 0 while none can be sampled, so that no update is made."""

    def append(self, samples: Samples) -> None:
        """Store a batch [T, B], overwriting the oldest rows if full. Copy it: the sampler reuses its memory.

        `samples.inputs` is [T+1, B]. Its row T equals row 0 of the next batch, except after a resume.
        """

    def sample(self, n: int, beta: float = 0.0) -> Batch_co:
        """Sample n rows with replacement; `beta` is the exponent β of the importance weights, 0 for weights of 1."""

    def update_priorities(self, index: np.ndarray, priority: np.ndarray | Tensor) -> None:
        """Set priorities [n] of the rows with this `index` [n], as sampled; ignore rows overwritten since then.

        `index` therefore numbers rows over the whole run (a generation plus a slot), not slots alone.
        """

    def state_dict(self) -> dict[str, Any]:
        """All rows, priorities and the state of the generator: arrays, tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, so that the same rows are sampled as without the interruption."""


class StoredReplay(Replay[Batch_co], Protocol[Batch_co]):
    """What the replays of this package offer besides."""

    def newest(self) -> np.ndarray:
        """The index [n] of the rows that the last `append` made available, of the highest priority or a fixed one.

        With NStep's `td_priorities`, it is their TD error.
        """

    def read(self, index: np.ndarray) -> Batch_co:
        """The rows with this `index` [n], which must still be stored; weights are 1."""
