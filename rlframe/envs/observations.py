"""Writes observations into the rows of a batch, and checks their types, shapes and values. Used by every backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rlframe.core.errors import Stopped, one_line
from rlframe.core.multi_agent import OBSERVATION, JointRows, JointSpace, flat, is_opponent
from rlframe.core.spaces import action_parts
from rlframe.core.struct import Tree, leaves, map_tree

Write = Callable[[Tree, int, Any], None]
WriteBatch = Callable[[Tree, Any], None]
Warn = Callable[[str], None]  # of values that are converted
INTERFACE = (
    "step must return observation, reward, terminated, truncated, info, and reset observation, info, as Gymnasium's do"
)
MOST = float(np.finfo(np.float32).max)  # of rewards


class InvalidValue(Exception):
    """An observation, reward or flag that the environment's spaces do not allow; `index`: of that environment."""

    def __init__(self, text: str, index: int | None = None) -> None:
        super().__init__(text)
        self.index = index


ENV_ERRORS = (Exception, SystemExit)  # what an environment may raise


def external_cause(error: BaseException) -> BaseException | None:
    """The cause to show with an EnvError: `error`, or None for an InvalidValue, whose message says everything.

    Raises:
        Stopped: `error` is none of the environment's: rlframe ends this process.
    """
    if isinstance(error, Stopped):
        raise error
    return None if isinstance(error, InvalidValue) else error


def describe(error: BaseException) -> str:
    """What an environment did wrong, for an EnvError's message."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code})"
    if isinstance(error, InvalidValue):
        return f"returned an invalid value: {error}"
    return f"raised: {type(error).__name__}: {error}"


def check_info(info: Any) -> None:
    """Raise InvalidValue if an environment's info is not a dict."""
    if not isinstance(info, dict):
        raise InvalidValue(f"`info` is not a dict but {_kind(info)}; {INTERFACE}")


def check_reward(reward: Any, of: str = "") -> None:
    """Raise InvalidValue if a reward is no number that float32 holds; `of`: whose it is, for the message."""
    if not isinstance(reward, int | float | np.bool_ | np.integer | np.floating):
        raise InvalidValue(f"the reward{of} is not a real number but {reward!r:.60} of type {type(reward).__name__}")
    if not abs(float(reward)) <= MOST:
        raise InvalidValue(f"the reward{of} is not finite: {reward}")


def row_writer(space: Space, warn: Warn, name: str = "the observation") -> Write:
    """A function (rows, index, observation) that checks and writes one observation, except for NaN and Inf.

    A Box's observation of the right shape and another dtype is converted, with a warning (see `convert`).
    """
    match space:
        case spaces.Dict():
            parts = {key: row_writer(sub, warn, f"{name}[{key!r}]") for key, sub in space.spaces.items()}
            found = _dict_writer(parts, name)
            return _joint_writer(found) if isinstance(space, JointSpace) else found
        case spaces.Tuple():
            return _tuple_writer([row_writer(sub, warn, f"{name}[{i}]") for i, sub in enumerate(space.spaces)], name)
        case spaces.Box():
            return _box_writer(space, warn, name)
        case spaces.Discrete():
            return _discrete_writer(space, name)
        case _:
            return _integers_writer(space, name)


def _dict_writer(parts: dict[str, Write], name: str) -> Write:
    keys = set(parts)

    def write(rows: Tree, index: int, observation: Any) -> None:
        if not isinstance(observation, dict) or set(observation) != keys:
            found = sorted(observation) if isinstance(observation, dict) else type(observation).__name__
            raise InvalidValue(f"{name} is not a dict of {sorted(keys)} but {found}")
        for key, part in parts.items():
            part(rows[key], index, observation[key])

    return write


def _joint_writer(other: Write) -> Write:
    """Of several agents; `other` is for what is no JointRows, which a wrapper has made."""

    def write(rows: Tree, index: int, observation: Any) -> None:
        if type(observation) is JointRows:
            observation.write(rows, index)
        else:
            other(rows, index, observation)

    return write


def _tuple_writer(parts: list[Write], name: str) -> Write:
    def write(rows: Tree, index: int, observation: Any) -> None:
        if not isinstance(observation, tuple | list) or len(observation) != len(parts):
            raise InvalidValue(f"{name} is not a tuple of {len(parts)} but {_kind(observation)}")
        for part, row, value in zip(parts, rows, observation, strict=True):
            part(row, index, value)

    return write


def _box_writer(space: spaces.Box, warn: Warn, name: str) -> Write:
    shape, dtype = space.shape, space.dtype
    arrays = (np.ndarray, np.generic)  # a NumPy scalar is an array of shape ()

    def write(rows: Tree, index: int, observation: Any) -> None:
        if isinstance(observation, arrays) and observation.shape == shape and observation.dtype == dtype:
            rows[index] = observation
        else:
            rows[index] = convert(observation, shape, dtype, warn, name)

    return write


def convert(value: Any, shape: tuple[int, ...], dtype: Any, warn: Warn, name: str) -> np.ndarray:
    """The value as an array of this dtype, with a warning: floats are rounded, integers must stay exact.

    Raises InvalidValue: it is no array or list of numbers of this shape, or the dtype cannot hold it.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        array = np.empty(0, object)
    if array.shape != shape or array.dtype.kind not in "biuf":
        raise InvalidValue(f"{name} is not an array of shape {shape} and dtype {dtype} but {_kind(value)}")
    with np.errstate(all="ignore"):  # Inf and NaN are found by batch_checker
        converted = array.astype(dtype)
    if converted.dtype.kind != "f" and not np.array_equal(converted, array):
        raise InvalidValue(f"{name} is not of dtype {dtype}, which cannot hold it, but {_kind(value)}")
    given = f"has dtype {array.dtype}" if isinstance(value, np.ndarray | np.generic) else f"is a {type(value).__name__}"
    warn(f"{name} {given} and is converted to {dtype}, the dtype of its space")
    return converted


def _discrete_writer(space: spaces.Discrete, name: str) -> Write:
    start, n = int(space.start), int(space.n)

    def write(rows: Tree, index: int, observation: Any) -> None:
        try:
            number = observation.__index__() - start  # ints, NumPy ints and integer arrays of shape ()
        except (AttributeError, TypeError):
            raise InvalidValue(f"{name} is not an integer but {_kind(observation)}") from None
        if not 0 <= number < n:
            raise InvalidValue(f"{name} is {observation}, outside {space}")
        rows[index] = number

    return write


def _integers_writer(space: Space, name: str) -> Write:
    """MultiDiscrete and MultiBinary."""
    shape = space.shape
    start = space.start if isinstance(space, spaces.MultiDiscrete) and np.any(space.start) else 0

    def write(rows: Tree, index: int, observation: Any) -> None:
        if not isinstance(observation, np.ndarray) or observation.shape != shape or observation.dtype.kind not in "biu":
            raise InvalidValue(f"{name} is not an integer array of shape {shape} but {_kind(observation)}")
        np.subtract(observation, start, out=rows[index, ...], casting="unsafe")
        if observation.itemsize > rows.itemsize and (rows[index] != observation).any():  # 256 would be 0
            raise InvalidValue(f"{name} is outside {space}: {observation}")

    return write


def rows_writer(space: Space, rows: Any) -> Callable[[list[Any]], None] | None:
    """A function that writes the observations of all agents into `rows` at once; None for another space than a Box.

    It raises InvalidValue or TypeError if one is no array of the shape and dtype of the space.
    """
    if not isinstance(space, spaces.Box) or not space.shape:
        return None
    shape, sizes = space.shape, {space.shape[0]}
    casting: Any = "same_kind" if space.dtype == np.float64 else "no"
    joined = rows.reshape(-1, *shape[1:])

    def write(observations: list[Any]) -> None:
        if set(map(len, observations)) != sizes:  # concatenate checks the other dimensions
            raise InvalidValue("another shape")
        np.concatenate(observations, out=joined, casting=casting)  # stack takes twice the time

    return write


def batch_writer(space: Space, n: int, warn: Warn) -> WriteBatch:
    """A function (rows, observation) that checks a vector environment's observations and copies them into the rows."""
    writers = [_batch_leaf_writer(sub, n, warn, name) for name, sub in action_parts(space, "the observation")]
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return writers[0]

    def write(rows: Tree, observation: Any) -> None:
        following = iter(writers)
        map_tree(lambda row, value: next(following)(row, value), rows, observation)

    return write


def _batch_leaf_writer(space: Space, n: int, warn: Warn, name: str) -> WriteBatch:
    shape, dtype = (n, *(space.shape or ())), space.dtype
    integers = not isinstance(space, spaces.Box)  # any integer dtype is accepted: EnvPool returns int32 for int64
    start = np.asarray(space.start) if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else np.asarray(0)
    shifted = bool(start.any())
    choices = int(space.n) if isinstance(space, spaces.Discrete) else 0

    def write(rows: Tree, observation: Any) -> None:
        fits = isinstance(observation, np.ndarray) and observation.shape == shape
        if not fits or not (observation.dtype == dtype or (integers and observation.dtype.kind in "biu")):
            observation = convert(observation, shape, dtype, warn, name)
        if shifted:
            np.subtract(observation, start, out=rows, casting="unsafe")
        else:
            rows[...] = observation
        if integers and observation.itemsize > rows.itemsize and (rows != observation).any():  # 256 would be 0
            index = _first_bad(rows == observation)
            raise InvalidValue(f"{name} is outside {space}: {observation[index]}", index)
        if choices and not 0 <= rows.min() <= rows.max() < choices:
            index = _first_bad((rows >= 0) & (rows < choices))
            raise InvalidValue(f"{name} is {observation[index]}, outside {space}", index)

    return write


def batch_checker(space: Space) -> Callable[[Tree], None]:
    """A function that checks rows [B, ...] for NaN, Inf and values out of range, all environments at once.

    Float boxes must be finite, MultiDiscrete and MultiBinary in range. A Box's bounds: see BoundsCheck.
    """
    if isinstance(space, JointSpace):
        return _joint_checker(space)
    checks = [_leaf_check(sub, name) for name, sub in action_parts(space, "the observation")]
    if not any(checks):
        return lambda rows: None
    if len(checks) == 1 and checks[0] and not isinstance(space, spaces.Dict | spaces.Tuple):
        return checks[0]  # the common case, without walking a tree

    def check(rows: Tree) -> None:
        for leaf, check_leaf in zip(leaves(rows), checks, strict=True):
            if check_leaf:
                check_leaf(leaf)

    return check


def _joint_checker(space: JointSpace) -> Callable[[Tree], None]:
    """The same for what agents observe; their rewards and flags have been checked one by one."""
    checks = [(policy, agents, batch_checker(space.own[policy])) for policy, agents in space.agents.items()]

    def check(rows: Tree) -> None:
        for policy, agents, check_own in checks:
            try:
                check_own(flat(rows[policy][OBSERVATION]))
            except InvalidValue as invalid:
                env, k = divmod(invalid.index or 0, len(agents))
                who = f"policy {policy}" if is_opponent(policy) else f"agent {agents[k]} (policy {policy})"
                raise InvalidValue(f"{who}: {invalid}", env) from None

    return check


def check_mask(mask: np.ndarray, parts: Sequence[int], ended: np.ndarray) -> None:
    """Raise InvalidValue if an action mask [B, sum(parts)] allows no action of a part, but where an episode ended.

    So it does for negative numbers, which masks that are added to logits have: there 0 allows an action.
    """
    if mask.dtype.kind in "if" and (mask < 0).any():
        index = _first_bad(mask >= 0)
        raise InvalidValue(
            f"the action mask has negative numbers, as if it were added to logits: {one_line(mask[index], 100)}; let 1 "
            f"allow an action and 0 forbid it",
            index,
        )
    starts = np.cumsum([0, *parts[:-1]])
    some = np.logical_or.reduceat(mask != 0, starts, axis=-1) | ended[:, None]
    if not some.all():
        index = _first_bad(some)
        of = f" of action[{int((~some[index]).argmax())}]" if len(parts) > 1 else ""
        raise InvalidValue(f"the action mask forbids every action{of}: {mask[index]}", index)


def _leaf_check(space: Space, name: str) -> Callable[[np.ndarray], None] | None:
    match space:
        case spaces.Box() if space.dtype is not None and space.dtype.kind == "f":

            def check_finite(rows: np.ndarray) -> None:
                finite = np.isfinite(rows)
                if np.count_nonzero(finite) != finite.size:  # takes a fifth of the time of all()
                    index = _first_bad(finite)
                    found = one_line(rows[index])
                    raise InvalidValue(f"{name} is not finite: {found}", index)

            return check_finite
        case spaces.MultiDiscrete() | spaces.MultiBinary():
            size = space.nvec if isinstance(space, spaces.MultiDiscrete) else np.asarray(2)

            def check_range(rows: np.ndarray) -> None:
                inside = (rows >= 0) & (rows < size)
                if not inside.all():
                    index = _first_bad(inside)
                    raise InvalidValue(f"{name} is outside {space} (counted from its start: {rows[index]})", index)

            return check_range
        case _:  # Discrete is checked when it is written
            return None


def _first_bad(good: np.ndarray) -> int:
    return int(np.flatnonzero(~good.reshape(len(good), -1).all(axis=1))[0])


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"one of shape {value.shape} and dtype {value.dtype}"
    return f"a {type(value).__name__}: {str(value)[:60]}"


_N_FULLY_CHECKED = 1000  # time steps; after them, one row of each batch is checked

_log = logging.getLogger("rlframe")


class BoundsCheck:
    """Counts observations outside their Box's bounds, and warns once. They matter only to what scales by the bounds."""

    def __init__(self, space: Space) -> None:
        parts = enumerate(action_parts(space, "observation"))
        boxes = [(i, name, box) for i, (name, box) in parts if isinstance(box, spaces.Box) and box.dtype != np.uint8]
        self._boxes = [each for each in boxes if np.isfinite([each[2].low, each[2].high]).any()]
        self._seen = 0  # rows
        self.n_outside = 0  # observations

    def check(self, observation: Tree) -> None:
        """Check the observations [T+1, B, ...] of a batch, except row T, which is the next batch's row 0."""
        if not self._boxes:
            return
        T = len(leaves(observation)[0]) - 1
        row = self._seen // T % T
        rows = observation if self._seen < _N_FULLY_CHECKED else map_tree(lambda x: x[row : row + 2], observation)
        self._seen += T
        arrays = leaves(rows)
        for i, name, box in self._boxes:
            self._check(arrays[i][:-1], name, box)

    def _check(self, array: np.ndarray, name: str, box: Any) -> None:
        with np.errstate(over="ignore"):
            low, high = box.low.astype(array.dtype), box.high.astype(array.dtype)  # as rows are rounded
        outside = (array < low) | (array > high)
        if not np.count_nonzero(outside):
            return
        if self.n_outside == 0:
            at = np.argwhere(outside)[0]
            env = int(at[1])
            _log.warning(
                f"environment {env}: {name} is {array[tuple(at)]}, but its space allows {box.low[tuple(at[2:])]} to "
                f"{box.high[tuple(at[2:])]}; such observations are counted in sampler/out_of_space"
            )
        self.n_outside += int(outside.reshape(*array.shape[:2], -1).any(axis=2).sum())

    def state(self) -> dict[str, int]:
        return {"seen": self._seen, "outside": self.n_outside}

    def load(self, saved: Mapping[str, int]) -> None:
        self._seen, self.n_outside = saved["seen"], saved["outside"]

    def counters(self) -> dict[str, float]:
        """`sampler/out_of_space`, if any were found."""
        return {"sampler/out_of_space": self.n_outside} if self.n_outside else {}
