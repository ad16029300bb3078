"""Functions that are captured or compiled once, for inputs of one form: their own memory, and numbers among inputs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlframe.core.struct import leaves
from rlframe.core.types import Samples
from rlframe.kernels.device import learning_in
from rlframe.updates.compiled import CompileChoice, Compiled, compiling
from rlframe.updates.graphed import Graphed
from rlframe.updates.side_effects import Reading, SideEffect, without_side_effects
from tests.algos.played import PlayedGraph
from tests.algos.test_cuda_graph import batches, made


class Adds:
    """A function with a place of its own: returns what it was given, times what is there, plus a number."""

    def __init__(self) -> None:
        self.factor, self.calls = torch.ones(2), 0

    def __call__(self, inputs: tuple[Tensor, float]) -> tuple[Tensor, bool]:
        self.calls += 1
        self.factor += 1
        return inputs[0] * self.factor + inputs[1], True


def called(graph: Callable[..., Any], n: int, size: Callable[[int], int] = lambda i: 2) -> list[Tensor]:
    return [graph((torch.full((size(i),), float(i)), float(10 * i)))[0] for i in range(n)]


def test_inputs_and_numbers_are_copied_to_where_the_graph_reads_them() -> None:
    adds = Adds()
    graph = Graphed(adds, [], PlayedGraph())
    assert [x.tolist() for x in called(graph, 7)] == [x.tolist() for x in called(Adds(), 7)]
    assert adds.calls == 4, "three to warm up and the one that was captured"
    assert graph((torch.zeros(2), 0.0))[1] is True


def test_what_warms_up_has_the_form_of_what_is_captured() -> None:
    """Else a compiler would meet a new form in the capture, where it cannot work."""
    forms = []

    def learn(inputs: Any) -> Any:
        forms.append([(x.shape, x.stride()) if isinstance(x, Tensor) else x for x in leaves(inputs)])
        return inputs[0] + inputs[1]

    graph = Graphed(learn, [], PlayedGraph())
    for i in range(5):
        graph((torch.zeros(3, 4).T, float(i)))
    assert len(forms) == 4
    assert all(form == forms[-1] for form in forms)


def test_what_changes_its_shape_is_never_captured() -> None:
    graph = Graphed(Adds(), [], PlayedGraph())
    sizes = lambda i: 1 + i % 2  # noqa: E731
    assert [x.tolist() for x in called(graph, 12, sizes)] == [x.tolist() for x in called(Adds(), 12, sizes)]
    assert not graph.captured


def test_another_precision_is_another_graph() -> None:
    graph = Graphed(Adds(), [], PlayedGraph())
    called(graph, 5)
    with learning_in("bf16"):
        called(graph, 1)
        assert not graph.captured
        called(graph, 3)
        assert graph.captured


def test_what_cannot_be_captured_runs_as_it_is_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    class Looks(Adds):
        def __call__(self, inputs: Any) -> Any:
            found = super().__call__(inputs)
            return found if float(inputs[0][0]) >= 0 else (inputs[0], False)

    graph = Graphed(Looks(), [], PlayedGraph())
    with caplog.at_level(logging.WARNING, "rlframe"):
        assert [x.tolist() for x in called(graph, 8)] == [x.tolist() for x in called(Adds(), 8)]
    assert [record.message for record in caplog.records] == [
        "updates run without a CUDA graph, since they cannot be captured: "
        "operation not permitted when stream is capturing"
    ]


class Counts(Adds):
    """Counts, and draws from a generator that another attribute is too."""

    def __init__(self) -> None:
        super().__init__()
        self.nets, self.rng = [nn.Linear(1, 1)], np.random.default_rng(0)
        self.same, self.calls = self.rng, 0

    def learn(self, inputs: Any) -> Any:
        self.calls += 1
        return inputs[0] * self.calls, True

    @torch.no_grad()
    def decorated(self, inputs: Any) -> Any:
        return self.learn(inputs)

    def in_a_module(self, inputs: Any) -> Any:
        self.nets[0].n = getattr(self.nets[0], "n", 0) + 1  # type: ignore[assignment]
        return inputs[0] * self.nets[0].n, True


@pytest.mark.parametrize(
    ("learn", "what"),
    [
        (Counts().learn, "Counts.calls"),
        (Counts().decorated, "Counts.calls"),
        (partial(Counts().learn), "Counts.calls"),
        (Counts().in_a_module, "Linear.n"),
    ],
)
def test_what_counts_in_python_is_not_captured(learn: Any, what: str, caplog: pytest.LogCaptureFixture) -> None:
    graph = Graphed(learn, [], PlayedGraph())
    with caplog.at_level(logging.WARNING, "rlframe"):
        assert [x[0].item() for x in called(graph, 8)] == [i * (i + 1) for i in range(8)]
    assert f"cannot be captured: it changes {what} in Python; keep that in a tensor" in caplog.text


def test_a_generator_that_a_recording_draws_from_is_the_same_object_afterwards() -> None:
    class Draws(Counts):
        def learn(self, inputs: Any) -> Any:
            return self.rng.random()

    draws = Draws()
    with (
        pytest.raises(SideEffect, match="it draws from Draws's generator"),
        without_side_effects(draws.learn, Reading()),
    ):
        draws.learn(())
    assert draws.rng is draws.same
    assert draws.rng.random() == np.random.default_rng(0).random()


def test_another_float_among_the_inputs_is_recorded_anew(recorded: list[Any]) -> None:
    algo = made("a2c")
    learn = Compiled(lambda inputs: inputs[0] * inputs[1], algo.schedules, [])
    with compiling(CompileChoice(True)):
        found = [learn((torch.ones(2), factor)).tolist() for factor in (2.0, 3.0, 2.0)]
    assert (found, len(recorded)) == ([[2.0, 2.0], [3.0, 3.0], [2.0, 2.0]], 2)


@pytest.mark.parametrize(
    "of_batch",
    [
        lambda samples: samples.reward.sum() / samples.n_env_steps,
        lambda samples: torch.full((1,), samples.n_env_steps, dtype=torch.float32),  # torch takes numbers alone here
        lambda samples: torch.where(samples.valid, samples.n_env_steps, 0).sum(),
        lambda samples: samples.reward.sum() / round(samples.n_env_steps, -1),
    ],
)
def test_a_count_of_the_batch_is_never_taken_for_that_of_all_batches(
    of_batch: Callable[[Samples], Tensor], recorded: list[Any], warned: Callable[[], list[str]]
) -> None:
    batch = batches("a2c")[0]
    both = [replace(batch, n_env_steps=n) for n in (10, 20)]
    expected = [float(of_batch(each)) for each in both]
    learn, graph = Compiled(of_batch, made("a2c").schedules, []), Graphed(of_batch, [], PlayedGraph())
    with compiling(CompileChoice(True)):
        assert [float(learn(each)) for each in both] == expected
    assert [float(graph(each)) for each in both * 3] == expected * 3
    says = "it reads n_env_steps of the batch, a number that the next one may have otherwise"
    assert [says in line for line in warned()] == [True, True]


def test_recording_leaves_what_is_written_by_out_as_it_was(recorded: list[Any]) -> None:
    source, place = torch.ones(2), torch.zeros(2)

    def learn(inputs: Tensor) -> Tensor:
        found = inputs + place
        torch.add(source, source, out=place)
        return found

    compiled = Compiled(learn, made("a2c").schedules, [])
    with compiling(CompileChoice(True)):
        assert [compiled(torch.zeros(2)).tolist() for _ in range(2)] == [[0.0, 0.0], [2.0, 2.0]]


def test_a_whole_number_among_the_inputs_is_recorded_anew(recorded: list[Any]) -> None:
    learn = Compiled(lambda inputs: inputs[0] * inputs[1], made("a2c").schedules, [])
    graph = Graphed(lambda inputs: inputs[0] * inputs[1], [], PlayedGraph())
    with compiling(CompileChoice(True)):
        assert [learn((torch.ones(1), factor)).tolist() for factor in (2, 3)] == [[2.0], [3.0]]
    assert [graph((torch.ones(1), factor)).tolist() for factor in (2, 2, 2, 2, 3)] == [[2.0]] * 4 + [[3.0]]


def test_an_object_that_is_written_to_between_calls_is_copied_again() -> None:
    tensor, graph, plain = torch.zeros(2), Graphed(Adds(), [], PlayedGraph()), Adds()
    inputs = (tensor, 1.0)
    for i in range(8):
        tensor.fill_(i)
        assert graph(inputs)[0].tolist() == plain(inputs)[0].tolist()


def test_memory_of_shapes_that_are_gone_is_freed() -> None:
    seen: list[ref[Tensor]] = []

    def learn(inputs: Any) -> Any:
        seen.append(ref(inputs[0]))
        return (inputs[0] + inputs[1],)

    graph = Graphed(learn, [], PlayedGraph())
    for size in (2, 1, 2, 1):
        called(graph, 6, lambda _, size=size: size)
        gc.collect()
        assert len({id(tensor) for each in seen if (tensor := each()) is not None}) == 1
