"""What an update keeps in attributes is the same compiled and not: it runs uncompiled, and says which attribute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlframe.algos.compiled import CompileChoice, compiling
from tests.algos.test_compiled import (
    Looking,
    assert_alike,
    batches,
    learned,
    warning_of_equal_runs,
    with_network,
)


class Averaging(Looking):
    """One with a running mean, a new tensor each time."""

    first: Any = torch.ones(())

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.mean = self.first

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.mean = 0.9 * (self.mean if self.mean is not None else 1.0) + 0.1 * y.detach().abs().mean()
        return y * self.mean


class FromNumber(Averaging):
    """Whose mean begins as a number."""

    first = 1.0


class FromNone(Averaging):
    """Whose mean begins as nothing."""

    first = None


class InBuffer(Averaging):
    """Whose mean is a buffer."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        del self.mean
        self.register_buffer("mean", torch.ones(()))


class Watching(Averaging):
    """Which only watches its mean."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return self.layer(x)  # type: ignore[no-any-return]


class InDict(Looking):
    """One that counts in a dict."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.counts = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return self.layer(x) * (1 + 0.01 * self.counts["calls"])  # type: ignore[no-any-return]


class InList(Looking):
    """One that counts in a list."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return self.layer(x) * (1 + 0.01 * len(self.calls))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (
            Averaging,
            "it puts another tensor in the place of Averaging.mean; change that one, as by copy_, or use compile=",
        ),
        (InBuffer, "in the place of InBuffer.mean"),
        (Watching, "in the place of Watching.mean"),
        (FromNumber, "FromNumber.mean"),
        (FromNone, "FromNone.mean"),
        (InDict, "it changes InDict.counts in Python"),
        (InList, "it changes InList.calls in Python"),
    ],
)
def test_state_that_an_update_replaces_is_as_without_a_compiler(
    network: type[nn.Module],
    says: str,
    recorded: list[Any],
    warned: Callable[[], list[str]],
) -> None:
    line = warning_of_equal_runs(with_network(network), with_network(network), batches("dqn"), warned)
    assert line.startswith("updates run uncompiled: ")
    assert says in line


class Keeping(Looking):
    """One that keeps its features for others to see within an update."""

    def forward(self, x: Tensor) -> Tensor:
        self.features: Tensor = self.layer(x)
        return self.features


def test_an_attribute_that_is_only_written_is_compiled_and_holds_no_tensor_of_the_recording(
    recorded: list[Any],
) -> None:
    one, other, data = with_network(Keeping), with_network(Keeping), batches("dqn")
    with compiling(CompileChoice(True)):
        learned(one, data)
    learned(other, data)
    assert recorded
    assert_alike(one, other, rtol=1e-2, atol=1e-3)
    kept = [module.features for module in one.agent.modules() if hasattr(module, "features")]
    assert all(type(x) is Tensor for x in kept)
