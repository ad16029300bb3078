"""rlframe's side of benchmarks/updates.py: an algorithm whose replay is full of random rows."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import chz
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, Space

from benchmarks.parts.turns import Unit
from rlframe.algos import Algorithm, cql, dqn, iql, sac, td3, td3_bc
from rlframe.core.spaces import FrameStack, random_action
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.experiment.presets import load_preset
from rlframe.experiment.settings import from_flat
from rlframe.kernels.device import choose_precision, learning_in
from rlframe.models import ModelConfig
from rlframe.replay import InMemory
from rlframe.replay.make import Stored
from rlframe.updates.compiled import CompileChoice, compiling

UPDATES = 10  # in one unit
_MODULES: dict[str, Any] = {"sac": sac, "td3": td3, "dqn": dqn, "td3_bc": td3_bc, "iql": iql, "cql": cql}
_FRAMES = 4  # in a stack


@dataclass(frozen=True)
class Case:
    """An algorithm, the spaces it sees, and its sizes."""

    algo: str  # its module
    observation_shape: tuple[int, ...]  # of floats; with three numbers, of a stack of frames
    n_actions: int  # numbers of an action, or of choices for dqn
    hidden: tuple[int, ...]  # (): those of the preset
    batch_size: int
    rows: int  # in replay
    preset: str = ""  # whose other keys of `algo` and `model` it has

    def observation_space(self) -> Box:
        """The space: floats without bounds, or bytes."""
        if len(self.observation_shape) == 3:
            return FrameStack(Box(0, 255, self.observation_shape, np.uint8), _FRAMES)
        return Box(-np.inf, np.inf, self.observation_shape, np.float32)

    def action_space(self) -> Space:
        """The canonical action space."""
        return Discrete(self.n_actions) if self.algo == "dqn" else Box(-1, 1, (self.n_actions,), np.float32)


def updates(case: Case, stack: ExitStack) -> Unit:
    """Updates, sampling included, compiled, in the precision that launch chooses."""
    stack.enter_context(learning_in(choose_precision("auto", torch.device("cpu"))))
    stack.enter_context(compiling(CompileChoice(True)))
    learner = learner_of(case)

    def unit() -> int:
        for _ in range(UPDATES):
            learner.update()
        return UPDATES

    return unit


def learner_of(case: Case, device: str = "cpu", kind: type[Stored] = InMemory) -> Algorithm:
    """The algorithm of a case on a device, with replay of a kind, which is full."""
    replay = kind(size=case.rows + 100)
    settings: dict[str, Any] = {"replay": replay, "batch_size": case.batch_size, "learning_starts": 0}
    if case.preset:
        experiment = from_flat(load_preset(case.preset), {"algo.discount": 0.99})  # auto needs an environment
        network = experiment.model
        if case.hidden:
            critic = chz.replace(network.critic, hidden=case.hidden)
            network = chz.replace(network, hidden=case.hidden, critic=critic)
        config = chz.replace(experiment.algo, **settings)
    else:
        network = ModelConfig(hidden=case.hidden, activation="relu")
        config = _MODULES[case.algo].Config(**settings)
    agent = config.make_agent(case.observation_space(), case.action_space(), network, 0).to(device)
    learner = config.make_algorithm(agent, BatchSpec(case.rows, 1), 10**9, 0)
    learner.receive(random_samples(case))
    return learner


def random_observations(case: Case, n: int) -> np.ndarray:
    """Random observations [n, 1, *observation]; stacks of frames continue each other."""
    rng = np.random.default_rng(0)
    if len(case.observation_shape) == 3:
        frames = rng.integers(0, 256, (n + _FRAMES - 1, *case.observation_shape[1:]), np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(frames, _FRAMES, axis=0)
        return windows.transpose(0, 3, 1, 2)[:, None]
    return rng.standard_normal((n, 1, *case.observation_shape), np.float32)


def random_samples(case: Case) -> Samples:
    """One batch of one environment, without episode ends."""
    rng, rows = np.random.default_rng(0), case.rows
    action = torch.from_numpy(random_action(case.action_space(), rng, rows + 1))[:, None]
    reward = torch.from_numpy(rng.standard_normal((rows + 1, 1), np.float32))
    never = torch.zeros(rows + 1, 1, dtype=torch.bool)
    observation = torch.from_numpy(np.ascontiguousarray(random_observations(case, rows + 1)))
    return Samples(
        inputs=AgentInputs(observation, action, reward, never),
        action=action[1:],
        reward=reward[1:],
        terminated=never[1:],
        truncated=never[1:],
        valid=~never[1:],
        info=(),  # type: ignore[arg-type]  # for acting, which is unused
        state=(),
        final_state=(),
        n_env_steps=rows,
        start=0,
    )
