"""QMIX and VDN: the team's value by hand, agents that are gone, and the two-step game that only mixing solves."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlframe.algos import dqn, qmix
from rlframe.core.multi_agent import agent_rows
from rlframe.core.types import AgentInputs, BatchSpec
from rlframe.exploration import EpsilonConfig
from rlframe.launch import main
from rlframe.models import ModelConfig
from rlframe.models.central import CentralView
from rlframe.optimizers import AdamConfig
from rlframe.replay import Transitions
from tests.algos.learners import OneBatch

STATE, TWO = spaces.Dict({"agent_id": spaces.Discrete(2), "observation": spaces.Discrete(3)}), spaces.Discrete(2)
NET = ModelConfig(hidden=(32,), activation="relu")
PAYOFF = np.array([[0.0, 1.0], [1.0, 8.0]])
DISCOUNT = 0.99
GAME = "env=rlframe.envs.debug_agents:TwoStepGame"


def rows_at(states: Sequence[int], **flags: Any) -> dict[str, Any]:
    """Rows [N, 2, ...] of two agents that observe these states and act there, unless `flags` [N, 2] say otherwise."""
    n = len(states)
    observation = {
        "agent_id": torch.arange(2).expand(n, 2),
        "observation": torch.tensor(states)[:, None].expand(n, 2),
    }
    none = torch.zeros(n, 2, dtype=torch.bool)
    plain = {"first": none, "terminated": none, "truncated": none, "valid": ~none}
    return {"observation": observation, "reward": torch.zeros(n, 2), **plain, **flags}


def inputs_at(states: Sequence[int], **flags: Any) -> AgentInputs:
    n = len(states)
    zeros = torch.zeros(n, 2, dtype=torch.int64), torch.zeros(n), torch.zeros(n, dtype=torch.bool)
    return AgentInputs(rows_at(states, **flags), *zeros)


def every_transition() -> Transitions:
    """Each joint action in each state of the two-step game once, as under uniform exploration."""
    states, actions, following, rewards = [], [], [], []
    for state in range(3):
        for a, b in np.ndindex(2, 2):
            states.append(state)
            actions.append((a, b))
            following.append(a + 1 if state == 0 else state)
            rewards.append(0.0 if state == 0 else 7.0 if state == 1 else PAYOFF[a, b])
    state, n = torch.tensor(states), len(states)
    return Transitions(
        inputs=inputs_at(states),
        action=torch.tensor(actions),
        return_=torch.tensor(rewards, dtype=torch.float32),
        bootstrap=torch.where(state == 0, DISCOUNT, 0.0),
        next_inputs=inputs_at(following),
        weight=torch.ones(n),
        index=np.arange(n),
    )


def made(batch: Transitions, seed: int = 0, space: Any = STATE, **settings: Any) -> Any:
    quick: dict[str, Any] = {"learning_rate": 1e-2, "target_interval": 5, "optimizer": AdamConfig(epsilon=1e-8)}
    config = qmix.Config(**{"explore": EpsilonConfig(epsilon=1.0)} | quick | settings)
    agent = config.make_agent(space, TWO, NET, seed)
    exploration = config.make_joint(agent, 2, BatchSpec(4, 2), 100, seed).exploration
    return qmix.QMIX(agent, config.make_mixer(agent, 2, seed), OneBatch(batch), exploration, 100, config, seed)  # type: ignore[arg-type]


def table(algo: Any, state: int) -> Tensor:
    """Q_tot [2, 2] of both agents' actions."""
    inputs = inputs_at([state] * 4)
    actions = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    q: Tensor = algo.q_tot(algo.agent.model, algo.mixer, algo.values(algo.agent.model, inputs), actions, inputs)
    return q.detach().view(2, 2)


def greedy_return(best: Tensor) -> float:
    """What a team gets that takes these actions [3, 2] in the three states."""
    a, b = best[2]
    return 7.0 if best[0, 0] == 0 else float(PAYOFF[a, b])


def test_mixing_represents_the_two_step_game_and_a_sum_does_not() -> None:
    found = {}
    for mixer in ("monotonic", "sum"):
        algo = made(every_transition(), mixer=mixer, mixer_width=8, learning_rate=4e-2)
        for _ in range(130):
            algo.update()
        inputs = inputs_at([0, 1, 2])
        found[mixer] = greedy_return(algo.best(algo.values(algo.agent.model, inputs), inputs))
        expected = {"monotonic": PAYOFF, "sum": np.array([[-1.5, 2.5], [2.5, 6.5]])}[mixer]  # the nearest sum
        assert np.allclose(table(algo, 2), expected, atol=0.3)
        assert float(table(algo, 0).max()) == pytest.approx(DISCOUNT * (8 if mixer == "monotonic" else 7), abs=0.3)
    assert found == {"monotonic": 8.0, "sum": 7.0}


def test_independent_learners_value_the_risky_game_by_a_random_partner() -> None:
    batch = every_transition()
    inputs, following = agent_rows(batch.inputs), agent_rows(batch.next_inputs)
    each = {name: getattr(batch, name).repeat_interleave(2) for name in ("return_", "bootstrap", "weight")}
    columns = Transitions(
        inputs=inputs, next_inputs=following, action=batch.action.flatten(), index=np.arange(24), **each
    )
    config = dqn.Config(learning_rate=2e-2, target_interval=5, huber_delta=float("inf"), n_step=1)
    agent = config.make_agent(STATE, TWO, NET, 0)
    algo = dqn.DQN(agent, OneBatch(columns), config.make_exploration(BatchSpec(4, 2), 100), 100, config)  # type: ignore[arg-type]
    for _ in range(200):
        algo.update()
    q = agent(agent_rows(inputs_at([0, 1, 2])), ())[0].detach().view(3, 2, 2)  # state, agent, action
    assert torch.allclose(q[2], torch.tensor([0.5, 4.5]).expand(2, 2), atol=0.2)  # means over the other's actions
    assert greedy_return(q.argmax(-1)) == 7


def test_the_value_of_a_team_never_falls_with_that_of_an_agent() -> None:
    torch.manual_seed(0)
    mixer = qmix.Monotonic(CentralView(STATE, TWO, 2), 2, 8, NET)
    q = (5 * torch.randn(300, 2)).requires_grad_()
    here = torch.ones(300, 2, dtype=torch.bool)
    values = mixer(q, rows_at([0, 1, 2] * 100)["observation"], here)
    (slope,) = torch.autograd.grad(values.sum(), q)
    assert (slope >= 0).all()
    assert slope.max() > 0.01


def test_agents_that_are_gone_count_for_nothing_and_those_that_were_truncated_at_the_end_do() -> None:
    batch = every_transition()
    gone = torch.tensor([False, True]).expand(12, 2)
    algo = made(batch, mixer="sum", double=False)
    model = algo.agent.model
    own = {"inputs": inputs_at([0] * 12, valid=~gone), "bootstrap": torch.full((12,), DISCOUNT)}
    q = algo.values(model, inputs_at([0] * 12))[:, 0]
    taken = q.gather(1, batch.action[:, :1]).squeeze(1)
    for flags, n_present in (
        ({"valid": ~gone}, 1),  # it died earlier
        ({"terminated": gone}, 1),  # it died in this step
        ({"truncated": ~gone & False | gone}, 1),  # it left, and the other goes on
        ({"truncated": torch.ones(12, 2, dtype=torch.bool)}, 2),  # the episode was cut for both
        ({"terminated": ~gone, "truncated": gone}, -1),  # one died in the step in which the other was cut
    ):
        following = inputs_at([1] * 12, **flags)
        best = algo.values(algo.target, following).amax(-1)  # [N, 2]
        value = best[:, 1] if n_present < 0 else best[:, :n_present].sum(-1)
        loss, q_tot = algo.evaluate(replace(batch, next_inputs=following, **own))
        assert torch.allclose(q_tot, taken)
        assert torch.allclose(loss, 0.5 * (batch.return_ + DISCOUNT * value - taken).square(), atol=1e-5)


def test_forbidden_actions_are_never_the_best_of_a_target() -> None:
    masked = spaces.Dict({"action_mask": spaces.MultiBinary(2), "observation": spaces.Discrete(3)})
    batch = every_transition()
    for inputs in (batch.inputs, batch.next_inputs):
        rows = inputs.observation["observation"]
        del rows["agent_id"]
        rows["action_mask"] = torch.tensor([[0, 1], [1, 0]], dtype=torch.int8).expand(12, 2, 2)
    algo = made(batch, space=masked, mixer="sum")
    q = algo.values(algo.target, batch.next_inputs)
    assert torch.equal(algo.best(q, batch.next_inputs), torch.tensor([1, 0]).expand(12, 2))
    expected = batch.return_ + batch.bootstrap * (q[:, 0, 1] + q[:, 1, 0])
    loss, q_tot = algo.evaluate(batch)
    assert torch.allclose(loss, 0.5 * (expected - q_tot).square(), atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("algo=qmix", "algo=qmix is for environments of several agents, and env=CartPole-v1 has one"),
        ("algo=qmix env=tests.agents_envs:Turns", "policy shared: algo=qmix learns from what agents do at the same"),
        (f"algo=qmix {GAME} reward.bonus=rnd", "policy shared: reward.bonus=rnd is of one agent's rows"),
        (f"algo=qmix {GAME} model.memory=gru", "model.memory=gru: qmix learns from single rows"),
        (f"algo=qmix {GAME} env_kwargs.action=box", "the DQN family needs Discrete actions"),
        (f"algo=maddpg {GAME}", "action space Discrete\\(2\\): .* need one Box"),
        (f"algo=dqn {GAME} agents.global_state=true", "leave it out, or agents.global_state"),
    ],
)
def test_what_a_team_cannot_learn_from_is_refused(words: str, message: str, capsys: Any, tmp_path: Path) -> None:
    assert main([*words.split(), f"log_dir={tmp_path}", "sampler=serial"]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "least", "most"),
    [
        ("qmix_two_step", 8.0, 8.0),
        ("qmix_two_step algo.mixer=sum", 7.0, 7.0),
        ("qmix_two_step algo=dqn algo.n_step=1 algo.double=true agents.global_state=false", 7.0, 7.0),
        ("maddpg_two_step", 7.5, 8.0),
        ("maddpg_two_step agents.map.agent_0=one agents.map.agent_1=two", 6.9, 7.2),
    ],
)
def test_only_central_critics_and_mixing_solve_the_two_step_game(
    words: str, least: float, most: float, tmp_path: Path
) -> None:
    assert main([*f"experiment=multi_agent/{words}".split(), f"log_dir={tmp_path}", "log_level=WARNING"]) == 0
    with next(tmp_path.rglob("progress.csv")).open() as file:
        assert least <= float(list(csv.DictReader(file))[-1]["eval/return_mean"]) <= most
