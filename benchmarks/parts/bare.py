"""The parts of a sampler's limit: plain environments stepped in a loop, and acting in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.parts.synthetic import N_ACTIONS
from benchmarks.parts.turns import Unit
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs.atari import ALE_DEFAULTS, register_atari

N_PONG = 6  # actions of Pong
N_CHEETAH = 6  # joints of HalfCheetah
CHEETAH_LIMIT = 1000  # steps of its episodes
_HALF_LOG_TWO_PI = 0.9189385332046727


def mlp(n_in: int, hidden: int, n_out: int) -> nn.Sequential:
    """Two hidden layers of tanh."""
    return nn.Sequential(
        *(nn.Linear(n_in, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, n_out))
    )


class Vectors(nn.Module):
    """Two networks, for policy and value; the standard deviation of a Gaussian does not depend on the observation."""

    def __init__(self, n_in: int, hidden: int, n_out: int) -> None:
        super().__init__()
        self.policy, self.value, self.n_in = mlp(n_in, hidden, n_out), mlp(n_in, hidden, 1), n_in
        self.log_std = nn.Parameter(torch.zeros(n_out))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(observation), self.value(observation)

    def example(self, n: int) -> Tensor:
        """Observations of n environments."""
        return torch.rand(n, self.n_in)


class Pixels(nn.Module):
    """The Nature CNN with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()),
        )
        self.policy, self.value = nn.Linear(512, N_PONG), nn.Linear(512, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(observation.float() * (1 / 255))
        return self.policy(features), self.value(features)

    def example(self, n: int) -> Tensor:
        """Observations of n environments."""
        return torch.randint(0, 256, (n, 4, 84, 84), dtype=torch.uint8)


Acting = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]  # (network, observation, noise)


@torch.inference_mode()
def act_discrete(network: nn.Module, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sampled actions [B], their log-probabilities and values; `noise` is Gumbel's."""
    logits, value = network(observation)
    action = (logits + noise).argmax(-1)
    return action, logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)), value


@torch.inference_mode()
def act_gaussian(network: Vectors, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for Gaussian actions [B, actions]; `noise` is standard normal."""
    mean, value = network(observation)
    log_std = network.log_std
    return mean + log_std.exp() * noise, (-0.5 * noise**2 - log_std - _HALF_LOG_TWO_PI).sum(-1), value


@dataclass(frozen=True)
class Policy:
    """A network at its initial weights, and how it acts. Noise is drawn beforehand."""

    network: Callable[[], Any]
    act: Acting
    n_noise: int  # numbers for an action

    def noise(self, T: int, n: int) -> Tensor:
        """For T time steps of n environments [T, n, n_noise]."""
        rng, shape = np.random.default_rng(0), (T, n, self.n_noise)
        drawn = rng.standard_normal(shape) if self.act is act_gaussian else rng.gumbel(size=shape)
        return torch.from_numpy(drawn.astype(np.float32))


def forward(policy: Policy, n: int, T: int, stack: ExitStack) -> Unit:
    """Act for fixed observations."""
    network, act, noise = policy.network(), policy.act, policy.noise(T, n).unbind()
    observation = network.example(n)

    def unit() -> int:
        for row in noise:
            act(network, observation, row)
        return T * n

    return unit


@dataclass(frozen=True)
class Steps:
    """Plain environments, and the actions to step them with."""

    make: Callable[[], gymnasium.Env]
    draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]  # for T time steps of n
    limit: int = 0  # steps after which all are reset, between units; 0: never


def stepping(steps: Steps, n: int, T: int, stack: ExitStack) -> Unit:
    """Step plain environments one by one."""
    envs = [stack.enter_context(closing(steps.make())) for _ in range(n)]
    actions = [list(row) for row in steps.draw(np.random.default_rng(0), (T, n))]
    elapsed = steps.limit

    def unit() -> int:
        nonlocal elapsed
        if elapsed >= steps.limit:
            elapsed = 0
            for env in envs:
                env.reset()
        for row in actions:
            for env, action in zip(envs, row, strict=True):
                env.step(action)
        elapsed += T
        return T * n

    return unit


def burning_actions(rng: np.random.Generator, lead: tuple[int, int]) -> np.ndarray:
    """The environment ignores them."""
    return rng.integers(N_ACTIONS, size=lead)


def cheetah() -> gymnasium.Env:
    """HalfCheetah without Gymnasium's wrappers."""
    return gymnasium.make("HalfCheetah-v5", disable_env_checker=True).unwrapped


def cheetah_actions(rng: np.random.Generator, lead: tuple[int, int]) -> np.ndarray:
    """Sampled like those of a new policy, and clipped as rlframe does."""
    return rng.standard_normal((*lead, N_CHEETAH)).clip(-1, 1).astype(np.float32)


def pong(n: int, n_threads: int, stack: ExitStack) -> Any:
    """The vector environment that rlframe steps, without rlframe."""
    register_atari()
    options = {**ALE_DEFAULTS, "num_threads": n_threads, "reward_clipping": False, "episodic_life": False}
    made = gymnasium.make_vec("ALE/Pong-v5", num_envs=n, vectorization_mode="vector_entry_point", **options)
    env: Any = stack.enter_context(closing(made))
    env.reset(seed=np.asarray(env_seeds(0, Role.ENV, n)))
    return env


def pong_stepping(n: int, n_threads: int, T: int, stack: ExitStack) -> Unit:
    """Step the bare environment with actions drawn beforehand."""
    env = pong(n, n_threads, stack)
    actions = np.random.default_rng(0).integers(N_PONG, size=(T, n))

    def unit() -> int:
        for action in actions:
            env.step(action)
        return T * n

    return unit


def pong_loop(policy: Policy, n: int, n_threads: int, T: int, stack: ExitStack) -> Unit:
    """Act and step in turn; nothing is stored."""
    env, network, noise = pong(n, n_threads, stack), policy.network(), policy.noise(T, n)
    observation = torch.zeros_like(network.example(n))

    def unit() -> int:
        nonlocal observation
        for t in range(T):
            action, _, _ = policy.act(network, observation, noise[t])
            observation = torch.from_numpy(env.step(action.numpy())[0])
        return T * n

    return unit
