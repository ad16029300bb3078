"""The records passed between sampler, agent and algorithm, and the meaning of their rows."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlframe.core.struct import Struct, Tree, map_tree, plain

Array = Any  # a NumPy array or a torch tensor; all leaves of a Struct are of one kind


class BatchSpec(NamedTuple):
    """Shape of one rank's batch: T time steps of B environments."""

    T: int
    B: int
    n_streams: int = 1  # that such batches come from (see Samples)

    @property
    def size(self) -> int:
        return self.T * self.B

    @property
    def n_envs(self) -> int:
        """Environments of all streams."""
        return self.B * self.n_streams


@dataclass(frozen=True, eq=False)
class AgentInputs(Struct):
    """Inputs of an agent at one row. Leading dimensions [B] or [T, B].

    `prev_action` and `prev_reward` are those of the previous row; models replace them by zeros where `first`.
    """

    observation: Tree
    prev_action: Tree
    prev_reward: Array  # float32, scaled and clipped, but not normalised
    first: Array  # bool: this row starts an episode


@dataclass(frozen=True, eq=False)
class AgentStep(Struct):
    """Outputs of an agent's step: [B] rows."""

    action: Tree
    info: Tree  # stored for training, for example log_prob and value
    state: Tree  # agent state after this row; () without memory


@dataclass(frozen=True, eq=False)
class Samples(Struct):
    """One batch, as a view of the sampler's memory that is valid until its next `collect`.

    The end of an episode is a row: after `terminated | truncated` the last observation is written as an ordinary row
    with `valid` False and an ignored action, and then the environment resets. The next observation is therefore always
    the next row. A lost life sets `terminated` and is followed by a valid row with `first` set, without a reset.

    So an episode is reset where `~valid[t] & first[t+1]`. Other rows that are not valid are absent: nobody acted there
    (a dead agent, an environment that waits), and everything is learned as if they did not exist. They should repeat
    the observation of the row before, from which the end of a batch bootstraps. An environment that waits where `first`
    is set repeats that too, so row t+1 equals row t there, and is no reset.
    """

    inputs: AgentInputs  # [T+1, B]; row T is the first row of the next batch: bootstrap from it
    action: Tree  # [T, B, *act], canonical (see core.spaces)
    reward: Array  # [T, B] float32, the learning reward
    terminated: Array  # [T, B] bool: the MDP ended, do not bootstrap
    truncated: Array  # [T, B] bool: the episode was cut, bootstrap from the next row
    valid: Array  # [T, B] bool: False on an episode's last observation, and where nobody acted
    info: Struct  # [T, B]
    state: Tree  # [B] agent state before row 0
    final_state: Tree  # [B] agent state before row T
    n_env_steps: int = plain()  # counted by whoever sampled, so that nobody reads `valid` on the host to count
    start: int = plain()  # time of row 0 in its stream: where the last batch ended, unless rows were lost between
    stream: int = plain(0)  # who played it: rows of one stream go on where its last batch ended
    n_valid: int = plain(-1)  # valid rows, if several agents share an environment; -1: as many as env steps

    @property
    def n_rows(self) -> int:
        """Valid rows: steps of agents."""
        return self.n_env_steps if self.n_valid < 0 else self.n_valid

    @property
    def observation(self) -> Tree:
        """[T, B]: the observations without row T."""
        return map_tree(lambda x: x[:-1], self.inputs.observation)


@dataclass(frozen=True)
class Trajectory:
    """One finished episode of one environment, with the environment's own rewards."""

    return_: float
    length: int  # env steps
    terminated: bool  # else truncated
    env: int  # index of the environment in its sampler
    diagnostics: dict[str, float] = field(default_factory=dict)  # numbers of the infos, and the user's own statistics
    discounted_return: float = 0.0
    nonzero_rewards: int = 0
    agent: str = ""  # the learner whose agent played it; empty where there is one
    age: int = field(default=0, compare=False)  # rows from its first one to the end of the batch in which it ended
