"""Environments of several agents: which policy acts for whom, their spaces side by side, and the rows of each policy.

What the agents of an environment observe and do is one Dict, with an entry for each policy, in which its n agents stand
side by side: [n, ...]. So an environment is a column of a batch, as one with a single agent is. Beside what agents
observe, their entry says what happened to each in the step before. `columns_of` makes batches of it whose columns are
agents, which any algorithm learns from: an agent that is dead, has not come yet or waits for its turn is absent there.
`joint_of` keeps the agents of a policy side by side, for algorithms that learn from all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rlframe.core.errors import ConfigError
from rlframe.core.spaces import (
    ACTION_MASK,
    action_parts,
    mask_parts,
    ordered_dict,
    random_action,
    random_allowed,
    zeros,
)
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.core.types import AgentInputs, Samples

# Entries of what a policy's agents observe, each [n, ...] (see `observation_of`).
OBSERVATION, REWARD, FIRST = "observation", "reward", "first"
TERMINATED, TRUNCATED, VALID, WAITS = "terminated", "truncated", "valid", "waits"
SHARED = "shared"  # the policy of all agents, if none is named


@dataclass(frozen=True)
class PolicyMap:
    """Which policy acts for which agent. Picklable, so that a worker process can make its own environments."""

    patterns: Mapping[str, str] = field(default_factory=dict)  # agent's name, or a pattern such as prey_*: policy
    function: str = ""  # module:function of (agent, episode) that returns a policy
    policies: tuple[str, ...] = ()  # all of them; (): one for all agents
    global_state: str = ""  # true, or module:function of the agents' observations, for critics alone
    agent_id: bool = False  # agents observe which one they are
    opponents: int = 0  # of a league: policies beside the shared one, see `seats`
    self_play: float = 0.0  # share of a league's episodes in which the shared policy plays all seats

    def of(self, agent: str) -> str:
        """The policy of an agent by its name: the first pattern that fits it, or else the policy that it begins with.

        Raises:
            ConfigError: there is none.
        """
        for pattern, policy in self.patterns.items():
            if fnmatchcase(agent, pattern):
                return policy
        if not self.policies:
            return SHARED
        found = [policy for policy in self.policies if agent == policy or agent.startswith(f"{policy}_")]
        if not found:
            raise ConfigError(
                f"agent {agent} has no policy: the policies are {', '.join(self.policies)}; give it one by agents.map, "
                f"such as agents.map.{agent}={self.policies[0]}"
            )
        return max(found, key=len)

    def seats(self, agents: Sequence[str], rng: np.random.Generator) -> dict[str, tuple[str, int]]:
        """Of a league's episode: the policy of each agent, and its row there.

        The shared policy has a row for each agent. It plays one of them, chosen at random, and an opponent all others;
        or it plays all.
        """
        chosen, self_play = int(rng.integers(len(agents))), rng.random() < self.self_play
        opponent = opponent_name(int(rng.integers(self.opponents)))
        others = [agent for k, agent in enumerate(agents) if k != chosen and not self_play]
        return {
            agent: (opponent, others.index(agent)) if agent in others else (SHARED, k) for k, agent in enumerate(agents)
        }


_OPPONENT = "opponent_"


def opponent_name(index: int) -> str:
    """The policy of an opponent of a league."""
    return f"{_OPPONENT}{index}"


def is_opponent(policy: str) -> bool:
    """Whether it is an opponent of a league, whose rows are other agents in every episode."""
    return policy.startswith(_OPPONENT)


class JointSpace(spaces.Dict):
    """Observations or actions of an environment's agents: an entry for each policy, of its n agents side by side."""

    def __init__(self, entries: Mapping[str, Space], own: Mapping[str, Space], agents: Mapping[str, tuple[str, ...]]):
        """Args:
        entries: of all agents of each policy.    own: of one agent.    agents: their names, in the order of rows.
        """
        super().__init__(dict(entries))
        self.own, self.agents = dict(own), dict(agents)

    def part(self, policy: str) -> JointSpace:
        """That of a policy alone."""
        return JointSpace({policy: self[policy]}, {policy: self.own[policy]}, {policy: self.agents[policy]})

    @property
    def turns(self) -> bool:
        """Whether agents act in turn."""
        return any(isinstance(entry, spaces.Dict) and WAITS in entry.spaces for entry in self.spaces.values())

    def absent(self) -> list[np.ndarray]:
        """The leaves of agents that have not come: 0, or what is nearest to it within the bounds."""
        parts = [space for _, space in action_parts(self)]
        blank = zip(leaves(zeros(self)), parts, strict=True)
        return [np.clip(x, box.low, box.high) if isinstance(box, spaces.Box) else x for x, box in blank]


class JointRows(dict[str, dict[str, Any]]):
    """What happened to the agents of all policies in one environment: arrays of a JointSpace's shapes and dtypes.

    They are an environment's own, which writes them again and again, so that they need no check.
    """

    def write(self, rows: Tree, index: int) -> None:
        """Copy them into row `index` of rows [B, ...]."""
        for policy, own in self.items():
            to = rows[policy]
            for key, value in own.items():
                if isinstance(value, np.ndarray):
                    to[key][index] = value
                else:
                    for row, part in zip(leaves(to[key]), leaves(value), strict=True):
                        row[index] = part


def joint(in_spaces: tuple[Space, Space]) -> tuple[JointSpace, JointSpace]:
    """The spaces of an environment of several agents."""
    observations, actions = in_spaces
    assert isinstance(observations, JointSpace) and isinstance(actions, JointSpace)
    return observations, actions


def observation_of(own: Space, n: int, turns: bool) -> spaces.Dict:
    """What the n agents of a policy observe, and what happened to them in the step before.

    reward: what an agent got; first: its episode starts; terminated, truncated: it ended; valid: the agent acted in
    that step, or with `turns` finished a step that it began earlier; waits: it has begun one that is not finished.
    """
    names = (FIRST, TERMINATED, TRUNCATED, VALID, WAITS) if turns else (FIRST, TERMINATED, TRUNCATED, VALID)
    flag: Any = np.bool_
    flags = {name: spaces.Box(0, 1, (n,), flag) for name in names}
    reward = spaces.Box(-np.inf, np.inf, (n,), np.float32)
    return spaces.Dict({OBSERVATION: side_by_side(own, n, canonical=True), REWARD: reward, **flags})


def side_by_side(space: Space, n: int, canonical: bool = False) -> Space:
    """The space of n values of a space, along a new first dimension; of canonical ones (see core.spaces) if asked."""
    match space:
        case spaces.Dict():
            return ordered_dict({key: side_by_side(part, n, canonical) for key, part in space.items()})
        case spaces.Tuple():
            return spaces.Tuple([side_by_side(part, n, canonical) for part in space])
        case spaces.Box():
            dtype = np.float32 if canonical and space.dtype == np.float64 else space.dtype
            low, high = (np.repeat(bound[None], n, 0).astype(dtype) for bound in (space.low, space.high))
            return spaces.Box(low, high, (n, *space.shape), dtype)
        case spaces.Discrete():
            return spaces.MultiDiscrete(np.full(n, space.n), start=np.full(n, 0 if canonical else space.start))
        case spaces.MultiDiscrete():
            start = np.zeros_like(space.start) if canonical else space.start
            return spaces.MultiDiscrete(np.repeat(space.nvec[None], n, 0), start=np.repeat(start[None], n, 0))
        case spaces.MultiBinary():
            return spaces.MultiBinary((n, *space.shape))
    raise ConfigError(f"{space} is not supported; use Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple")


def flat(tree: Tree) -> Tree:
    """Rows [B, n, ...] as [B * n, ...], in NumPy or torch; without a copy where rows are in one piece of memory."""
    if isinstance(tree, np.ndarray):  # most are, and a tree takes longer
        return tree.reshape(-1, *tree.shape[2:])
    return map_tree(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def unflat(tree: Tree, n: int) -> Tree:
    """Rows [B * n, ...] as [B, n, ...]."""
    if isinstance(tree, np.ndarray):
        return tree.reshape(-1, n, *tree.shape[1:])
    return map_tree(lambda x: x.reshape(-1, n, *x.shape[1:]), tree)


def has_masks(observation_space: Space, action_space: Space) -> bool:
    """Whether masks say which actions are allowed, to an agent or to one of several."""
    if isinstance(observation_space, JointSpace) and isinstance(action_space, JointSpace):
        return any(has_masks(own, action_space.own[name]) for name, own in observation_space.own.items())
    return bool(mask_parts(observation_space, action_space))


def random_actions(
    observation_space: Space, action_space: Space, observation: Tree, rngs: Sequence[np.random.Generator]
) -> Tree:
    """Uniform canonical actions [B, ...], where there are masks among those that observations [B, ...] allow.

    Args:
        rngs: one generator for each environment.
    """
    if isinstance(observation_space, JointSpace) and isinstance(action_space, JointSpace):
        found = {}
        for policy, agents in observation_space.agents.items():
            own, done, n = observation_space.own[policy], action_space.own[policy], len(agents)
            each = [rng for rng in rngs for _ in range(n)]
            found[policy] = unflat(random_actions(own, done, flat(observation[policy][OBSERVATION]), each), n)
        return found
    if parts := mask_parts(observation_space, action_space):
        return random_allowed(action_space, parts, observation[ACTION_MASK], rngs)
    drawn = [random_action(action_space, rng, 1) for rng in rngs]
    return map_tree(lambda *each: np.concatenate(each), *drawn)


def acting(rows: Mapping[str, Any]) -> Any:
    """Whether each agent acts in a row, [..., n] bool, by the flags of its entry; not where agents take turns."""
    return rows[FIRST] | (rows[VALID] & ~rows[TERMINATED] & ~rows[TRUNCATED])


def present(rows: Mapping[str, Any]) -> Any:
    """Whether each agent counts in the value of a row, [..., n] bool: those that act there.

    In the last row of an episode, in which nobody acts, those that were truncated: their values are bootstrapped from.
    An agent that is truncated while others act on has no value from then on, as if it were terminated.
    """
    acts = acting(rows)
    return acts | (rows[VALID] & rows[TRUNCATED] & ~rows[TERMINATED] & ~acts.any(-1)[..., None])


def joint_of(samples: Samples, policy: str) -> Samples:
    """A batch [T, B] of environments of several agents with what belongs to one policy, its agents side by side.

    Row t has the observations [n, ...] and flags of all its agents (see `observation_of`), and their actions [n, ...].
    The reward is the sum of theirs. A row is valid where one of them acted. The team's episode ends with that of the
    environment, or when none of them is left: terminated, unless one was truncated in that step.
    """
    found = _of_policy(samples, policy)
    rows, valid, terminated, truncated = found.inputs.observation, found.valid, found.terminated, found.truncated
    if WAITS not in rows:
        valid = valid & rows[VALID][1:].any(-1)
        over = valid & ~acting(rows)[1:].any(-1)
        terminated = over & ~rows[TRUNCATED][1:].any(-1)
        truncated = (valid & truncated | over) & ~terminated
    flags = {"valid": valid, "terminated": terminated, "truncated": truncated, "n_valid": int(valid.sum())}
    return replace(found, reward=rows[REWARD][1:].sum(-1), **flags)


def _of_policy(samples: Samples, policy: str) -> Samples:
    """What belongs to one policy, with rewards and flags of the environments."""
    inputs = samples.inputs
    own = AgentInputs(inputs.observation[policy], inputs.prev_action[policy], inputs.prev_reward, inputs.first)
    return replace(
        samples,
        inputs=own,
        action=samples.action[policy],
        info=samples.info[policy],
        state=samples.state[policy]["own"],
        final_state=samples.final_state[policy]["own"],
    )


def columns_of(samples: Samples, policy: str) -> Samples:
    """A batch [T, B] of environments of several agents as that of one policy, [T, B * n], with agents as columns.

    An agent's row is valid if it acted in it. Column b * n + k is agent k of environment b. Arrays are views where
    possible; `state` of the batch is that of a Team.
    """
    return agents_of(_of_policy(samples, policy))


def agents_of(samples: Samples) -> Samples:
    """A batch of `joint_of` with agents as columns, as of `columns_of`."""
    inputs, rows = samples.inputs, samples.inputs.observation
    terminated, valid = rows[TERMINATED][1:], rows[VALID][1:] & samples.valid[..., None]
    cut = samples.truncated[..., None]  # a time limit, or an environment that had to be made again
    if WAITS in rows:  # then steps that are not finished end too
        valid = valid | (cut & rows[WAITS][1:])
    truncated = (rows[TRUNCATED][1:] | cut) & ~terminated
    columns = _columns
    return Samples(
        inputs=columns(side_by_side_inputs(rows, inputs.prev_action)),
        action=columns(samples.action),
        reward=columns(rows[REWARD][1:]),
        terminated=columns(terminated & valid),
        truncated=columns(truncated & valid),
        valid=columns(valid),
        info=columns(samples.info),
        state=flat(samples.state),
        final_state=flat(samples.final_state),
        n_env_steps=samples.n_env_steps,
        start=samples.start,
        stream=samples.stream,
        n_valid=int(valid.sum()),
    )


def side_by_side_inputs(rows: Mapping[str, Any], prev_action: Tree) -> AgentInputs:
    """What the agents of a policy get, [..., n], by their entry of observations (see `observation_of`)."""
    return AgentInputs(rows[OBSERVATION], prev_action, rows[REWARD], rows[FIRST])


def agent_rows(inputs: AgentInputs) -> AgentInputs:
    """The inputs [N, n, ...] of a policy's agents side by side as rows of their own, [N * n, ...]."""
    return flat(side_by_side_inputs(inputs.observation, inputs.prev_action))


def _columns(tree: Tree) -> Any:
    """[T, B, n, ...] as [T, B * n, ...]."""
    return map_tree(lambda x: x.reshape(len(x), x.shape[1] * x.shape[2], *x.shape[3:]), tree)
