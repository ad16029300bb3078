"""Updates mapped over runs: the graph of one becomes that of all, changes of its state included."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rlframe.kernels import matmul
from rlframe.updates.recorded import NotCompiled
from rlframe.updates.stacked import _Mapped, mapped_graph
from tests.samplers.made import assert_equal


def update(x: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    """With operations of updates that vmap has no rules for: on lists, and some in place."""
    torch._foreach_add_([weight, target], [x.mean(), x.sum()])
    torch._foreach_lerp_([target], [weight], 0.25)
    target.clamp_(max=1.5)
    order = x.new_zeros(4).scatter_(0, weight.argsort(), weight)
    return [x @ order]


def test_a_mapped_update_does_for_each_run_what_its_own_does() -> None:
    x, weight, target = torch.randn(3, 5, 4), torch.randn(3, 4), torch.randn(3, 4)
    own = [(x[i].clone(), weight[i].clone(), target[i].clone()) for i in range(3)]
    results = [update(*each)[0] for each in own]
    graph = make_fx(update)(*(each.clone() for each in own[0]))
    (found,) = mapped_graph(graph, [x, weight, target])(x, weight, target)
    torch.testing.assert_close(found, torch.stack(results))
    torch.testing.assert_close(weight, torch.stack([each[1] for each in own]))
    torch.testing.assert_close(target, torch.stack([each[2] for each in own]))


def test_an_update_without_results_has_none_for_each_run() -> None:
    seen, total = torch.arange(6.0).reshape(3, 2), torch.zeros(3)

    def run(x: Tensor, state: Tensor) -> list[Tensor]:
        state += x.sum(-1)
        return []

    mapped = _Mapped(run, [seen.clone()], [total], [])
    assert mapped([(x,) for x in seen]) == [(), (), ()]
    assert total.tolist() == [1.0, 5.0, 9.0]


def test_a_result_that_is_an_input_stays_what_it_was_at_the_next_update() -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    mapped = _Mapped(lambda x: [x, x[:, :1], x + 1], [rows.clone()], [], [])
    first, second = mapped([(x,) for x in rows]), mapped([(x,) for x in -rows])
    for sign, found in ((1, first), (-1, second)):
        for x, own in zip(rows, found, strict=True):
            assert_equal(own, (sign * x, sign * x[:1], sign * x + 1))


@pytest.mark.skipif(matmul._LINEAR is None, reason="torch was built without oneDNN")
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_layers_of_onednn_are_mapped_run_by_run(has_bias: bool) -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        return [matmul._operation()(x, weight, bias if has_bias else None)]

    x, weight, bias = torch.randn(3, 5, 4), torch.randn(3, 2, 4), torch.randn(3, 2)
    graph = make_fx(layer)(x[0], weight[0], bias[0])
    (found,) = mapped_graph(graph, [x, weight, bias])(x, weight, bias)
    assert torch.equal(found, torch.stack([layer(*each)[0] for each in zip(x, weight, bias, strict=True)]))


def test_an_operation_without_a_rule_is_an_error_instead_of_a_loop() -> None:
    graph = make_fx(lambda x: [torch.histc(x, 4)])(torch.rand(5))
    with pytest.raises(NotCompiled, match="cannot be mapped over runs"):
        mapped_graph(graph, [torch.rand(3, 5)])
