"""Rows of all agents together: whose they are, when a team's episode ends, and the same through replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pettingzoo")

from rlframe.agents.team import Team
from rlframe.algos import qmix
from rlframe.algos.off_policy import joint_replay
from rlframe.core.multi_agent import JointSpace, PolicyMap, acting, joint_of, present
from rlframe.core.types import BatchSpec, Samples
from rlframe.envs import EnvConfig
from rlframe.models import ModelConfig
from rlframe.replay import InMemory
from rlframe.samplers import serial

CROWD = EnvConfig("tests.agents_envs:Crowd", {"death": 0.4})
KINDS = EnvConfig("tests.agents_envs:Crowd", {"kinds": 2, "death": 0.4}, policies=PolicyMap(policies=("even", "odd")))
T, B, N_BATCHES, DISCOUNT, N_STEP = 16, 3, 12, 0.5, 3


def batches(env: EnvConfig, policy: str) -> Iterator[tuple[Any, Samples, Samples]]:
    """The policy's agent, and batches of the environments and of the policy, copied."""
    config = serial.Config(batch_T=T, batch_B=B)
    envs = config.make_envs(env, 5, ())
    seen, done = envs.observation_space, envs.action_space
    assert isinstance(seen, JointSpace)
    assert isinstance(done, JointSpace)
    model, algo = ModelConfig(hidden=(8,)), qmix.Config()
    agents = {name: algo.make_agent(own, done.own[name], model, seed=1) for name, own in seen.own.items()}
    for agent in agents.values():
        agent.exploration.set_level(1.0, 1.0, B)
    with closing(config.make_sampler(envs, Team(agents, seen, done), 5)) as sampler:
        for _ in range(N_BATCHES):
            samples = sampler.collect().map(torch.clone)
            yield agents[policy], samples, joint_of(samples, policy)


@pytest.mark.parametrize(("env", "policy"), [(CROWD, "shared"), (KINDS, "even"), (KINDS, "odd")])
def test_a_row_of_all_agents_tells_who_acts_in_it_and_when_the_team_has_ended(env: EnvConfig, policy: str) -> None:
    n_ended = n_absent = 0
    for _, whole, joint in batches(env, policy):
        rows = joint.inputs.observation
        acts, acted = acting(rows), rows["valid"][1:]
        assert torch.equal(acts[:-1][whole.valid], acted[whole.valid])  # known before it happens
        assert torch.equal(joint.valid, acted.any(-1) & whole.valid)
        assert torch.equal(joint.reward[joint.valid], (joint.action * acted).sum(-1).float()[joint.valid])
        ended = joint.terminated | joint.truncated
        assert torch.equal(ended, joint.valid & ~acts[1:].any(-1))
        assert not (joint.terminated & joint.truncated).any()
        cut = rows["truncated"][1:].any(-1)
        assert torch.equal(joint.truncated, ended & cut)
        here = present(rows)[1:]
        assert torch.equal(here[joint.truncated], rows["truncated"][1:][joint.truncated])  # whose values count
        assert not here[joint.terminated].any()
        assert torch.equal(here[joint.valid & ~ended], acts[1:][joint.valid & ~ended])
        n_ended, n_absent = n_ended + int(ended.sum()), n_absent + int((whole.valid & ~joint.valid).sum())
        assert joint.n_rows == int(joint.valid.sum())
    assert n_ended > 20
    assert (n_absent > 5) == (env is KINDS)  # steps of the other team alone


@pytest.mark.parametrize(("env", "policy"), [(CROWD, "shared"), (KINDS, "odd")])
def test_replay_returns_rows_of_all_agents_unchanged_with_their_returns(env: EnvConfig, policy: str) -> None:
    kept, replay = [], None
    for agent, _, joint in batches(env, policy):
        if replay is None:
            config = qmix.Config(discount=DISCOUNT, n_step=N_STEP, replay=InMemory(size=2_000))
            n = joint.action.shape[-1]
            replay = joint_replay(config, agent, n, BatchSpec(T, B), seed=0)
        replay.append(joint)
        kept.append(joint)
    assert replay is not None
    rows = {key: torch.cat([x.inputs.observation[key][:-1] for x in kept]) for key in kept[0].inputs.observation}
    valid, reward, action = (torch.cat([getattr(x, name) for x in kept]) for name in ("valid", "reward", "action"))
    terminated, truncated = (torch.cat([getattr(x, name) for x in kept]) for name in ("terminated", "truncated"))
    n_tested = 0
    for t, b in zip(*np.nonzero(valid[: T * (N_BATCHES - 3)].numpy()), strict=True):
        batch = replay.read(np.array([t * B + b]))  # type: ignore[attr-defined]
        return_, factor, at = 0.0, 1.0, int(t)
        for _ in range(N_STEP):
            return_, factor = return_ + factor * float(reward[at, b]), factor * DISCOUNT
            last, at = at, at + 1
            if terminated[last, b] or truncated[last, b]:
                break
            while not valid[at, b]:  # a step of the other team alone
                at += 1
        assert float(batch.return_[0]) == pytest.approx(return_)
        assert float(batch.bootstrap[0]) == pytest.approx(0.0 if terminated[last, b] else factor)
        assert torch.equal(batch.action[0], action[t, b])
        for key, of_all in rows.items():
            assert torch.equal(batch.inputs.observation[key][0], of_all[t, b])
            assert torch.equal(batch.next_inputs.observation[key][0], of_all[at, b])
        n_tested += 1
    assert n_tested > 100
