"""The two kinds of batch a replay returns: transitions, and sequences with the agent's state before them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rlframe.core.struct import Struct, Tree
from rlframe.core.types import AgentInputs


@dataclass(frozen=True, eq=False)
class Transitions(Struct):
    """n sampled transitions as read-only tensors on the learner's device; some of them share memory."""

    inputs: AgentInputs  # [n] row t
    action: Tree  # [n]
    return_: Tensor  # [n] float32: r[t] + γ r[t+1] + ... of up to n_step rewards, cut at the episode's end
    bootstrap: Tensor  # [n] float32: the factor on V(next_inputs), γ^k, or 0 if terminated within the k steps
    next_inputs: AgentInputs  # [n] row t+k: the last observation of a truncated episode; anything if terminated
    weight: Tensor  # [n] float32 importance weights, at most 1; ones if uniform
    index: np.ndarray  # [n] int64 unique row numbers, for `update_priorities`; an overwritten row's is never reused


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
