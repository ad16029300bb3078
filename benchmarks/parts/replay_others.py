"""Replay of other packages, filled and ready to be sampled; packages that are not installed are left out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box

from rlframe.core.spaces import FrameStack, zeros

Unit = Callable[[], object]
PACKAGES = {"stable_baselines3": "Stable-Baselines3", "tianshou": "Tianshou", "torchrl": "TorchRL"}
BATCH = 1_000  # rows written to TorchRL at once
SB3, TIANSHOU, TORCHRL = PACKAGES.values()


def uniform(observation: Space, action: Space, n: int, size: int) -> dict[str, Unit]:
    """Uniform sampling of n."""
    units: dict[str, Unit] = {}
    if installed("stable_baselines3"):
        units[SB3] = sb3(observation, action, n, size)
    if installed("tianshou"):
        units[TIANSHOU] = tianshou(observation, action, n, size)
    if installed("torchrl"):
        units[TORCHRL] = torchrl(observation, action, n, size)
    return units


def prioritized(observation: Space, action: Space, n: int, size: int) -> dict[str, Unit]:
    """Sampling of n by priority, and setting their priorities."""
    units: dict[str, Unit] = {}
    if installed("tianshou"):
        units[TIANSHOU] = tianshou_prioritized(observation, action, n, size)
    if installed("torchrl"):
        try:
            units[TORCHRL] = torchrl_prioritized(observation, action, n, size)
        except RuntimeError as error:  # its compiled trees need another version of torch
            print(f"without {TORCHRL}'s priorities: {error}")
    return units


def installed(package: str) -> bool:
    """Whether the package can be imported."""
    return importlib.util.find_spec(package) is not None


def sb3(observation: Space, action: Space, n: int, size: int) -> Unit:
    """Stable-Baselines3's buffer of whole stacks; next observations are the next rows, to take half the memory."""
    from stable_baselines3.common.buffers import ReplayBuffer

    buffer = ReplayBuffer(
        size, observation, action, n_envs=1, optimize_memory_usage=True, handle_timeout_termination=False
    )
    buffer.observations[:] = noise(observation, size)[:, None]
    buffer.full = True
    return lambda: buffer.sample(n)


def noise(observation: Space, size: int) -> np.ndarray:
    """Rows [size, ...] of repeating noise, so that memory is really filled, and not the kernel's page of zeros."""
    example = zeros(observation)
    rows = np.random.default_rng(0).integers(1, 255, (min(size, 1_000), *example.shape)).astype(example.dtype)
    return np.resize(rows, (size, *example.shape))


def tianshou(observation: Space, action: Space, n: int, size: int) -> Unit:
    """Tianshou's buffer: frames stored once and stacked when sampled; next observations are the next rows."""
    from tianshou.data import ReplayBuffer

    buffer = fill_tianshou(ReplayBuffer(size, **frames(observation)), observation, action, size)
    return lambda: on_torch(buffer.sample(n)[0])


def tianshou_prioritized(observation: Space, action: Space, n: int, size: int) -> Unit:
    """The same, by priority."""
    from tianshou.data import PrioritizedReplayBuffer

    made = PrioritizedReplayBuffer(size, alpha=0.6, beta=0.4, **frames(observation))
    buffer = fill_tianshou(made, observation, action, size)
    buffer.init_weight(np.arange(size))
    priorities = np.random.default_rng(0).random((64, n))

    def unit() -> None:
        batch, index = buffer.sample(n)
        on_torch(batch)
        buffer.update_weight(index, priorities[index[0] % 64])

    return unit


def frames(observation: Space) -> dict[str, Any]:
    """Options of a buffer of frames."""
    if isinstance(observation, FrameStack):
        return {"stack_num": observation.n_frames, "ignore_obs_next": True, "save_only_last_obs": True}
    return {"ignore_obs_next": True}


def fill_tianshou(buffer: Any, observation: Space, action: Space, size: int) -> Any:
    """Fill it at once, as its `from_data` does: a million rows by `add` take minutes."""
    from tianshou.data import Batch

    newest = Box(0, 255, observation.shape[1:], np.uint8) if isinstance(observation, FrameStack) else observation
    never = np.zeros(size, np.bool_)
    ends = {"terminated": never, "truncated": never, "done": never}
    buffer.set_batch(Batch(obs=noise(newest, size), act=zeros(action, (size,)), rew=np.zeros(size), **ends))
    buffer._size = size
    return buffer


def on_torch(batch: Any) -> Any:
    """Convert to torch, as Tianshou's algorithms do first."""
    batch.to_torch_()
    return batch


def torchrl(observation: Space, action: Space, n: int, size: int) -> Unit:
    """TorchRL's buffer of rows of a TensorDict; stacks are stored as they are."""
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=n)
    return fill_torchrl(buffer, observation, action, size).sample


def torchrl_prioritized(observation: Space, action: Space, n: int, size: int) -> Unit:
    """The same, by priority."""
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

    storage = LazyTensorStorage(size)
    made = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=n)
    buffer = fill_torchrl(made, observation, action, size)
    priorities = torch.rand((64, n))

    def unit() -> None:
        drawn = buffer.sample()
        buffer.update_priority(drawn["index"], priorities[int(drawn["index"][0]) % 64])

    return unit


def fill_torchrl(buffer: Any, observation: Space, action: Space, size: int) -> Any:
    """Fill it in batches."""
    from tensordict import TensorDict

    n = min(BATCH, size)
    rows, act = torch.from_numpy(noise(observation, n)), torch.from_numpy(np.asarray(zeros(action, (n,))))
    after = {"observation": rows, "reward": torch.zeros(n, 1), "terminated": torch.zeros(n, 1, dtype=torch.bool)}
    for _ in range(size // n):
        buffer.extend(TensorDict({"observation": rows, "action": act, "next": TensorDict(after, [n])}, [n]))
    return buffer
