"""A transformer over whole sequences is the transformer one row at a time, and attends only within its window."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.core.errors import ConfigError
from rlframe.core.struct import map_tree
from rlframe.models import ModelConfig
from rlframe.models.memory import Transformer
from tests.samplers.made import agent_for, sampler_for

SIZE, B = 8, 3
SHAPES = pytest.mark.parametrize(("T", "window", "layers"), [(9, 4, 2), (40, 5, 3), (7, 16, 1), (2, 2, 2), (33, 8, 2)])


def made(window: int, layers: int = 2, heads: int = 2) -> Transformer:
    """With large weights, so that everything that a row attends to shows in its output."""
    torch.manual_seed(0)
    memory = Transformer(3, SIZE, window, heads, layers)
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5)
    return memory


def rows(T: int, p: float = 0.15, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(T, B, 3, generator=generator), torch.rand(T, B, generator=generator) < p


def stepped(memory: Transformer, x: Tensor, first: Tensor, state: Any) -> tuple[Tensor, Any]:
    outputs = []
    for x_t, first_t in zip(x, first, strict=True):
        output, state = memory(x_t, first_t, state)
        outputs.append(output)
    return torch.stack(outputs), state


def by_hand(memory: Transformer, x: Tensor, first: list[bool]) -> Tensor:
    """Outputs [T, size] of one environment [T, F] from the start of an episode, row by row and head by head."""
    h = memory.embed(x)
    episode = torch.tensor(first).cumsum(0)
    for block in memory.blocks:
        n = F.layer_norm(h, (SIZE,), block.norm.weight, block.norm.bias)
        q, k, v = (f(n).unflatten(-1, (block.heads, -1)) for f in (block.query, block.key, block.value))
        mixed = []
        for t in range(len(x)):
            seen = [s for s in range(max(0, t - memory.window + 1), t + 1) if episode[s] == episode[t]]
            for head in range(block.heads):
                score = k[seen, head] @ q[t, head] / q.shape[-1] ** 0.5
                score = score + torch.stack([block.bias[head, t - s] for s in seen])
                mixed.append(score.softmax(0) @ v[seen, head])
        h = h + block.out(torch.cat(mixed).view(len(x), SIZE))
        n = F.layer_norm(h, (SIZE,), block.norm_2.weight, block.norm_2.bias)
        h = h + block.outer(block.inner(n).relu())
    return F.layer_norm(h, (SIZE,), memory.norm.weight, memory.norm.bias)


def close(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("p", [0.0, 0.15, 1.0])
@SHAPES
@torch.no_grad()
def test_a_sequence_gives_what_stepping_gives(T: int, window: int, layers: int, p: float) -> None:
    memory, (x, first) = made(window, layers), rows(T, p)
    before = stepped(memory, *rows(11, seed=1), memory.initial_state(B))[1]
    close(memory(x, first, before), stepped(memory, x, first, before))


@SHAPES
@torch.no_grad()
def test_it_computes_the_equations(T: int, window: int, layers: int) -> None:
    memory, (x, first) = made(window, layers), rows(T)
    first[0] = True
    output, _ = memory(x, first, memory.initial_state(B))
    for b in range(B):
        close(output[:, b], by_hand(memory, x[:, b], first[:, b].tolist()))


@torch.no_grad()
def test_the_state_holds_nothing_of_an_earlier_episode() -> None:
    memory, (x, first) = made(6), rows(9, 0.0)
    first[[0, 7]] = True  # two rows before the end
    past, n = memory(x, first, memory.initial_state(B))[1]
    assert n.tolist() == [2.0] * B
    assert not past[:, :3].any()
    assert past[:, 3:].all()


def test_gradients_of_a_sequence_are_those_of_full_attention() -> None:
    memory, (x, first) = made(5), rows(13)
    first[0] = True
    weight = torch.randn(13, B, SIZE, generator=torch.Generator().manual_seed(2))
    leaves = [*memory.parameters()]
    found = torch.autograd.grad((memory(x, first, memory.initial_state(B))[0] * weight).sum(), leaves)
    plain = [by_hand(memory, x[:, b], first[:, b].tolist()) for b in range(B)]
    expected = torch.autograd.grad((torch.stack(plain, 1) * weight).sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        close(one, other, 1e-3)


@pytest.mark.same_bits("transformer")
def test_a_row_has_the_same_bits_among_any_number_of_others() -> None:
    _, agent = sampler_for("CartPole-v1", B=32, model_memory="transformer", model_memory_window=8)
    inputs = sampler_for("CartPole-v1", T=1, B=32)[0].collect().inputs[0]
    noise, state = torch.zeros(32, 2), agent.initial_state(range(32))
    for _ in range(3):
        whole = agent.step(inputs, state, noise)
        for n in (4, 8, 20):
            part = agent.step(inputs[:n], map_tree(lambda x, n=n: x[:n], state), noise[:n])
            assert torch.equal(part.info.value, whole.info.value[:n])  # type: ignore[attr-defined]
        state = whole.state


def test_heads_that_do_not_divide_the_width_and_a_window_of_one_row_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.memory_heads=3 must divide model.memory_size=64; use memory_size=66"):
        ModelConfig(memory="transformer", memory_heads=3)
    with pytest.raises(ConfigError, match=r"model.memory_window=1 must be from 2 to 65536"):
        ModelConfig(memory="transformer", memory_window=1)
    ModelConfig(memory="lstm", memory_heads=3)  # which has none


def test_the_smallest_transformer_keeps_one_row_of_one_number_for_each_layer() -> None:
    space = sampler_for("CartPole-v1")[0].envs  # type: ignore[attr-defined]
    one = {"memory": "transformer", "memory_size": 1, "memory_heads": 1, "memory_window": 2, "memory_layers": 3}
    agent = agent_for(space.observation_space, space.action_space, **one)
    past, _ = agent.initial_state([0])[0]
    assert past.shape == (1, 1, 3, 1)
