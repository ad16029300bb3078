"""The records that pass between sampler, agent and algorithm, and what each row of them means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlframe.core.struct import Struct, Tree, map_tree

Array = Any  # a NumPy array or a torch tensor: a Struct is either throughout


class BatchSpec(NamedTuple):
    """Shape of one batch of one rank: T time steps of B environments."""

    T: int
    B: int

    @property
    def size(self) -> int:
        """Rows in a batch."""
        return self.T * self.B


@dataclass(frozen=True, eq=False)
class AgentInputs(Struct):
    """What an agent may see at a row. Leading dimensions [B] or [T, B].

    `prev_action` and `prev_reward` are the raw row before; whoever uses them treats them as null where `first`.
    """

    observation: Tree
    prev_action: Tree
    prev_reward: Array  # float32, as learned from
    first: Array  # bool: this row begins an episode


@dataclass(frozen=True, eq=False)
class AgentStep(Struct):
    """What an agent answers: [B] rows."""

    action: Tree
    info: Struct  # what training wants back, for example log_prob and value
    state: Tree  # agent state after this row; () without memory


@dataclass(frozen=True, eq=False)
class Samples(Struct):
    """One batch. A view of the sampler's memory: valid until its next `collect`.

    The end of an episode is a row: after `terminated | truncated` the last observation is written as an ordinary row
    with `valid` False, whose action is ignored, and then the environment resets. So the next observation is always
    the next row. A lost life with `terminated` set is followed by a valid row with `first` set: the game goes on.
    """

    inputs: AgentInputs  # [T+1, B]; row T is where the next batch starts: bootstrap from it
    action: Tree  # [T, B, *act], canonical (see core.spaces)
    reward: Array  # [T, B] float32, as learned from
    terminated: Array  # [T, B] bool: the MDP ended, do not bootstrap
    truncated: Array  # [T, B] bool: the episode was cut, bootstrap from the next row
    valid: Array  # [T, B] bool: False on an episode's last observation
    info: Struct  # [T, B]
    state: Tree  # [B] agent state before row 0
    final_state: Tree  # [B] agent state before row T

    @property
    def observation(self) -> Tree:
        """[T, B]: of `inputs`, but for row T."""
        return map_tree(lambda x: x[:-1], self.inputs.observation)


@dataclass(frozen=True)
class Trajectory:
    """One finished episode of one environment, up to its real end, scored by the environment's own rewards."""

    return_: float
    length: int  # env steps
    terminated: bool  # else truncated
    env: int  # index of the environment in its sampler
    diagnostics: dict[str, float] = field(default_factory=dict)  # mean over the episode of numeric infos
