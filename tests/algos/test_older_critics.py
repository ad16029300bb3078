"""Critics that were saved while each had parameters of its own go on as one network of many.

`fixtures/critics_apart` holds, of SAC, TD3 and DDPG on Pendulum with hidden layers of 5 and 4, what they saved of their
critics and these critics' values of six observations and actions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from torch import Tensor

from rlframe.algos import ddpg, sac, td3
from rlframe.core.types import BatchSpec
from rlframe.models import ModelConfig
from rlframe.record.snapshot import load_snapshot
from rlframe.replay import ReplayConfig

MODULES: dict[str, Any] = {"sac": sac, "td3": td3, "ddpg": ddpg}


@pytest.mark.parametrize("name", MODULES)
def test_critics_and_their_moments_are_those_that_were_saved(name: str) -> None:
    saved = load_snapshot(Path(__file__).parent / "fixtures/critics_apart")[0][name]
    config = MODULES[name].Config(replay=ReplayConfig(size=100))
    with gymnasium.make("Pendulum-v1") as env:
        observation_space, action_space = env.observation_space, env.action_space
    agent = config.make_agent(observation_space, action_space, ModelConfig(hidden=(5, 4), activation="relu"), 1)
    algo = config.make_algorithm(agent, BatchSpec(4, 2), 1000, 1)
    critics = algo.critic if name == "ddpg" else algo.critics
    targets = algo.target_critic if name == "ddpg" else algo.target_critics
    moments: dict[int, Any] = saved["critic_updater"]["state"]
    shapes = [tuple(state["exp_avg"].shape) for state in moments.values()]
    older = {key: saved[key] for key in saved if "critic" in key}
    algo.load_state_dict({**algo.state_dict(), **older})
    observation, action = torch.linspace(-1, 1, 18).view(6, 3), torch.linspace(-1, 1, 6).view(6, 1)
    with torch.no_grad():
        torch.testing.assert_close(critics(observation, action), saved["q"])
        torch.testing.assert_close(targets(observation, action), saved["target_q"])
    assert shapes[:6] == [(5, 4), (5,), (4, 5), (4,), (1, 4), (1,)]
    found = algo.critic_updater.state_dict()["state"]
    for j, state in found.items():
        apart = [moments[j + 6 * i] for i in range(len(critics.perceptrons))]
        for part in ("exp_avg", "exp_avg_sq"):
            expected: list[Tensor] = [each[part] for each in apart]
            torch.testing.assert_close(state[part], torch.stack(expected))
        assert float(state["step"]) == float(apart[0]["step"]) > 0
    again = algo.state_dict()
    algo.load_state_dict(again)  # and what is saved now loads as it is
    torch.testing.assert_close(algo.state_dict()["critic_updater"]["state"], found)
