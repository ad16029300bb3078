"""Serial, CPU-parallel and GPU-batched samplers fill the same batches, array for array, however columns are split.

Where the processor gives a row the same bits among any number of others; `same_bits` looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlframe.envs import debug_envs
from rlframe.samplers import Sampler
from tests.samplers.made import assert_batches_equal, copied, split
from tests.variants import variants

N_BATCHES = 4
SPLITS = ["cpu1", "cpu2", "cpu3", "gpu1", "gpu2", "gpu3", "alternating2", "alternating3"]


def history(made: tuple[Sampler, Any]) -> Iterator[Any]:
    """Batches and episodes; the parameters change between batches."""
    each, agent = made
    with closing(each):
        for _ in range(N_BATCHES):
            samples = copied(each.collect())
            agent.observe(samples.inputs.observation)
            for parameter in agent.parameters():
                parameter.data += 0.01
            each.refresh(agent)
            yield samples, each.trajectories()


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lstm": {"memory": "lstm", "feed_back": True},
    "normalized": {"normalize_observation": True},
}


FAST = ["cpu1-plain", "cpu2-normalized", "cpu3-lstm", "gpu1-plain", "gpu2-normalized", "gpu3-plain"]
FAST += ["alternating2-plain", "alternating3-lstm"]  # each split once
EACH = variants((f"{how}-{model}" for how in SPLITS for model in MODELS), FAST)


@pytest.mark.same_bits
@pytest.mark.parametrize("case", EACH)
def test_every_sampler_gives_the_batches_of_the_serial_one(case: str) -> None:
    kwargs, (how, model) = {"max_episode_steps": 9}, case.split("-")
    one = list(history(split("serial", "Pendulum-v1", kwargs, 3, **MODELS[model])))
    other = list(history(split(how, "Pendulum-v1", kwargs, 3, **MODELS[model])))
    assert_batches_equal(one, other)


class Pictures(gymnasium.Env):
    """Two images of noise from its generator, one of which the last action brightens; episodes of 4 steps."""

    observation_space = spaces.Dict({name: spaces.Box(0, 255, (1, 84, 84), np.uint8) for name in ("one", "two")})
    action_space = spaces.Discrete(3)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**kwargs)
        self.time = 0
        return self._observe(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self._observe(int(action)), float(action), self.time == 4, False, {}

    def _observe(self, action: int) -> dict[str, np.ndarray]:
        one, two = self.np_random.integers(0, 128, (2, 1, 84, 84), np.uint8)
        return {"one": one, "two": two + np.uint8(60 * action)}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param("transformer", "cpu2", marks=pytest.mark.same_bits("transformer")),
        pytest.param("transformer", "alternating2", marks=pytest.mark.same_bits("transformer")),
        pytest.param("images", "cpu2", marks=[pytest.mark.same_bits("images"), pytest.mark.slow]),  # as the transformer
        pytest.param("images", "alternating2", marks=pytest.mark.same_bits("images")),
    ],
)
def test_agents_that_act_in_torch_give_the_batches_of_the_serial_sampler(kind: str, how: str) -> None:
    env: Any = Pictures if kind == "images" else "Pendulum-v1"
    kwargs, model = ({}, {}) if kind == "images" else ({"max_episode_steps": 9}, {"memory": kind, "memory_window": 4})
    one, other = (split(each, env, kwargs, 3, **model) for each in ("serial", how))
    assert one[1].numpy_step(4) is None
    assert_batches_equal(list(history(one)), list(history(other)))


@pytest.mark.same_bits
@pytest.mark.parametrize("how", ["alternating2", pytest.param("cpu2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["spawn"])  # the tests above have forkserver
def test_the_start_method_changes_nothing(how: str, method: str) -> None:
    one = list(history(split("serial", debug_envs.memory, seed=1)))
    other = list(history(split(how, debug_envs.memory, seed=1, method=method)))
    assert_batches_equal(one, other)
