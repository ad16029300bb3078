"""What is drawn from replay: transitions, and sequences with the agent's state before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from rlframe.core.struct import Struct, Tree
from rlframe.core.types import AgentInputs, Samples


@dataclass(frozen=True, eq=False)
class Transitions(Struct):
    """n rows drawn at random: tensors on the learner's device, to be read and not written (some share memory)."""

    inputs: AgentInputs  # [n] row t
    action: Tree  # [n]
    return_: Tensor  # [n] float32: r[t] + γ r[t+1] + ... of up to n_step rewards, cut at the episode's end
    bootstrap: Tensor  # [n] float32: the factor on V(next_inputs), γ^k, or 0 if terminated within
    next_inputs: AgentInputs  # [n] row t+k: a truncated episode's last observation; anything if terminated
    weight: Tensor  # [n] float32 importance weights, at most 1; ones if uniform
    index: np.ndarray  # [n] int64 row numbers, time since the beginning * B + environment: never used again


@dataclass(frozen=True, eq=False)
class Sequences(Struct):
    """n sequences of L rows, each from where a batch began; masks as in Samples."""

    inputs: AgentInputs  # [L+1, n]; row L follows the sequence: bootstrap from it
    action: Tree  # [L, n]
    reward: Tensor  # [L, n] float32
    terminated: Tensor  # [L, n] bool
    truncated: Tensor  # [L, n] bool
    valid: Tensor  # [L, n] bool
    state: Tree  # [n] agent state before row 0, as stored when acting
    weight: Tensor  # [n] float32 importance weights, at most 1; ones if uniform
    index: np.ndarray  # [n] int64 number of row 0, as in Transitions


class Replay(Protocol):
    """What an algorithm may ask of any replay."""

    @property
    def n_rows(self) -> int: ...
    @property
    def n_choices(self) -> int: ...
    @property
    def size(self) -> str: ...

    def append(self, samples: Samples) -> None: ...
    def sample(self, n: int, beta: float = 0.0) -> Any: ...
    def update_priorities(self, index: np.ndarray, priority: Tensor) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
