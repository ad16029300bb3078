"""DDPG, TD3 and SAC made small, networks whose numbers fit on paper, and batches to learn from."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces

from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.envs import EnvConfig, make_envs
from rlframe.models import ModelConfig
from rlframe.models.network import Layers, Network
from rlframe.optimizers.moments import Moments
from rlframe.replay import InMemory, Transitions
from rlframe.samplers import SerialSampler
from tests.samplers.made import copied

NUMBER = spaces.Box(-9, 9, (1,), np.float32)
LEVEL = spaces.Box(-1, 1, (1,), np.float32)
SMALL: dict[str, Any] = {"batch_size": 8, "replay_ratio": 8.0, "learning_starts": 0}


def learner(
    module: Any,
    observation_space: Space = NUMBER,
    action_space: Space = LEVEL,
    spec: tuple[int, int] = (4, 2),
    n_steps: int = 1000,
    seed: int = 0,
    model: dict[str, Any] | None = None,
    size: int = 1000,
    device: str = "cpu",
    **settings: Any,
) -> Any:
    """An algorithm and its agent."""
    config = module.Config(replay=InMemory(size=size), **SMALL | settings)
    network = ModelConfig(**{"hidden": (), "activation": "relu"} | (model or {}))
    agent = config.make_agent(observation_space, action_space, network, seed).to(device)
    return config.make_algorithm(agent, BatchSpec(*spec), n_steps, seed)


def write_linear(network: Network | Layers, weights: Sequence[Sequence[float]], bias: Sequence[float]) -> None:
    """Make a network without hidden layers compute W x + b."""
    weight, own_bias = network.layers.flat if isinstance(network, Network) else network.flat
    with torch.no_grad():
        weight.copy_(torch.tensor(weights))
        own_bias.copy_(torch.tensor(bias))


def write_critic(critics: Any, i: int, weights: Sequence[Sequence[float]], bias: Sequence[float]) -> None:
    """The same for one of several critics."""
    places = [{"weight": weight[i], "bias": b[i]} for weight, b in critics.network.layers.parameters]
    write_linear(Layers(places, ("none",)), weights, bias)


def inputs_at(observation: Tree) -> AgentInputs:
    nothing = torch.zeros(1)
    return AgentInputs(observation, nothing, nothing, nothing.bool())


def transitions(
    states: list[float], actions: Any, return_: list[float], bootstrap: list[float], next_states: list[float]
) -> Transitions:
    """Of observations [n, 1]; a list of floats for actions [n, 1], of ints for choices [n]."""
    action = torch.tensor(actions)
    return Transitions(
        inputs=inputs_at(torch.tensor(states).unsqueeze(-1)),
        action=action.unsqueeze(-1) if action.is_floating_point() else action,
        return_=torch.tensor(return_),
        bootstrap=torch.tensor(bootstrap),
        next_inputs=inputs_at(torch.tensor(next_states).unsqueeze(-1)),
        weight=torch.ones(len(states)),
        index=np.arange(len(states)),
    )


class OneBatch:
    """In the place of replay: always the same batch."""

    n_rows = n_choices = 1

    def __init__(self, batch: Transitions) -> None:
        self.batch = batch
        self.told = torch.zeros(0)  # the last priorities

    def sample(self, n: int, beta: float = 0.0) -> Transitions:
        return self.batch

    def update_priorities(self, index: np.ndarray, priority: torch.Tensor) -> None:
        self.told = priority


def updated(algo: Any, batch: Transitions) -> dict[str, float]:
    """The metrics of one update on this batch."""
    algo.replay = OneBatch(batch)
    with kept_gradients():
        return {name: float(value) for name, value in algo.update().items()}


@contextmanager
def kept_gradients() -> Iterator[None]:
    """Gradients of the steps inside stay in `.grad` afterwards, as the optimizer got them."""
    kept: dict[torch.nn.Parameter, Any] = {}
    original = Moments.step

    def advance(self: Moments, *arguments: Any) -> None:
        kept.update({p: None if p.grad is None else p.grad.clone() for p in self.parameters})
        original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Moments, "step", advance)
        yield
    for parameter, gradient in kept.items():
        parameter.grad = gradient


def target_q(algo: Any, batch: Transitions) -> torch.Tensor:
    """What the critics of TD3 or DDPG are to come to for these rows [n]."""
    other = copy.deepcopy(algo)
    noise = other.draw_noise(batch.action)
    target = other.values_and_target(batch, noise)[1]
    found: torch.Tensor = batch.return_ + batch.bootstrap * target.squeeze(-1)
    return found


def collected(
    env: Any, agent: Any, n_batches: int, spec: tuple[int, int], seed: int = 0, **kwargs: Any
) -> list[Samples]:
    """Batches that an agent collects, whose levels of exploration stay as they are."""
    T, B = spec
    sampler = SerialSampler(make_envs(EnvConfig(env, kwargs, "python"), B, list(range(B))), agent, T, seed)
    return [copied(sampler.collect()) for _ in range(n_batches)]


def learn(algo: Any, batches: Sequence[Samples]) -> list[dict[str, float]]:
    """Receive batches and make the updates due; the metrics of each."""
    found = []
    for samples in batches:
        algo.receive(samples)
        while algo.updates_due():
            found.append({name: float(value) for name, value in algo.update().items()})
    return found
