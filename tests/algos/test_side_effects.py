"""What an update keeps in attributes, and logs, is the same compiled and not; state in Python runs uncompiled."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rlframe
from rlframe.algos import dqn
from rlframe.record.metrics import Metrics, collect_in, noting
from rlframe.updates.compiled import CompileChoice, compiling
from tests.algos.played import play
from tests.algos.test_compiled import (
    CARTPOLE,
    PLAIN,
    Looking,
    assert_alike,
    batches,
    learned,
    learner,
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


class Counting(Looking):
    """One with state of any form, that counts its calls, or averages what it sees, and scales by that."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.kept = self.start()

    def start(self) -> Any:
        return {"n": 0}

    def count(self, y: Tensor) -> Any:
        self.kept["n"] += 1
        return 1 + 0.01 * self.kept["n"]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * self.count(y.detach().abs().mean())


class InList(Counting):
    def start(self) -> Any:
        return []

    def count(self, y: Tensor) -> Any:
        self.kept.append(1)
        return 1 + 0.01 * len(self.kept)


class InNestedDict(Counting):
    def start(self) -> Any:
        return {"a": {"n": [0]}, "itself": self}

    def count(self, y: Tensor) -> Any:
        self.kept["a"]["n"][0] += 1
        return 1 + 0.01 * self.kept["a"]["n"][0]


class InSet(Counting):
    def start(self) -> Any:
        return set()

    def count(self, y: Tensor) -> Any:
        self.kept.add(len(self.kept))
        return 1 + 0.01 * len(self.kept)


class InArray(Counting):
    def start(self) -> Any:
        return np.zeros(2)

    def count(self, y: Tensor) -> Any:
        self.kept += 1
        return 1 + 0.01 * float(self.kept[0])


class InTuple(Counting):
    def start(self) -> Any:
        return (torch.ones(()), 0)

    def count(self, y: Tensor) -> Any:
        self.kept = (0.9 * self.kept[0] + 0.1 * y, 0)
        return self.kept[0]


class InDictOfTensors(Counting):
    def start(self) -> Any:
        return {"mean": torch.ones(())}

    def count(self, y: Tensor) -> Any:
        self.kept["mean"] = 0.9 * self.kept["mean"] + 0.1 * y
        return self.kept["mean"]


class InParameter(Counting):
    def start(self) -> Any:
        return nn.Parameter(torch.ones(()), requires_grad=False)

    def count(self, y: Tensor) -> Any:
        self.kept = nn.Parameter(0.9 * self.kept + 0.1 * y, requires_grad=False)
        return self.kept


class Helper:
    """An object of the user's own in a module."""

    def __init__(self) -> None:
        self.n, self.mean = 0, torch.ones(())

    def __call__(self, y: Tensor) -> Any:
        self.n += 1
        self.mean = 0.9 * self.mean + 0.1 * y
        return self.mean * (1 + 0.01 * self.n)


class InHelper(Counting):
    def start(self) -> Any:
        return [Helper()]

    def count(self, y: Tensor) -> Any:
        return self.kept[0](y)


class FromTheFirstCallOn(Counting):
    def count(self, y: Tensor) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return 1 + 0.01 * self.calls


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (
            Averaging,
            "it puts another tensor in the place of Averaging.mean; change that one, as by copy_, or use compile=",
        ),
        (InBuffer, "in the place of InBuffer.mean"),
        (Watching, "in the place of Watching.mean"),
        pytest.param(FromNumber, "FromNumber.mean", marks=pytest.mark.slow),
        (FromNone, "FromNone.mean"),
        (Counting, "it changes Counting.kept in Python"),
        pytest.param(InList, "it changes InList.kept in Python", marks=pytest.mark.slow),  # as in the dict of Counting
        pytest.param(InNestedDict, "it changes InNestedDict.kept in Python", marks=pytest.mark.slow),
        pytest.param(InSet, "it changes InSet.kept in Python", marks=pytest.mark.slow),
        (InArray, "InArray.kept"),
        pytest.param(InTuple, "in the place of InTuple.kept", marks=pytest.mark.slow),
        (InDictOfTensors, "it changes InDictOfTensors.kept in Python"),
        (InParameter, "in the place of InParameter.kept"),
        (InHelper, "it changes Helper.n in Python"),
        (FromTheFirstCallOn, "FromTheFirstCallOn.calls"),
    ],
)
def test_state_that_an_update_replaces_is_as_without_a_compiler(
    network: type[nn.Module],
    says: str,
    recorded: list[Any],
    warned: Callable[[], list[str]],
) -> None:
    line = warning_of_equal_runs(with_network(network), with_network(network), batches("dqn", 3), warned)
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
    one, other, data = with_network(Keeping), with_network(Keeping), batches("dqn", 3)
    with compiling(CompileChoice(True)):
        learned(one, data)
    learned(other, data)
    assert recorded
    assert_alike(one, other, rtol=1e-2, atol=1e-3)
    kept = [module.features for module in one.agent.modules() if hasattr(module, "features")]
    assert all(type(x) is Tensor for x in kept)


class Smooth(dqn.DQN):
    """Whose loss leaves its value for `update` to log."""

    seen = torch.zeros(())

    def loss(self, values: Any, batch: Any) -> Any:
        found = super().loss(values, batch)
        self.seen = found[0].detach().mean()
        return found

    def update(self) -> Any:
        return {**super().update(), "seen": self.seen}


class SmoothFromZero(Smooth):
    """With a first value of its own."""

    def update(self) -> Any:
        self.__dict__.setdefault("seen", torch.zeros(()))
        return super().update()


@pytest.mark.parametrize("cls", [Smooth, SmoothFromZero])
def test_what_a_loss_leaves_for_its_algorithm_is_that_of_the_update(
    cls: type, recorded: list[Any], warned: Callable[[], list[str]]
) -> None:
    algos = [learner(dqn, *CARTPOLE, model={"hidden": (8,)}, replay_ratio=2.0, n_steps=96, **PLAIN) for _ in range(2)]
    for algo in algos:
        algo.__class__ = cls
    line = warning_of_equal_runs(*algos, batches("dqn", 3), warned)
    assert f"it puts another tensor in the place of {cls.__name__}.seen" in line
    assert torch.equal(*(algo.seen for algo in algos))
    assert float(algos[0].seen) > 0


class Telling(Looking):
    """A user's network that logs what it sees, once by a number that is a part of the record."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        rlframe.log("net/mean_of_features", y.mean())
        rlframe.log("net/width_sum", y.shape[-1])
        return y.tanh()


@pytest.mark.parametrize("way", ["compiled", "stacked", "graphs"])
def test_what_a_loss_or_network_logs_is_logged_in_each_update_however_it_runs(
    way: str, recorded: list[Any], warned: Callable[[], list[str]]
) -> None:
    one, other, data = with_network(Telling), with_network(Telling), batches("dqn", 3)
    choice = CompileChoice(way != "graphs", shared=way == "stacked")
    if way == "graphs":
        play(one)
    logged = []
    for algo, how in ((one, choice), (other, CompileChoice(False))):
        with collect_in(metrics := Metrics()), compiling(how):
            learned(algo, data)
        logged.append(metrics.flush())
    assert {*logged[0]} == {"net/mean_of_features", "net/width_sum"}
    assert logged[0]["net/width_sum"] > 8
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)
    assert warned() == []
    assert bool(recorded) == (way != "graphs")


def test_a_log_of_several_numbers_in_an_update_is_refused_before_anything_is_learned() -> None:
    class Wrong(Telling):
        def forward(self, x: Tensor) -> Tensor:
            rlframe.log("net/features", x)
            return x

    with noting(), pytest.raises(ValueError, match="net/features"):
        Wrong(None)(torch.zeros(3, 4))
