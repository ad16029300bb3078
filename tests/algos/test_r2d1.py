"""R2D1: targets by hand, stored states, masks, priorities, exact resume, and a memory learned in seconds."""

from typing import Any

import numpy as np
import pytest
import torch

from rlframe.algos import r2d1
from rlframe.core.errors import ConfigError
from rlframe.envs import debug_envs
from tests.algos.test_dqn import check_resume, made, run, score

MEMORY: dict[str, Any] = {
    "module": r2d1,
    "model_memory": "lstm",
    "model_memory_size": 16,
    "burn_in": 4,
    "learn_T": 8,
    "batch_size": 8,
    "n_step": 2,
    "discount": 0.9,
    "target_interval": 20,
}


def sequences(algo: Any, n: int = 8) -> Any:
    return algo.replay.sample(n)


def test_a_memory_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"use model.memory=lstm, gru or transformer, or algo=dqn"):
        run(debug_envs.memory, 1, module=r2d1, learn_T=8)


@pytest.mark.parametrize("memory", ["lstm", "transformer"])
def test_sequences_start_at_the_states_of_acting_and_reproduce_its_q_values(memory: str) -> None:
    settings = {**MEMORY, "burn_in": 0, "learn_T": 8, "learning_starts": 10_000, "prioritized": False}
    settings |= {"model_memory": memory, "model_memory_window": 4}
    algo, agent, batches = run(debug_envs.memory, 6, **settings)
    batch = sequences(algo, 32)
    values, _ = agent.model(batch.inputs[:-1], batch.state.memory)
    time, env = np.divmod(batch.index, 8)
    acted = torch.cat([b.info.q for b in batches])  # type: ignore[attr-defined]  # [48, 8, A]
    # replay begins with the row before the first, for its action
    rows = torch.from_numpy(time - algo.replay._storages[0].rows_before) + torch.arange(8)[:, None]
    torch.testing.assert_close(values.squeeze(-1), acted[rows, torch.from_numpy(env)], rtol=1e-4, atol=1e-5)


def test_burn_in_changes_the_state_but_has_no_gradient() -> None:
    algo, _, _ = run(debug_envs.memory, 4, **{**MEMORY, "learning_starts": 10_000})
    batch = sequences(algo)
    first = batch.inputs.first.clone()
    first[:] = False
    batch = batch_with(batch, first=first)
    observation = batch.inputs.observation.clone().requires_grad_()
    algo.evaluate(batch_with(batch, observation=observation))[0].sum().backward()
    assert observation.grad is not None
    assert (observation.grad[:4] == 0).all()
    assert (observation.grad[4:12] != 0).any()
    with torch.no_grad():
        q = algo._values(algo.agent.model, batch)
        changed = observation.detach().clone()
        changed[0] += 1
        assert not torch.allclose(q, algo._values(algo.agent.model, batch_with(batch, observation=changed)))


def batch_with(batch: Any, **fields: Any) -> Any:
    inputs = type(batch.inputs)(**{**vars(batch.inputs), **fields})
    return type(batch)(**{**vars(batch), "inputs": inputs})


def test_rows_that_do_not_count_have_no_part_in_loss_and_priority() -> None:
    algo, _, _ = run(debug_envs.memory, 6, delay=3, **{**MEMORY, "learning_starts": 10_000, "n_step": 1})
    batch = sequences(algo, 16)
    assert not batch.valid[4:].all()
    other = type(batch)(**{**vars(batch), "action": torch.where(batch.valid, batch.action, 1 - batch.action)})
    for one, two in zip(algo.evaluate(batch)[:2], algo.evaluate(other)[:2], strict=True):
        torch.testing.assert_close(one, two)


def test_priorities_mix_the_largest_and_the_mean_error() -> None:
    algo, _, _ = run(debug_envs.memory, 4, **{**MEMORY, "learning_starts": 10_000, "rescale": False, "double": False})
    batch = sequences(algo)
    found = {}
    for eta in (0.0, 0.9, 1.0):
        algo.now = r2d1.Config(**{**vars_of(algo.config), "eta": eta})
        found[eta] = algo.evaluate(batch)[1].detach()
    torch.testing.assert_close(found[0.9], 0.9 * found[1.0] + 0.1 * found[0.0])
    assert (found[1.0] > found[0.0]).all()


def vars_of(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in type(config).__annotations__}


def test_the_target_is_rescaled_by_hand() -> None:
    """One sequence of one row, terminated with reward 3: h(3) = 1.003."""
    algo, _, _ = run(
        debug_envs.memory, 4, **{**MEMORY, "learning_starts": 10_000, "burn_in": 0, "learn_T": 1, "n_step": 1}
    )
    batch = sequences(algo, 4)
    one = torch.ones_like(batch.terminated)
    batch = type(batch)(
        **{**vars(batch), "reward": 3.0 * one, "terminated": one, "valid": one, "truncated": torch.zeros_like(one)}
    )
    _, priority, q = algo.evaluate(batch)
    torch.testing.assert_close(priority, (1.003 - q).abs())


def test_new_sequences_have_the_priority_that_an_update_would_give() -> None:
    sampler, _, algo = made(debug_envs.memory, 64, **{**MEMORY, "learning_starts": 10_000})
    told: list[Any] = []
    real = algo.replay.update_priorities
    algo.replay.update_priorities = lambda index, priority: (told.append((index, priority)), real(index, priority))
    for _ in range(2):  # 16 rows, of which 12 make a sequence
        algo.receive(sampler.collect())
    ((index, priority),) = told
    assert len(index) == 8
    with torch.no_grad():
        expected = algo.evaluate(algo.replay.read(index))[1]
    torch.testing.assert_close(priority, expected)


@pytest.mark.parametrize("memory", ["lstm", pytest.param("transformer", marks=pytest.mark.slow)])
def test_r2d1_learns_what_needs_memory(memory: str) -> None:
    settings = {**MEMORY, "learning_rate": 1e-2, "burn_in": 0, "learn_T": 16}
    settings |= {"model_memory": memory}
    _, agent, _ = run(debug_envs.memory, 30, delay=3, **settings)
    assert score(agent, debug_envs.memory, delay=3) > 0.95  # chance is 0.5


def test_a_resumed_algorithm_goes_on_exactly() -> None:
    check_resume(debug_envs.memory, **MEMORY)


def test_noisy_layers_get_other_noise_for_each_update() -> None:
    algo, agent, _ = run(debug_envs.memory, 8, **{**MEMORY, "explore": "noisy", "replay_ratio": 1.0})
    seen = []
    for _ in range(2):
        algo.update()
        seen.append([layer.noise_in.clone() for layer in agent.model.noisy_layers])
    assert all(bool((one != other).any()) for one, other in zip(*seen, strict=True))
