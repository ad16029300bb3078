"""MADDPG: what its critics see, and a game of continuous actions that only a central critic solves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlframe.algos import maddpg
from rlframe.core.multi_agent import agent_rows
from rlframe.core.struct import map_tree
from rlframe.core.types import AgentInputs, BatchSpec
from rlframe.models import ModelConfig
from rlframe.replay import Transitions
from tests.algos.learners import OneBatch
from tests.algos.test_qmix import PAYOFF, STATE, rows_at

ACTION = spaces.Box(-1, 1, (1,), np.float32)
NET = ModelConfig(hidden=(32,), activation="relu")
QUICK: dict[str, Any] = {
    "learning_rate": 3e-3,
    "critic_learning_rate": 1e-2,
    "tau": 0.1,
    "policy_penalty": 0.1,
    "discount": 0.99,
    "max_grad_norm": 10.0,
}


def inputs_at(states: Any, **flags: Any) -> AgentInputs:
    n = len(states)
    zeros = torch.zeros(n, 2, 1), torch.zeros(n), torch.zeros(n, dtype=torch.bool)
    return AgentInputs(rows_at(states, **flags), *zeros)


def transitions(n: int = 256) -> Transitions:
    """Uniform actions of both agents in the states of the two-step game, see TwoStepGame.

    What follows state 0 is state 1 or 2 with equal numbers of rows, whose weights are its probabilities.
    """
    generator = torch.Generator().manual_seed(1)
    state, following = torch.tensor([0, 0, 1, 2]).repeat(n // 4), torch.tensor([1, 2, 1, 2]).repeat(n // 4)
    action = 2 * torch.rand(n, 2, 1, generator=generator) - 1
    p, q = ((action[:, i, 0] + 1) / 2 for i in range(2))
    risky = torch.stack([1 - p, p], -1).unsqueeze(1) @ torch.tensor(PAYOFF, dtype=torch.float32)
    risky = (risky @ torch.stack([1 - q, q], -1).unsqueeze(-1)).flatten()
    return Transitions(
        inputs=inputs_at(state.tolist()),
        action=action,
        return_=torch.where(state == 0, 0.0, torch.where(state == 1, 7.0, risky)),
        bootstrap=torch.where(state == 0, 0.99, 0.0),
        next_inputs=inputs_at(following.tolist()),
        weight=torch.where(state == 0, 2 * torch.where(following == 2, p, 1 - p), 1.0),
        index=np.arange(n),
    )


def alone(batch: Transitions) -> Transitions:
    """The same rows of each agent alone, as a team of one."""

    def inputs(given: AgentInputs) -> AgentInputs:
        rows = map_tree(lambda x: x.reshape(-1, 1, *x.shape[2:]), given.observation)
        return AgentInputs(
            rows, *(x.repeat_interleave(2, 0) for x in (given.prev_action[:, :1], given.prev_reward, given.first))
        )

    each = {name: getattr(batch, name).repeat_interleave(2) for name in ("return_", "bootstrap", "weight")}
    return Transitions(
        inputs=inputs(batch.inputs),
        next_inputs=inputs(batch.next_inputs),
        action=batch.action.reshape(-1, 1, 1),
        index=np.arange(2 * len(batch.index)),
        **each,
    )


def made(batch: Transitions, n_agents: int = 2, **settings: Any) -> maddpg.MADDPG:
    config = maddpg.Config(**QUICK | settings)
    agent = config.make_agent(STATE, ACTION, NET, 0)
    exploration = config.make_joint(agent, n_agents, BatchSpec(4, 2), 100).exploration
    critic = config.make_joint_critic(agent, n_agents)
    return maddpg.MADDPG(agent, critic, OneBatch(batch), exploration, 100, config)  # type: ignore[arg-type]


def actions_in(algo: maddpg.MADDPG, state: int) -> Tensor:
    """The actions [2] of both agents."""
    rows = agent_rows(inputs_at([state]))
    return algo.policy.action(algo.agent.model(rows.observation)).detach().flatten()


def test_a_central_critic_takes_the_risk_that_independent_ones_do_not() -> None:
    algo, own = made(transitions()), made(alone(transitions()), n_agents=1)
    for _ in range(200):
        algo.update()
        own.update()
    assert float(actions_in(algo, 0)[0]) > 0.7
    assert float(actions_in(own, 0)[0]) < -0.7
    rows, ones = algo.normalized(inputs_at([2])), torch.ones(1, 2, 1)
    assert float(algo.critic.q(rows, ones).detach()) > 6.5  # the payoff is 8
    one = map_tree(lambda x: x[:, :1], rows)
    assert float(own.critic.q(one, ones[:, :1]).detach()) < 5.3  # of a random partner: 4.5


def test_the_target_is_of_all_agents_next_actions_each_by_its_own_observation() -> None:
    batch = transitions(32)
    algo = made(batch, n_critics=2, target_noise=0.2)
    noise = algo.draw_noise(batch.action)
    _, target = algo.values_and_target(batch, noise)
    own = [
        algo.target_actor({key: x[:, i] for key, x in batch.next_inputs.observation["observation"].items()})
        for i in range(2)
    ]
    action = (torch.stack(own, 1).tanh() + (0.2 * noise).clamp(-0.5, 0.5)).clamp(-1, 1)
    expected = algo.critic.target_q(batch.next_inputs.observation, action).amin(0)
    assert torch.allclose(target.squeeze(-1), expected, atol=1e-6)
    assert noise.shape == (32, 2, 1)


def test_agents_that_are_gone_change_no_value() -> None:
    algo = made(transitions(4))
    gone = torch.tensor([False, True]).expand(3, 2)
    rows = inputs_at([0, 1, 2], valid=~gone).observation
    other = {**rows, "observation": {**rows["observation"], "observation": torch.tensor([[0, 1], [1, 2], [2, 0]])}}
    action = torch.zeros(3, 2, 1)
    changed = action + gone.unsqueeze(-1)
    q = algo.critic.q(rows, action)
    assert torch.equal(q, algo.critic.q(other, changed))
    assert not torch.equal(q, algo.critic.q(inputs_at([0, 1, 2]).observation, action))


def test_agents_that_are_gone_are_taught_no_action() -> None:
    algo = made(transitions(4), policy_penalty=100.0)
    rows = inputs_at([0, 1, 2], valid=torch.tensor([True, False]).expand(3, 2)).observation
    seen = rows["observation"]

    def gradient(states: Tensor) -> Tensor:
        now = {**rows, "observation": {**seen, "observation": states}}
        outputs = algo.actor_outputs(algo.agent.model, now)
        loss = algo.actor_loss(algo.critic.q(now, outputs.tanh()), outputs, torch.zeros(3, 2, 1))
        parameters = list(algo.agent.parameters())
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, parameters, materialize_grads=True)])

    found = gradient(torch.tensor([[0, 0], [1, 1], [2, 2]]))
    assert (found != 0).any()
    torch.testing.assert_close(gradient(torch.tensor([[0, 2], [1, 2], [2, 2]])), found)


def test_the_penalty_pulls_saturated_actions_back() -> None:
    algo = made(transitions(4), policy_penalty=0.5)
    outputs = torch.tensor([3.0, -12.0, 40.0]).view(3, 1, 1).expand(3, 2, 1).clone().requires_grad_()
    (found,) = torch.autograd.grad(algo.actor_loss(torch.zeros(3), outputs, torch.zeros(3, 2, 1)), outputs)
    torch.testing.assert_close(found, 0.5 * 2 * outputs.detach() / 6)


def test_critics_see_the_state_in_place_of_observations() -> None:
    space = spaces.Dict({"observation": spaces.Discrete(3), "privileged": spaces.Box(-1, 1, (2,))})
    config = maddpg.Config()
    agent = config.make_agent(space, ACTION, NET, 0)
    critic = config.make_joint_critic(agent, 2)
    rows = rows_at([0, 1])
    rows["valid"] = torch.tensor([[True, True], [False, True]])
    rows["observation"] = {"observation": torch.zeros(2, 2, dtype=torch.int64), "privileged": torch.rand(2, 2, 2)}
    view = critic.networks.view
    seen = view(rows["observation"], rows["valid"])["state"]
    assert torch.equal(seen[0], rows["observation"]["privileged"][0, 0])
    assert torch.equal(seen[1], rows["observation"]["privileged"][1, 1])  # the first agent's is of when it died
    before = critic.q(rows, torch.zeros(2, 2, 1))
    rows["observation"]["observation"] += 1
    assert torch.equal(before, critic.q(rows, torch.zeros(2, 2, 1)))
