"""Canonical zeros and actions, and their decoding for environments, against values by hand."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Space

from rlframe.core.errors import ConfigError, warn_once
from rlframe.core.multi_agent import side_by_side
from rlframe.core.spaces import (
    action_decoder,
    action_parts,
    check_action_space,
    check_observation_space,
    random_action,
    unbatch,
    without,
    zeros,
)
from rlframe.core.struct import map_tree
from rlframe.data.spaces import read_space, space_json
from rlframe.rewards.base import unbounded

INF = np.inf


def box(low: list[float], high: list[float]) -> spaces.Box:
    return spaces.Box(np.array(low, np.float32), np.array(high, np.float32))


ACTION = spaces.Dict(
    {
        "steer": box([-2.0, 0.0], [2.0, 10.0]),
        "gear": spaces.Discrete(3, start=-1),
        "more": spaces.Tuple((spaces.MultiDiscrete([2, 3], start=[5, 7]), spaces.MultiBinary(2))),
    }
)


class TestZeros:
    @pytest.mark.parametrize(
        ("space", "shape", "dtype"),
        [
            (spaces.Box(-1, 1, (3,), np.float32), (4, 3), np.float32),
            (spaces.Box(-1, 1, (3,), np.float64), (4, 3), np.float32),
            (spaces.Box(0, 255, (3, 8, 8), np.uint8), (4, 3, 8, 8), np.uint8),
            (spaces.Discrete(5, start=2), (4,), np.int64),
            (spaces.MultiDiscrete([2, 3]), (4, 2), np.int64),
            (spaces.MultiBinary(6), (4, 6), np.int8),
        ],
    )
    def test_shape_and_dtype(self, space: Space, shape: tuple[int, ...], dtype: Any) -> None:
        array = zeros(space, (4,))
        assert array.shape == shape
        assert array.dtype == dtype
        assert not array.any()

    def test_dict_and_tuple_keep_their_structure(self) -> None:
        tree = zeros(ACTION, (2,))
        assert set(tree) == {"steer", "gear", "more"}
        assert tree["steer"].shape == (2, 2)
        assert tree["more"][0].dtype == np.int64
        assert tree["more"][1].dtype == np.int8

    def test_without_leading_dimensions(self) -> None:
        assert zeros(spaces.Discrete(2)).shape == ()


class TestBoxDecoder:
    def test_finite_bounds_are_spanned_by_minus_one_to_one(self) -> None:
        decode = action_decoder(box([-2.0, 0.0], [2.0, 10.0]))
        decoded = decode(np.array([[-1.0, -1.0], [0.0, 0.0], [0.5, 0.5], [1.0, 1.0]], np.float32))
        assert decoded.tolist() == [[-2, 0], [0, 5], [1, 7.5], [2, 10]]
        assert decoded.dtype == np.float32

    def test_beyond_the_bounds_is_clipped(self) -> None:
        decode = action_decoder(spaces.Box(-3.0, 3.0, (1,)))
        assert decode(np.array([[-1.5], [7.0]], np.float32)).tolist() == [[-3], [3]]

    def test_unbounded_passes_through(self) -> None:
        decode = action_decoder(spaces.Box(-INF, INF, (1,)))
        assert decode(np.array([[-150.0], [7.0]], np.float32)).tolist() == [[-150], [7]]

    def test_one_bound_clips_and_does_not_rescale(self) -> None:
        decode = action_decoder(box([2.0, -INF], [INF, 3.0]))
        assert decode(np.array([[-5.0, -5.0], [50.0, 50.0]], np.float32)).tolist() == [[2, -5], [50, 3]]

    def test_one_bound_of_float64_is_kept_to_the_bit(self) -> None:
        space = spaces.Box(0.7, INF, (1,), np.float64)
        assert space.contains(action_decoder(space)(np.array([[-5.0]], np.float32))[0])

    def test_bounds_may_be_mixed(self) -> None:
        decode = action_decoder(box([0.0, -INF, 0.0], [4.0, INF, INF]))
        assert decode(np.array([[0.5, 9.0, -1.0]], np.float32)).tolist() == [[3, 9, 0]]

    def test_float64_environments_get_float64_within_bounds(self) -> None:
        space = spaces.Box(-0.1, 0.3, (1,), np.float64)
        decoded = action_decoder(space)(np.array([[-1.0], [1.0], [0.123]], np.float32))
        assert decoded.dtype == np.float64
        assert all(space.contains(row) for row in decoded)

    def test_extremes_stay_inside_the_space(self) -> None:
        space = spaces.Box(np.float32(0.1), np.float32(0.7), (2,), np.float32)
        decoded = action_decoder(space)(np.array([[-1.0, 1.0], [1.0, -1.0]], np.float32))
        assert all(space.contains(row) for row in decoded)

    def test_the_canonical_action_is_not_changed(self) -> None:
        action = np.array([[5.0]], np.float32)
        action_decoder(spaces.Box(-1.0, 1.0, (1,)))(action)
        assert action.item() == 5


class TestOtherDecoders:
    def test_discrete_gets_its_start_back(self) -> None:
        assert action_decoder(spaces.Discrete(3, start=-1))(np.array([0, 1, 2])).tolist() == [-1, 0, 1]

    def test_discrete_is_freshly_allocated(self) -> None:
        action = np.array([0, 1])
        assert not np.shares_memory(action_decoder(spaces.Discrete(2))(action), action)

    def test_multi_discrete_gets_its_starts_back(self) -> None:
        decode = action_decoder(spaces.MultiDiscrete([2, 3], start=[5, 7]))
        assert decode(np.array([[0, 0], [1, 2]])).tolist() == [[5, 7], [6, 9]]

    def test_multi_binary_has_the_environments_dtype(self) -> None:
        assert action_decoder(spaces.MultiBinary(2))(np.array([[0, 1]])).dtype == np.int8

    def test_dict_and_tuple_decode_their_parts(self) -> None:
        canonical = {
            "steer": np.array([[1.0, 0.0]], np.float32),
            "gear": np.array([2]),
            "more": (np.array([[1, 1]]), np.array([[1, 0]])),
        }
        decoded = action_decoder(ACTION)(canonical)
        assert decoded["steer"].tolist() == [[2, 5]]
        assert decoded["gear"].tolist() == [1]
        assert decoded["more"][0].tolist() == [[6, 8]]


class TestUnbatch:
    def test_discrete_becomes_python_ints(self) -> None:
        actions = unbatch(spaces.Discrete(3))(np.array([0, 2]))
        assert actions == [0, 2]
        assert type(actions[0]) is int

    def test_a_box_without_axes_becomes_arrays(self) -> None:
        (action,) = unbatch(spaces.Box(-1, 1, ()))(np.array([0.5], np.float32))
        assert isinstance(action, np.ndarray)
        assert (action.shape, action.dtype) == ((), np.float32)

    def test_every_row_of_a_random_batch_is_in_the_space(self) -> None:
        batch = action_decoder(ACTION)(random_action(ACTION, np.random.default_rng(0), 20))
        actions = unbatch(ACTION)(batch)
        assert len(actions) == 20
        for action in actions:
            action["gear"] = np.int64(action["gear"])  # Discrete.contains is strict, environments are not
            assert ACTION.contains(action)

    def test_tuples_are_split_by_row(self) -> None:
        space = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1,))))
        first, second = unbatch(space)((np.array([0, 1]), np.array([[0.5], [0.25]])))
        assert (first[0], first[1].tolist()) == (0, [0.5])
        assert (second[0], second[1].tolist()) == (1, [0.25])


class TestRandomAction:
    def test_is_canonical(self) -> None:
        action = random_action(ACTION, np.random.default_rng(0), 1000)
        assert action["steer"].min(axis=0) == pytest.approx([-1, -1], abs=0.05)
        assert action["steer"].max(axis=0) == pytest.approx([1, 1], abs=0.05)
        assert np.abs(action["steer"]).max() <= 1
        assert set(action["gear"]) == {0, 1, 2}
        assert action["more"][0].max(axis=0).tolist() == [1, 2]
        assert [set(x) for x in action["more"][1].T] == [{0, 1}] * 2

    def test_has_the_dtypes_and_shapes_of_zeros(self) -> None:
        action = random_action(ACTION, np.random.default_rng(0), 3)

        def check(x: np.ndarray, expected: np.ndarray) -> None:
            assert x.dtype == expected.dtype
            assert x.shape == expected.shape

        map_tree(check, action, zeros(ACTION, (3,)))


class TestRefusals:
    @pytest.mark.parametrize(
        "space",
        [
            spaces.Text(5),
            spaces.Sequence(spaces.Discrete(2)),
            spaces.Dict({}),
            spaces.Tuple(()),
            spaces.Box(-1, 1, (0,)),
        ],
    )
    def test_observation_space(self, space: Space) -> None:
        with pytest.raises(ValueError, match="observation space"):
            check_observation_space(space)

    def test_the_part_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"observation\['a'\]\[1\] space Text"):
            check_observation_space(spaces.Dict({"a": spaces.Tuple((spaces.Discrete(2), spaces.Text(3)))}))

    @pytest.mark.parametrize(
        ("space", "reason"),
        [
            (spaces.Box(0, 5, (1,), np.int64), "holds integers"),
            (spaces.Box(1.0, 1.0, (1,)), "low < high"),
            (spaces.Box(-1e39, 1e39, (1,), np.float64), "has finite bounds beyond 3.4e.38, float32's; use inf"),
        ],
    )
    def test_action_box(self, space: Space, reason: str) -> None:
        with pytest.raises(ValueError, match=rf"action\['box'\] space .* {reason}"):
            check_action_space(spaces.Dict({"box": space}))

    def test_supported_spaces_pass(self) -> None:
        check_action_space(ACTION)
        check_action_space(spaces.Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (1,)))
        check_observation_space(spaces.Dict({"image": spaces.Box(0, 255, (8, 8, 3), np.uint8), "parts": ACTION}))


def test_action_parts_are_named_by_their_path() -> None:
    names = [name for name, _ in action_parts(ACTION)]
    assert sorted(names) == ["action['gear']", "action['more'][0]", "action['more'][1]", "action['steer']"]


def test_an_error_about_a_space_that_prints_in_lines_is_one_line() -> None:
    error = ConfigError(f"action space {spaces.MultiDiscrete([[2, 3], [3, 2]])} is not supported")
    assert "\n" not in str(error)
    assert "[2 3]  [3 2]" in str(error)


def test_a_critics_part_of_another_name_is_told_to_reach_policies_too(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    check_observation_space(spaces.Dict(policy=spaces.Discrete(2), critic=spaces.Discrete(3)))
    assert "the part for critics alone is to be called privileged" in caplog.text


@pytest.mark.parametrize(
    "made",
    [
        lambda space: without(space, "action_mask"),
        lambda space: side_by_side(space, 2),
        unbounded,
        lambda space: read_space(space_json(space), ""),
    ],
    ids=["without", "side_by_side", "unbounded", "read_space"],
)
def test_spaces_made_from_a_dict_keep_its_order_by_which_networks_read_its_arrays(made: Any) -> None:
    space = spaces.Dict(state=box([-1.0], [1.0]), card=spaces.Discrete(5), action_mask=spaces.MultiBinary(2))
    assert [*made(space)][:2] == ["state", "card"]  # keywords, which Gymnasium does not sort
