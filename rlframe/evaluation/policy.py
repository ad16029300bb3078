"""A trained policy outside of samplers: `Policy` acts on observations, `GreedyPolicy` is a torch module to export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.agents import Agent
from rlframe.agents.base import AgentState
from rlframe.core import spaces as canonical
from rlframe.core.errors import one_line
from rlframe.core.multi_agent import OBSERVATION
from rlframe.core.spaces import PRIVILEGED
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs
from rlframe.envs import EnvOptions
from rlframe.envs.observations import InvalidValue, check_mask
from rlframe.envs.options import clip_bounds
from rlframe.evaluation.target_policy import TargetPolicy, target_policy

_AS_THEY_ARE = EnvOptions()


class Policy:
    """Acts on observations of the environment, one or a batch; a policy with memory keeps its state between calls."""

    def __init__(
        self,
        agent: Agent,
        observation_space: Space,
        action_space: Space,
        seed: int | Sequence[int] = 0,
        options: EnvOptions = _AS_THEY_ARE,
    ) -> None:
        """`seed`: of the exploration noise.    options: those of the environment, which may scale rewards."""
        self.observation_space, self.action_space = observation_space, action_space
        self._agent = agent
        self._device = next(agent.parameters()).device
        self.greedy = GreedyPolicy(agent, observation_space, action_space, options).to(self._device)
        self._rng = np.random.default_rng(seed)
        self._state: Tree = ()
        self._exploring: Tree = ()  # state of the exploration
        self._n = 0  # rows of the state; 0: an episode starts

    def __repr__(self) -> str:
        return f"Policy(observations {self.observation_space}, actions {self.action_space})"

    def reset(self, ended: Any = None) -> None:
        """Start an episode: forget the previous one. A policy without memory needs no reset.

        Args:
            ended: [B] bool, of a batch: the rows whose episodes start; by default all.
        Raises:
            ValueError: there is not one for each row of the last batch.
        """
        if ended is None or not self._n:
            self._n = 0
            return
        begins = torch.as_tensor(np.asarray(ended, bool))
        if begins.shape != (self._n,):
            raise ValueError(f"ended {list(begins.shape)} must have the shape [{self._n}] of the last batch")

        def begun(new: Any, old: Any) -> Any:
            old = torch.as_tensor(old)
            mask = begins.view(-1, *[1] * (old.dim() - 1)).to(old.device)
            return torch.where(mask, torch.as_tensor(new).to(old.device), old)

        self._state = map_tree(begun, self.greedy.initial_state(self._n), self._state)
        self._exploring = map_tree(begun, self.greedy.exploration_state(self._n), self._exploring)

    @torch.inference_mode()
    def act(self, observation: Any, reward: Any = 0.0, explore: bool = False) -> Any:
        """The action for an observation [*obs], or the actions for a batch of them [B, *obs].

        Args:
            reward: of the previous action, a number or [B], as the environment gives it; only a policy with
                model.feed_back uses it, scaled and clipped as in training.
            explore: act with the exploration noise of training.
        What only critics see may be left out.

        Raises:
            ValueError: the observation does not fit the observation space, or its action mask forbids every action; or
                a batch of another size begins before `reset`, in which a policy with memory would lose its state.
        """
        _check_alone(observation, self.observation_space)
        observation = _in_entries(observation, self.observation_space)
        single = not _check_observation(observation, self.observation_space)
        arrays = map_tree(lambda x: np.asarray(x)[None] if single else np.asarray(x), observation)
        n = len(leaves(arrays)[0])
        self._check_mask(arrays, n)
        rows = map_tree(lambda x: torch.as_tensor(x).to(self._device), arrays)
        if self._n not in (0, n) and leaves(self._state):
            raise ValueError(f"a batch of {n} rows, where the policy has the memory of {self._n}; call reset() before")
        if n != self._n:
            self._state, self._n = self.greedy.initial_state(n), n
            self._exploring = self.greedy.exploration_state(n)
        rewards = torch.as_tensor(np.broadcast_to(np.asarray(reward, np.float32), (n,)).copy()).to(self._device)
        call = self._explore if explore else self.greedy
        actions, self._state = call(rows, self._state, rewards)
        return map_tree(lambda x: as_numpy(x)[0] if single else as_numpy(x), actions)

    def _check_mask(self, rows: Any, n: int) -> None:
        if parts := canonical.mask_parts(self.observation_space, self.action_space):
            try:
                check_mask(rows[canonical.ACTION_MASK], parts, np.zeros(n, bool))
            except InvalidValue as error:
                raise ValueError(str(error)) from None

    def of(self, policy: str) -> Policy:
        """Itself, whatever the name: it is that of all agents. See `TeamPolicy.of`."""
        return self

    def target(self, explore: bool = True, epsilon: float = float("nan")) -> TargetPolicy:
        """The distribution over its actions, for estimates of its worth; see `target_policy`."""
        return target_policy(self._agent, self.observation_space, self.action_space, explore, epsilon)

    def _explore(self, rows: Tree, state: Tree, rewards: torch.Tensor) -> tuple[Tree, Tree]:
        noise = map_tree(lambda x: torch.from_numpy(x).to(self._device), self._agent.noise(self._rng, (len(rewards),)))
        action, state, self._exploring = self.greedy.step(rows, state, rewards, noise, self._exploring)
        return self.greedy.decode(action), state


def _check_alone(observation: Any, space: Space) -> None:
    """Raise ValueError for what env.reset() returns."""
    is_pair = isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict)
    if is_pair and not isinstance(space, spaces.Tuple):
        raise ValueError("this is (observation, info), as env.reset() returns them; give the observation alone")


def _in_entries(observation: Any, space: Space) -> Any:
    """An observation alone as the entry of a Dict, whose others an environment of several agents adds."""
    wanted = isinstance(space, spaces.Dict) and OBSERVATION in space.spaces and not isinstance(observation, Mapping)
    return {OBSERVATION: observation} if wanted else observation


def _check_observation(observation: Any, space: Space, name: str = "observation") -> bool:
    """Check shapes and values; returns whether an observation has one more leading dimension than its space.

    Raises:
        ValueError: it has neither that shape nor the space's, or a value that training refuses.
    """
    match space:
        case spaces.Dict():
            if not isinstance(observation, Mapping):
                kind = type(observation).__name__
                raise ValueError(f"an observation is a dict with {', '.join(space.spaces)}, and this one is a {kind}")
            given = {key: sub for key, sub in space.spaces.items() if key in observation or key != PRIVILEGED}
            if missing := [key for key in given if key not in observation]:
                raise ValueError(f"an observation has no entry {missing[0]!r}: it has {', '.join(observation)}")
            parts = {f"{name}[{key!r}]": (observation[key], sub) for key, sub in given.items()}
        case spaces.Tuple():
            parts = {f"{name}[{i}]": each for i, each in enumerate(zip(observation, space.spaces, strict=True))}
        case _ if isinstance(observation, Mapping):
            keys = one_line(", ".join(map(str, observation)), 100)
            raise ValueError(f"{name} is a dict with {keys}, and this policy takes {space}: give one of them")
        case _:
            return _check_leaf(np.asarray(observation), space, name)
    found = {part: _check_observation(*each, part) for part, each in parts.items()}
    if len({*found.values()}) > 1:
        batch, single = (
            next(part for part, is_batch in found.items() if is_batch == wanted) for wanted in (True, False)
        )
        raise ValueError(f"{batch} is a batch and {single} is not; give both with or without a leading dimension")
    return any(found.values())


def _check_leaf(values: np.ndarray, space: Space, name: str) -> bool:
    shape, own = values.shape, tuple(space.shape or ())
    if own not in (shape, shape[1:]):
        raise ValueError(f"{name} of shape {shape} is neither one of {space} nor a batch of them")
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{name} is of dtype {values.dtype}, and {space} has {space.dtype}")
    if values.dtype.kind == "f" and np.dtype(space.dtype).kind in "iu" and not np.array_equal(values, np.trunc(values)):
        raise ValueError(f"{name} of {values.dtype} has fractions, which {space.dtype} of {space} has not")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError(f"{name} is not finite: {one_line(values, 100)}")
    dtype: Any = np.dtype(space.dtype)
    if values.dtype != dtype and dtype.kind in "iu":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        if not ((values >= least) & (values <= most)).all():
            raise ValueError(f"{name} is outside {dtype}, {least} to {most}: {one_line(values, 100)}")
    if not isinstance(space, spaces.Box):
        first = np.asarray(getattr(space, "start", 0))
        size = getattr(space, "n", 2) if isinstance(space, spaces.Discrete) else getattr(space, "nvec", 2)
        if not ((values >= first) & (values < first + size)).all():
            raise ValueError(f"{name} is outside {space}: {one_line(values, 100)}")
    return shape != own


class GreedyPolicy(nn.Module):
    """(observation [B, ...], state, reward [B]) -> (action [B, ...], state), without noise.

    The state is () unless the policy has memory or sees its previous action; then it is {"memory", "action", "first"},
    and an episode starts with `initial_state`. `reward` is that of the previous action, before it is scaled and clipped
    as `options` say; only such a policy uses it.
    """

    def __init__(
        self, agent: Agent, observation_space: Space, action_space: Space, options: EnvOptions = _AS_THEY_ARE
    ) -> None:
        super().__init__()
        self.agent, self.options = agent, options
        self.observation_space, self.action_space = observation_space, action_space
        for index, (_, box) in enumerate(canonical.action_parts(action_space)):
            if isinstance(box, spaces.Box):
                scale, offset, low, high = canonical.box_scaling(box)
                bounds = {"low": low, "high": high, "scale": scale, "offset": offset}
                for name, value in {**bounds, "least": box.low, "most": box.high}.items():
                    self.register_buffer(f"{name}_{index}", torch.from_numpy(np.asarray(value)))
        self.stateful = agent.recurrent or agent.uses_previous

    def initial_state(self, n: int) -> Tree:
        """The state at the start of n episodes."""
        if not self.stateful:
            return ()
        device = next(self.agent.parameters()).device
        action = map_tree(lambda x: torch.from_numpy(x).to(device), canonical.zeros(self.action_space, (n,)))
        memory = self.agent.parts_of(self.agent.initial_state([0] * n)).memory
        return {"memory": memory, "action": action, "first": torch.ones(n, dtype=torch.bool, device=device)}

    def forward(self, observation: Tree, state: Tree, reward: Tensor) -> tuple[Tree, Tree]:
        inputs, memory = self._inputs(observation, state, reward)
        action, memory = self.agent.greedy(inputs, memory)
        return self.decode(action), self._next_state(action, memory)

    def decode(self, action: Tree) -> Tree:
        """From canonical actions to those of the space; the torch counterpart of `core.spaces.action_decoder`."""
        parts = iter(enumerate(space for _, space in canonical.action_parts(self.action_space)))
        return map_tree(lambda x: self._decoded(*next(parts), x), action)

    def _decoded(self, index: int, space: Space, action: Tensor) -> Tensor:
        match space:
            case spaces.Box():
                low, high, scale, offset, least, most = (
                    getattr(self, f"{name}_{index}") for name in ("low", "high", "scale", "offset", "least", "most")
                )
                clipped = torch.minimum(torch.maximum(action, low), high)
                decoded = (clipped * scale + offset).to(least.dtype)
                return torch.minimum(torch.maximum(decoded, least), most)
            case spaces.Discrete() | spaces.MultiDiscrete():
                return action + torch.as_tensor(np.asarray(space.start)).to(action.device)
            case _:
                return action

    def _inputs(self, observation: Tree, state: Tree, reward: Tensor) -> tuple[AgentInputs, Tree]:
        observation = _as_agents_see(_complete(observation, self.observation_space, reward), self.observation_space)
        if not self.stateful:
            return AgentInputs(observation, (), reward, torch.zeros_like(reward, dtype=torch.bool)), ()
        return AgentInputs(observation, state["action"], self._as_learned(reward), state["first"]), state["memory"]

    def _as_learned(self, reward: Tensor) -> Tensor:
        """The reward as agents saw it in training; what `normalize_reward` scales is for what is learned alone."""
        if self.options.normalize_reward:
            return reward
        if self.options.reward_clip == "sign":
            return reward.sign()
        return (self.options.reward_scale * reward).clamp(*clip_bounds(self.options.reward_clip))

    def exploration_state(self, n: int) -> Tree:
        """The state of the exploration at the start of n episodes, for `step`; its level is the first environment's."""
        return self.agent.parts_of(self.agent.initial_state([0] * n)).explore

    def step(
        self, observation: Tree, state: Tree, reward: Tensor, noise: Tree, explore: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """`Agent.step` with noise: the canonical action, the next state, and that of the exploration."""
        inputs, memory = self._inputs(observation, state, reward)
        step = self.agent.step(inputs, self.agent.joined(AgentState(explore, memory)), noise)
        after = self.agent.parts_of(step.state)
        return step.action, self._next_state(step.action, after.memory), after.explore

    def _next_state(self, action: Tree, memory: Tree) -> Tree:
        if not self.stateful:
            return ()
        one = leaves(action)[0]
        first = torch.zeros(one.shape[0], dtype=torch.bool, device=one.device)
        return {"memory": memory, "action": action, "first": first}


def _complete(observation: Tree, space: Space, like: Tensor) -> Tree:
    """With zeros [B, ...] for what only critics see, if that is left out; `like`: [B], on the same device."""
    if not isinstance(space, spaces.Dict) or PRIVILEGED not in space.spaces or PRIVILEGED in observation:
        return observation
    zeros = map_tree(torch.from_numpy, canonical.zeros(space[PRIVILEGED]))
    rows = map_tree(lambda x: x.to(like.device).expand(like.shape[0], *x.shape), zeros)  # len() ends an export
    return {**observation, PRIVILEGED: rows}


def _as_agents_see(observation: Tree, space: Space) -> Tree:
    """The canonical observation, in its dtype: classes count from 0, float64 becomes float32."""
    match space:
        case spaces.Dict():
            return {key: _as_agents_see(observation[key], sub) for key, sub in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_as_agents_see(x, sub) for x, sub in zip(observation, space.spaces, strict=True))
        case spaces.Discrete() | spaces.MultiDiscrete():
            return observation.long() - torch.as_tensor(np.asarray(space.start)).to(observation.device)
        case _:
            return observation.to(_torch_dtype(np.dtype(space.dtype)))


@cache
def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    """In which agents see numbers of a space of this dtype."""
    return torch.float32 if dtype == np.float64 else torch.from_numpy(np.zeros(0, dtype)).dtype
