"""PettingZoo's own environments, parallel and in turns: the same rows in every sampler, of living agents only."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pettingzoo")

import tests.agents_envs
from rlframe.core.errors import ConfigError
from rlframe.core.multi_agent import PolicyMap
from rlframe.core.struct import leaves
from rlframe.envs import EnvConfig, make_envs
from rlframe.envs.make import resolve
from rlframe.envs.pettingzoo import possible_agents
from rlframe.samplers import cpu, gpu, serial
from tests.envs.test_multi_agent import batches

PARALLEL = {
    "mpe2/simple_v3": {},
    "mpe2/simple_adversary_v3": {},
    "mpe2/simple_crypto_v3": {},
    "mpe2/simple_push_v3": {},
    "mpe2/simple_reference_v3": {},
    "mpe2/simple_speaker_listener_v4": {},
    "mpe2/simple_spread_v3": {"continuous_actions": True},
    "mpe2/simple_tag_v3": {},
    "mpe2/simple_world_comm_v3": {},
    "butterfly/cooperative_pong-v6": {},
    "butterfly/knights_archers_zombies-v11": {},
    "butterfly/pistonball-v6": {"n_pistons": 4},
    "classic/rps-v2": {},
    "sisl/multiwalker-v9": {},
    "sisl/pursuit-v5": {},
}
IN_TURN = {name: {} for name in ("connect_four-v3", "tictactoe-v3", "leduc_holdem-v4", "texas_holdem-v4", "chess-v6")}


def with_policies(id_: str, kwargs: dict[str, Any]) -> EnvConfig:
    """The environment with a policy for each agent, if their spaces differ, else with one for all."""
    try:
        make_envs(EnvConfig(id_, kwargs), 1, [0]).close()
    except ConfigError as error:
        if "different" not in str(error):
            pytest.skip(f"{id_}: {error}")
    else:
        return EnvConfig(id_, kwargs)
    agents = dict.fromkeys(possible_agents(resolve(id_)(**kwargs)))
    names = {agent: f"policy_{i}" for i, agent in enumerate(agents)}
    return EnvConfig(id_, kwargs, policies=PolicyMap(names, policies=tuple(names.values())))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of PettingZoo and pygame
@pytest.mark.parametrize("id_", [*PARALLEL, *(f"classic/{name}" for name in IN_TURN)])
def test_an_environment_of_pettingzoo_gives_the_same_rows_in_every_sampler(id_: str) -> None:
    env = with_policies(id_, PARALLEL.get(id_, {}))

    def rows(config: Any) -> list[np.ndarray]:
        return [x.numpy() for batch in batches(config, env, 2) for x in leaves(batch)]

    sizes = {"batch_T": 24, "batch_B": 2}
    expected = rows(serial.Config(**sizes))
    for config in (cpu.Config(**sizes, n_workers=2), gpu.Config(**sizes, n_workers=2, n_groups=2)):
        assert all(np.array_equal(x, y) for x, y in zip(rows(config), expected, strict=True))


def test_agents_one_after_another_become_the_parallel_environment_that_pettingzoo_makes_of_them() -> None:
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel
    from pettingzoo.utils.wrappers import OrderEnforcingWrapper

    from rlframe.envs.aec import Cycles
    from rlframe.envs.aec import Turns as OneByOne
    from rlframe.envs.pettingzoo import as_parallel

    simple_spread = pytest.importorskip("mpe2.simple_spread_v3")
    rewrapped, in_turn = as_parallel(turn_based_aec_to_parallel(tests.agents_envs.Turns()))
    assert in_turn, "its agents act where they only wait, and those rows would be learned from"
    assert isinstance(rewrapped, OneByOne)
    spread = [simple_spread.parallel_env(max_cycles=4) for _ in range(2)]
    turns = [OrderEnforcingWrapper(tests.agents_envs.Turns()) for _ in range(2)]
    pairs = [(Cycles(spread[0].aec_env), spread[1]), (OneByOne(turns[0]), turn_based_aec_to_parallel(turns[1]))]
    for own, other in pairs:
        given = [env.reset(seed=3) for env in (own, other)]
        n_steps = 0
        while other.agents:  # PettingZoo also writes whose turn it is in infos
            np.testing.assert_equal(given[0][:4], given[1][:4])
            assert own.agents == other.agents
            assert own.aec_env.agent_selection == other.aec_env.agent_selection
            given = [env.step(dict.fromkeys(env.agents, 1 + n_steps % 4)) for env in (own, other)]
            n_steps += 1
            if n_steps == 2 and isinstance(own, OneByOne):
                own = copy.deepcopy(own)  # those of mpe2 are made anew
        np.testing.assert_equal(given[0][:4], given[1][:4])
        assert own.agents == []
        assert n_steps == (4 if isinstance(own, Cycles) else 11)
