"""Memory over whole sequences is memory one row at a time, wherever episodes begin."""

import pytest
import torch
from torch import Tensor

from rlframe.models.memory import Memory

KINDS = ("lstm", "gru")


def made(kind: str, size: int = 5) -> Memory:
    torch.manual_seed(0)
    return Memory(kind, 3, size)


def one_by_one(
    memory: Memory, x: Tensor, first: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The obvious way, with PyTorch's own cell."""
    is_lstm = isinstance(memory.rnn, torch.nn.LSTM)
    outputs = []
    for x_t, first_t in zip(x, first, strict=True):
        state = tuple(torch.where(first_t[:, None], 0.0, s) for s in state)
        stacked = tuple(s[None] for s in state)
        output, after = memory.rnn(x_t[None], stacked if is_lstm else stacked[0])
        state = tuple(s[0] for s in (after if is_lstm else (after,)))
        outputs.append(output[0])
    return torch.stack(outputs), state


def case(
    kind: str, seed: int, T: int = 9, B: int = 4, p: float = 0.25
) -> tuple[Memory, Tensor, Tensor, tuple[Tensor, ...]]:
    memory = made(kind)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, B, 3, generator=generator)
    first = torch.rand(T, B, generator=generator) < p
    return memory, x, first, tuple(torch.randn(B, 5, generator=generator) for _ in range(memory.n_states))


@pytest.mark.parametrize("p", [0.0, 0.05, 0.25, 1.0])  # none, and few: cut into spans; many: packed
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_gives_what_stepping_gives(kind: str, seed: int, p: float) -> None:
    memory, x, first, state = case(kind, seed, p=p)
    expected, expected_state = one_by_one(memory, x, first, state)
    output, after = memory(x, first, state)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(after, expected_state, rtol=1e-5, atol=1e-6)
    row_state, rows = state, []
    for t in range(len(x)):
        row, row_state = memory(x[t], first[t], row_state)
        rows.append(row)
    torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(row_state, expected_state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_obvious_loop(kind: str, seed: int) -> None:
    memory, x, first, state = case(kind, seed)
    leaves = [x.requires_grad_(), *(s.requires_grad_() for s in state), *memory.parameters()]
    weight = torch.randn(9, 4, 5, generator=torch.Generator().manual_seed(9))

    def gradients(output: Tensor, after: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        loss = (output * weight).sum() + sum((s**2).sum() for s in after)
        return torch.autograd.grad(loss, leaves)

    expected = gradients(*one_by_one(memory, x, first, state))
    found = gradients(*memory(x, first, state))
    assert all(gradient.abs().sum() > 0 for gradient in expected[:1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_weights_are_orthogonal_and_biases_zero() -> None:
    for name, parameter in made("gru", 4).rnn.named_parameters():
        if "bias" in name:
            assert not parameter.any()
        else:
            torch.testing.assert_close(parameter.T @ parameter, torch.eye(parameter.shape[1]), rtol=0, atol=1e-5)
