"""agents.agent_id=true: each agent observes which one it is, whatever else it observes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pettingzoo")

from gymnasium import spaces

from rlframe.core.multi_agent import PolicyMap
from rlframe.envs import EnvOptions
from rlframe.envs.multi_agent import MultiAgentEnv
from tests.agents_envs import Crowd, Turns


def test_agents_observe_their_number_among_all_that_may_come() -> None:
    env = MultiAgentEnv(Crowd(4, kinds=2), PolicyMap(policies=("even", "odd"), agent_id=True), EnvOptions())
    env.reset(seed=1)
    seen = {"even": set(), "odd": set()}
    for _ in range(30):
        rows, *_, over, cut, _ = env.step({name: np.zeros(2, np.int64) for name in ("even", "odd")})
        for name, entry in rows.items():
            own, here = entry["observation"], entry["valid"]
            assert np.array_equal(own["agent_id"][here], own["observation"][here, 0])  # where Crowd has it
            seen[name] |= set(own["agent_id"][here].tolist())
        if over or cut:
            env.reset()
    assert seen == {"even": {0, 2}, "odd": {1, 3}}


def test_a_number_stands_beside_masks_and_the_state() -> None:
    env = MultiAgentEnv(Turns(), PolicyMap(agent_id=True, global_state="true"), EnvOptions())
    own = env.observation_space.own["shared"]  # type: ignore[attr-defined]
    assert own["agent_id"] == spaces.Discrete(3)
    assert set(own.spaces) == {"action_mask", "agent_id", "observation", "privileged"}
