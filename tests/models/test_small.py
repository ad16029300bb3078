"""Small networks are learned in NumPy, large ones in torch, with the same gradients."""

from __future__ import annotations

import copy

import pytest
import torch

from rlframe.models.perceptron import Pass, Perceptron
from rlframe.models.small import ArrayPass, evaluate


def test_size_decides_where_a_network_is_evaluated() -> None:
    network = Perceptron(256, (256,), 2, "relu")
    assert isinstance(evaluate(network.stack, torch.zeros(8, 256)), ArrayPass)
    assert isinstance(evaluate(network.stack, torch.zeros(256, 256)), Pass)


@pytest.mark.parametrize("hidden", [(), (6,), (6, 5)])
def test_both_ways_give_the_same(hidden: tuple[int, ...]) -> None:
    network, x = Perceptron(3, hidden, 2, "tanh"), torch.randn(4, 3)
    gradient = torch.randn(4, 2)
    found = []
    for run in (evaluate(network.stack, x), network.run(x)):
        of_input = run.to_all(gradient.clone())
        found.append([run.output, of_input, *(p.grad.clone() for p in network.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_parameters_are_seen_as_they_are_now_wherever_they_lie() -> None:
    network, x = Perceptron(3, (4,), 2, "relu"), torch.randn(5, 3)
    evaluate(network.stack, x)
    with torch.no_grad():
        network.layers[0][0].mul_(2)  # in place
    torch.testing.assert_close(evaluate(network.stack, x).output, network.run(x).output)
    network.share_memory()  # elsewhere
    with torch.no_grad():
        network.layers[0][0].mul_(2)
    torch.testing.assert_close(evaluate(network.stack, x).output, network.run(x).output)
    network.layers[-1][0].data = torch.randn(2, 4)  # of one layer only
    torch.testing.assert_close(evaluate(network.stack, x).output, network.run(x).output)
    twin = copy.deepcopy(network)
    with torch.no_grad():
        twin.layers[0][0].mul_(2)
    torch.testing.assert_close(evaluate(twin.stack, x).output, twin.run(x).output)
    torch.testing.assert_close(evaluate(network.stack, x).output, network.run(x).output)
