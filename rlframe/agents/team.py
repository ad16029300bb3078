"""Team: the agents of several policies as one, which acts in environments of many agents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from rlframe.agents.base import Agent, NumpyStep
from rlframe.core.errors import ConfigError
from rlframe.core.multi_agent import OBSERVATION, WAITS, JointSpace, flat, side_by_side_inputs, unflat
from rlframe.core.spaces import zeros
from rlframe.core.struct import Tree, leaves, map_tree, zeros_like
from rlframe.core.types import AgentInputs, AgentStep

_MOST_VIEWS = 1 << 14  # rows
_Given = tuple[AgentInputs, Tree, Any]  # inputs and noise [B * n, ...] of a policy, and who waits [B, n], or ()


class Team(Agent):
    """Acts for the agents of an environment side by side, each policy for its own (see core.multi_agent).

    Inputs, noise, actions and infos are dicts by policy of rows [B, n, ...]. So is the state, with `own`, that of the
    policy's agent, and where agents take turns `begun`: action and info of the step that an agent has not finished,
    which stand in its rows until it has.
    """

    def __init__(self, policies: Mapping[str, Agent], observation_space: JointSpace, action_space: JointSpace) -> None:
        """`policies`: an agent for each policy of the spaces, on one device.

        Raises:
            ConfigError: a policy has no agent, or needs memory where agents take turns.
        """
        super().__init__()
        if missing := [name for name in observation_space.agents if name not in policies]:
            raise ConfigError(f"policy {missing[0]} has no agent; there are agents for {', '.join(policies) or 'none'}")
        for name, agents in observation_space.agents.items():
            if not name or "." in name or hasattr(nn.ModuleDict, name) or name in vars(nn.ModuleDict()):
                raise ConfigError(f"policy {name:.60} of agent {agents[0]}: torch cannot name a module so; rename it")
        self.policies = nn.ModuleDict({name: policies[name] for name in observation_space.agents})
        self.sizes = {name: len(agents) for name, agents in observation_space.agents.items()}
        self.turns = observation_space.turns
        self._begun: dict[str, Tree] = {}  # of one row, in NumPy
        for name, agent in self.agents().items():
            own = observation_space.own[name], action_space.own[name]
            if self.turns:
                self._begun[name] = _first_step(agent, *own)
            if self.turns and (agent.recurrent or agent.uses_previous):
                raise ConfigError(
                    f"policy {name}: agents that take turns have rows in which they wait, which a network with memory "
                    f"or with previous actions would see; use model.memory=none and model.feed_back=false"
                )

    def agents(self) -> dict[str, Agent]:
        return {name: agent for name, agent in self.policies.items() if isinstance(agent, Agent)}

    @torch.inference_mode()
    def step(self, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
        steps = {name: agent.step for name, agent in self.agents().items()}
        given = {name: _of_policy(name, inputs, noise) for name in steps}
        return self._step_all(steps, given, state, torch.where)

    def numpy_step(self, n: int) -> NumpyStep | None:
        steps = {name: agent.numpy_step(n * self.sizes[name]) for name, agent in self.agents().items()}
        own = {name: step for name, step in steps.items() if step is not None}
        if len(own) < len(steps):
            return None

        views = _Views()

        def step(inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
            return self._step_all(own, views.of(inputs, noise), state, np.where)

        return step

    def _step_all(
        self, steps: Mapping[str, NumpyStep], given: Mapping[str, _Given], state: Tree, where: Any
    ) -> AgentStep:
        """The step of each policy's agents in rows [B, n, ...], by what they get; `where` is that of torch or NumPy."""
        action, info, after = {}, {}, {}
        for name, step in steps.items():
            n, (inputs, noise, waits), before = self.sizes[name], given[name], state[name]
            found = step(inputs, flat(before["own"]), noise)
            action[name], info[name] = unflat(found.action, n), unflat(found.info, n)
            after[name] = {"own": unflat(found.state, n)}
            if self.turns:
                begun = _unless(waits, {"action": action[name], "info": info[name]}, before["begun"], where)
                action[name], info[name], after[name]["begun"] = begun["action"], begun["info"], begun
                after[name]["own"] = _unless(waits, after[name]["own"], before["own"], where)
        return AgentStep(action, info, after)

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return {name: agent.noise(rng, (*lead, self.sizes[name])) for name, agent in self.agents().items()}

    def initial_state(self, env_ids: Sequence[int]) -> Tree:
        found: dict[str, Tree] = {}
        for name, agent in self.agents().items():
            n = self.sizes[name]
            columns = [env * n + k for env in env_ids for k in range(n)]
            found[name] = {"own": unflat(agent.initial_state(columns), n)}
            if self.turns:
                begun = zeros_like(self._begun[name], (len(env_ids), n))
                found[name]["begun"] = map_tree(torch.from_numpy, begun)
        return found

    def observe(self, observation: Tree) -> None:
        for name, agent in self.agents().items():
            agent.observe(observation[name][OBSERVATION])

    @contextmanager
    def exploring_at(self, epsilon: float) -> Iterator[None]:
        """As an agent's; policies that do not explore by such a rate keep their own noise, unless all of them do."""
        refused = []
        with ExitStack() as entered:
            for agent in self.agents().values():
                try:
                    entered.enter_context(agent.exploring_at(epsilon))
                except ConfigError as error:
                    refused.append(error)
            if len(refused) == len(self.sizes):
                raise refused[0]
            yield

    @property
    def recurrent(self) -> bool:
        return any(agent.recurrent for agent in self.agents().values())


def _of_policy(name: str, inputs: AgentInputs, noise: Tree) -> _Given:
    own, noise, waits = _parts_of(name, inputs, noise)
    return flat(own), flat(noise), waits


def _parts_of(name: str, inputs: AgentInputs, noise: Tree) -> _Given:
    """The same, [B, n, ...] each; waits () where nobody does."""
    rows = inputs.observation[name]
    return side_by_side_inputs(rows, inputs.prev_action[name]), noise[name], rows.get(WAITS, ())


class _Views:
    """What each policy gets of the rows of a batch, which are the same memory batch by batch; saves 60 us a step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[AgentInputs, Tree, dict[str, _Given]]] = {}  # by the id of inputs, kept alive

    def of(self, inputs: AgentInputs, noise: Tree) -> dict[str, _Given]:
        found = self._known.get(id(inputs))
        if found is not None and found[1] is noise:
            return found[2]
        given = {name: _of_policy(name, inputs, noise) for name in inputs.observation}
        rows = {name: _parts_of(name, inputs, noise) for name in given}
        if all(map(np.may_share_memory, leaves(given), leaves(rows))):
            if len(self._known) >= _MOST_VIEWS:
                self._known.clear()
            self._known[id(inputs)] = inputs, noise, given
        return given


def _unless(waits: Any, new: Tree, old: Tree, where: Any) -> Tree:
    """New rows [B, n, ...], and old ones of who waits [B, n]."""
    return map_tree(lambda x, y: where(waits.reshape(*waits.shape, *[1] * (x.ndim - 2)), y, x), new, old)


def _first_step(agent: Agent, observation_space: Any, action_space: Any) -> Tree:
    """Action and info of one row, in NumPy without a leading dimension."""
    observation, action = zeros(observation_space, (1,)), zeros(action_space, (1,))
    inputs = AgentInputs(observation, action, np.zeros(1, np.float32), np.ones(1, bool)).torch()
    noise = map_tree(torch.from_numpy, agent.no_noise((1,)))
    device = next(agent.parameters()).device
    inputs, noise, state = (
        map_tree(lambda x: x.to(device), each) for each in (inputs, noise, agent.initial_state([0]))
    )
    step = agent.step(inputs, state, noise)
    return map_tree(lambda x: x[0].cpu().numpy(), {"action": step.action, "info": step.info})
