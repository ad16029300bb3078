"""Trees of arrays: views, writing in place, one memory for NumPy and torch, and the way into other processes."""

import dataclasses
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rlframe.core.struct import Struct, Tree, as_numpy, leaves, map_tree, write, writer, zeros_like
from rlframe.core.types import AgentInputs, BatchSpec, Samples, Trajectory


@dataclass(frozen=True, eq=False)
class Inner(Struct):
    a: Tree


@dataclass(frozen=True, eq=False)
class Outer(Struct):
    x: Tree
    inner: Inner
    nested: Tree
    empty: Tree = ()


def example(lead: tuple[int, ...] = (3, 2)) -> Outer:
    size = int(np.prod(lead))
    return Outer(
        x=np.arange(size, dtype=np.float32).reshape(lead),
        inner=Inner(np.arange(size * 2, dtype=np.int64).reshape(*lead, 2)),
        nested={"k": (np.zeros(lead, np.uint8), {"deep": np.ones(lead, bool)})},
    )


class TestViews:
    def test_indexing_reaches_every_leaf(self) -> None:
        row = example()[1]
        assert row.x.tolist() == [2, 3]
        assert row.inner.a.tolist() == [[4, 5], [6, 7]]
        assert row.nested["k"][0].shape == (2,)
        assert row.empty == ()
        assert isinstance(row, Outer)
        assert isinstance(row.inner, Inner)

    def test_a_basic_index_is_a_view(self) -> None:
        outer = example()
        outer[1:].x[0, 0] = 99
        outer[0].nested["k"][1]["deep"][1] = False
        assert outer.x[1, 0] == 99
        assert not outer.nested["k"][1]["deep"][0, 1]

    def test_assignment_writes_in_place_into_every_leaf(self) -> None:
        outer, source = example(), example()
        x = outer.x
        outer[2] = source[0]
        assert x[2].tolist() == [0, 1]
        assert outer.inner.a[2].tolist() == [[0, 1], [2, 3]]

    def test_fields_cannot_be_rebound(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            example().x = np.zeros(3)  # type: ignore[misc]

    def test_a_struct_is_only_equal_to_itself(self) -> None:
        outer = example()
        assert outer == outer
        assert outer != example()


class TestMap:
    def test_map_keeps_the_structure(self) -> None:
        doubled = example().map(lambda x: x * 2)
        assert doubled.x[0].tolist() == [0, 2]
        assert doubled.nested["k"][1]["deep"].sum() == 12
        assert isinstance(doubled.nested["k"], tuple)

    def test_map_over_several_takes_the_leaves_in_the_same_places(self) -> None:
        total = example().map(lambda a, b, c: a + b + c, example(), example())
        assert total.inner.a[0, 1].tolist() == [6, 9]

    def test_leaves_come_in_the_order_of_fields(self) -> None:
        outer = example()
        found = leaves(outer)
        assert found[0] is outer.x
        assert found[1] is outer.inner.a
        assert [leaf.dtype for leaf in found[2:]] == [np.uint8, bool]

    def test_trees_of_different_places_are_refused(self) -> None:
        with pytest.raises(KeyError):
            map_tree(lambda a, b: a, {"k": 1}, {"other": 1})
        with pytest.raises(ValueError, match="zip"):
            map_tree(lambda a, b: a, (1, 2), (1,))


class TestNumpyAndTorch:
    def test_torch_and_numpy_share_memory(self) -> None:
        outer = example()
        tensors = outer.torch()
        tensors.x[0, 0] = 7
        tensors.nested["k"][1]["deep"][0, 0] = False
        assert outer.x[0, 0] == 7
        assert not outer.nested["k"][1]["deep"][0, 0]
        tensors.numpy().inner.a[2, 1, 1] = -1
        assert outer.inner.a[2, 1, 1] == -1

    def test_dtypes_carry_over(self) -> None:
        tensors = example().torch()
        assert tensors.x.dtype == torch.float32
        assert tensors.inner.a.dtype == torch.int64
        assert tensors.nested["k"][0].dtype == torch.uint8
        assert tensors.nested["k"][1]["deep"].dtype == torch.bool

    def test_to_the_same_device_does_not_copy(self) -> None:
        tensors = example().torch()
        assert tensors.to("cpu").x is tensors.x

    def test_as_numpy_takes_a_tensor_with_gradient(self) -> None:
        assert as_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


class TestZerosLike:
    def test_leading_dimensions_and_dtypes(self) -> None:
        zeros = zeros_like(example(()), (5, 4))
        assert zeros.x.shape == (5, 4)
        assert zeros.inner.a.shape == (5, 4, 2)
        assert zeros.inner.a.dtype == np.int64
        assert zeros.nested["k"][1]["deep"].dtype == bool
        assert isinstance(zeros, Outer)

    def test_tensors_and_numbers_are_examples_too(self) -> None:
        zeros = zeros_like((torch.ones(3), 1.0, True), (2,))
        assert [leaf.dtype for leaf in zeros] == [np.float32, np.float64, bool]
        assert zeros[0].shape == (2, 3)


class TestWrite:
    def test_writes_every_leaf_in_place(self) -> None:
        target, source = example(), example().map(lambda x: x + 1)
        x = target.x
        write(target, source)
        assert x[0].tolist() == [1, 2]
        assert target.nested["k"][0][0, 0] == 1

    def test_tensors_take_arrays(self) -> None:
        target = torch.zeros(2)
        write(target, np.array([1.5, 2.5]))
        assert target.tolist() == [1.5, 2.5]

    def test_casts_to_the_target(self) -> None:
        target = np.zeros(2, np.float32)
        write(target, np.array([1.5, 2.5], np.float64))
        assert target.dtype == np.float32
        assert target.tolist() == [1.5, 2.5]

    def test_numpy_targets_take_tensors_and_numbers(self) -> None:
        target = (np.zeros(2), np.zeros(2))
        write(target, (torch.tensor([1.0, 2.0]), 3.0))
        assert target[0].tolist() == [1, 2]
        assert target[1].tolist() == [3, 3]

    def test_rows_of_a_batch_are_targets(self) -> None:
        batch = zeros_like(example((2,)), (3,))
        write(batch[1], example((2,)))
        assert batch.x.tolist() == [[0, 0], [0, 1], [0, 0]]

    def test_dicts_are_matched_by_key_and_may_have_more(self) -> None:
        target = {"a": np.zeros(1), "b": torch.zeros(2)}
        write(target, {"b": torch.ones(2), "more": np.zeros(3), "a": 1})
        assert (target["a"].tolist(), target["b"].tolist()) == ([1], [1, 1])

    def test_a_missing_place_is_refused(self) -> None:
        with pytest.raises(KeyError):
            write({"k": np.zeros(1)}, {})

    def test_a_writer_writes_as_often_as_asked(self) -> None:
        target = example()
        fill = writer(target)
        for more in (1, 2):
            fill(source := example().map(lambda x, more=more: (x + more).astype(x.dtype)))
            for a, b in zip(leaves(target), leaves(source), strict=True):
                np.testing.assert_array_equal(a, b)


def sampled(T: int = 4, B: int = 2) -> Samples:
    rng = np.random.default_rng(0)
    image = rng.integers(255, size=(T + 1, B, 3, 4, 4), dtype=np.uint8)
    prev_action = np.arange((T + 1) * B).reshape(T + 1, B)
    prev_reward = rng.random((T + 1, B), np.float32)
    return Samples(
        inputs=AgentInputs({"image": image, "speed": prev_reward}, prev_action, prev_reward, prev_reward < 0.3),
        action=prev_action[1:],
        reward=prev_reward[1:],
        terminated=prev_reward[1:] > 0.8,
        truncated=prev_reward[1:] < 0.2,
        valid=prev_reward[1:] > 0,
        info=Inner(prev_reward[:-1]),
        state=(np.full((B, 8), 0.5, np.float32), np.zeros((B, 8), np.float32)),
        final_state=(),
        n_env_steps=T * B,
        start=12,
        stream=3,
    )


def test_pickled_samples_are_the_same_and_may_be_written_to() -> None:
    sent = sampled()
    received = pickle.loads(pickle.dumps(sent))
    assert isinstance(received, Samples)
    assert isinstance(received.inputs, AgentInputs)
    assert isinstance(received.info, Inner)
    for before, after in zip(leaves(sent), leaves(received), strict=True):
        assert before.dtype == after.dtype
        assert np.array_equal(before, after)
    received.reward[...] += 1
    assert np.array_equal(received.reward, sent.reward + 1)


def test_plain_fields_are_no_leaves_and_survive_every_copy() -> None:
    samples = sampled()
    assert all(isinstance(leaf, np.ndarray) for leaf in leaves(samples))
    tensors = samples.torch()
    copies = [samples.map(np.copy), samples[1:3], tensors, tensors.numpy(), tensors.to("cpu"), tensors[0]]
    for copy in [*copies, zeros_like(samples, (2,)), pickle.loads(pickle.dumps(samples))]:
        assert (copy.n_env_steps, copy.start, copy.stream) == (8, 12, 3)
    write(samples, dataclasses.replace(samples, start=99))
    assert samples.start == 12


def test_batch_spec_counts_rows() -> None:
    assert BatchSpec(T=128, B=8).size == 1024


def test_trajectories_do_not_share_diagnostics() -> None:
    first, second = (Trajectory(return_=1.0, length=2, terminated=True, env=0) for _ in range(2))
    first.diagnostics["speed"] = 1.0
    assert second.diagnostics == {}
