"""Gymnasium spaces as arrays: zeros, conversion of actions, and checks for supported spaces.

Agents see canonical values: Discrete counts from 0, Box actions with finite bounds span [-1, 1], float64 becomes
float32. Actions are clipped and rescaled on the environment's side, so a log-probability is that of the sampled action.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Space

from rlframe.core.errors import warn_once
from rlframe.core.struct import Tree

# Keys of Dict observations that say which actions an environment allows, and what each action is:
ACTION_MASK, AVAILABLE_ACTIONS, PRIVILEGED = "action_mask", "available_actions", "privileged"
_LARGEST = float(np.finfo(np.float32).max)


class FrameStack(spaces.Box):
    """Images that stack the last `n_frames` frames along axis 0, oldest first. Replay may store each frame once."""

    def __init__(self, box: spaces.Box, n_frames: int) -> None:
        if box.dtype != np.uint8 or len(box.shape) != 3 or box.shape[0] % n_frames:
            raise ValueError(f"{box} is not a stack of {n_frames} frames; use uint8 [n_frames * channels, H, W]")
        super().__init__(box.low, box.high, box.shape, np.uint8)
        self.n_frames = n_frames


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether an image's channels come last.

    The two equal sides are height and width; otherwise the smaller end is channels.
    """
    if len(shape) < 3:
        return False
    first, middle, last = shape[-3:]
    return last < first if (first == middle) == (middle == last) else first == middle


def zeros(space: Space, lead: tuple[int, ...] = ()) -> Tree:
    """Canonical NumPy zeros for `space`, shaped `lead + space.shape`."""
    match space:
        case spaces.Dict():
            return {key: zeros(sub, lead) for key, sub in space.spaces.items()}
        case spaces.Tuple():
            return tuple(zeros(sub, lead) for sub in space.spaces)
        case spaces.Discrete() | spaces.MultiDiscrete():
            return np.zeros(lead + tuple(space.shape or ()), np.int64)
        case _:
            dtype = np.float32 if space.dtype == np.float64 else space.dtype
            return np.zeros(lead + tuple(space.shape or ()), dtype)


def check_observation_space(space: Space, name: str = "observation") -> None:
    """Raise ValueError if a part is empty or not a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple."""
    match space:
        case spaces.Dict() | spaces.Tuple():
            if not space.spaces:
                raise ValueError(f"{name} space {space} has no elements")
            if isinstance(space, spaces.Dict) and {*space.spaces} == {"policy", "critic"}:
                warn_once(
                    f"policies see both parts of {name}, policy and critic; the part for critics alone is to be called "
                    f"{PRIVILEGED}"
                )
            for part_name, part in _parts(space, name):
                check_observation_space(part, part_name)
        case spaces.Box() | spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
            if 0 in (space.shape or ()):
                raise ValueError(f"{name} space {space} has no elements")
        case _:
            raise ValueError(
                f"{name} space {space} is not supported; use Box, Discrete, MultiDiscrete, MultiBinary, or Dict and "
                f"Tuple of them (wrap the environment to convert it)"
            )


def _parts(space: spaces.Dict | spaces.Tuple, name: str) -> list[tuple[str, Space]]:
    items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    return [(f"{name}[{key!r}]", part) for key, part in items]


def check_action_space(space: Space) -> None:
    """As `check_observation_space`; also raise ValueError for a Box of integers, or with wrong bounds.

    They are wrong with a NaN, low >= high, or a finite number beyond float32.
    """
    check_observation_space(space, "action")
    for name, box in action_parts(space, "action"):
        if not isinstance(box, spaces.Box):
            continue
        if not np.issubdtype(box.dtype, np.floating):
            raise ValueError(f"{name} space {box} holds integers; use MultiDiscrete, or a float Box and round inside")
        if not (box.low < box.high).all():
            raise ValueError(f"{name} space {box} needs low < high everywhere")
        bounds = np.abs([box.low, box.high]).astype(np.float64)
        if (np.isfinite(bounds) & (bounds > _LARGEST)).any():
            raise ValueError(f"{name} space {box} has finite bounds beyond {_LARGEST:.3g}, float32's; use inf for none")


def action_parts(space: Space, name: str = "action") -> list[tuple[str, Space]]:
    """The elementary spaces inside `space` with their paths, in the order of `struct.leaves`."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return [leaf for part_name, part in _parts(space, name) for leaf in action_parts(part, part_name)]
    return [(name, space)]


def mask_parts(observation_space: Space, action_space: Space) -> tuple[int, ...]:
    """The numbers of actions that the parts of an action mask are about; () if observations have no mask.

    A mask is the entry `action_mask` of a Dict observation, with one number for each of Discrete's actions, or for each
    of each part's of MultiDiscrete, side by side; not 0: allowed. With Box actions it is an ordinary observation.

    Raises:
        ValueError: the mask does not fit the actions, or there is nothing else to observe.
    """
    if not isinstance(observation_space, spaces.Dict) or ACTION_MASK not in observation_space.spaces:
        return ()
    match action_space:
        case spaces.Box():
            return ()
        case spaces.Discrete():
            parts: tuple[int, ...] = (int(action_space.n),)
        case spaces.MultiDiscrete():
            parts = tuple(int(n) for n in action_space.nvec.flatten())
        case _:
            raise ValueError(f"observation['action_mask'] needs Discrete or MultiDiscrete actions, got {action_space}")
    mask = observation_space[ACTION_MASK]
    if not isinstance(mask, spaces.Box | spaces.MultiBinary) or mask.shape != (sum(parts),):
        raise ValueError(
            f"observation['action_mask'] must be a MultiBinary or Box of shape ({sum(parts)},), one number for each "
            f"action of {action_space}, got {mask}"
        )
    if len(observation_space.spaces) == 1:
        raise ValueError("the observation is an action_mask alone; add what the policy is to see")
    return parts


def allowed(mask: Any) -> Any:
    """The allowed actions [..., n] as bools, of a mask of Discrete actions in NumPy or torch."""
    some = mask != 0
    return some | ~some.any(-1)[..., None]


def nth_allowed(mask: Any, drawn: Any) -> Any:
    """The allowed action with the number drawn modulo the number of allowed ones; [...] of masks [..., n]."""
    counts = allowed(mask).cumsum(-1)  # of allowed actions up to each
    return (counts <= (drawn % counts[..., -1])[..., None]).sum(-1)


def ordered_dict(entries: Mapping[str, Space]) -> spaces.Dict:
    """A Dict in this order, which is that of the arrays that belong to it; Gymnasium sorts the keys of a dict."""
    return spaces.Dict([*entries.items()])


def without(observation_space: Space, *entries: str) -> Space:
    """A Dict of the other entries of a Dict of observations, or the only other one."""
    assert isinstance(observation_space, spaces.Dict)
    others = {key: sub for key, sub in observation_space.spaces.items() if key not in entries}
    return next(iter(others.values())) if len(others) == 1 else ordered_dict(others)


def action_features(observation_space: Space, action_space: Space) -> int:
    """The number d of features of each action in the entry `available_actions` [A, d] of a Dict observation.

    Raises:
        ValueError: there is none, it does not fit the actions, or there is nothing else to observe.
    """
    if not isinstance(action_space, spaces.Discrete):
        raise ValueError(f"model.action_embedding needs Discrete actions, got {action_space}")
    entries = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {}
    if AVAILABLE_ACTIONS not in entries:
        raise ValueError(
            f"model.action_embedding needs a Dict observation of 'available_actions' and the state, got "
            f"{observation_space}"
        )
    box, n = entries[AVAILABLE_ACTIONS], int(action_space.n)
    is_float = isinstance(box, spaces.Box) and box.dtype.kind == "f"
    if not is_float or len(box.shape or ()) != 2 or box.shape[0] != n:  # type: ignore[index]
        raise ValueError(
            f"observation['available_actions'] must be a Box of floats of shape ({n}, d), d features for each action "
            f"of {action_space}, got {box}"
        )
    if len(entries) == 1:
        raise ValueError("the observation is available_actions alone; add the state that the policy is to see")
    return int(box.shape[1])  # type: ignore[index]


def random_allowed(
    action_space: Space, parts: Sequence[int], mask: np.ndarray, rngs: Sequence[np.random.Generator]
) -> np.ndarray:
    """Uniform canonical actions [B, *act] among those that masks [B, sum(parts)] allow; one generator for each row."""
    scores = np.stack([rng.random(sum(parts)) for rng in rngs]) * (mask != 0)
    chosen = [scores_of.argmax(-1) for scores_of in np.split(scores, np.cumsum(parts)[:-1], -1)]
    return np.stack(chosen, -1).reshape(len(mask), *(action_space.shape or ()))


Decoder = Callable[[Tree], Tree]


def action_decoder(space: Space) -> Decoder:
    """A function from a batch of canonical actions [B, ...] to newly allocated actions of the environment.

    Box dimensions with two finite bounds are clipped to [-1, 1] and rescaled; those with one finite bound are clipped
    to it. Discrete actions are shifted by `start`.
    """
    match space:
        case spaces.Dict():
            by_key = {key: action_decoder(sub) for key, sub in space.spaces.items()}
            return lambda action: {key: decode(action[key]) for key, decode in by_key.items()}
        case spaces.Tuple():
            each = [action_decoder(sub) for sub in space.spaces]
            return lambda action: tuple(decode(part) for decode, part in zip(each, action, strict=True))
        case spaces.Box():
            return _box_decoder(space)
        case spaces.Discrete() | spaces.MultiDiscrete():
            start = np.asarray(space.start)
            return (lambda action: action + start) if start.any() else np.array
        case _:
            return lambda action: action.astype(space.dtype)


def box_scaling(box: spaces.Box) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Scale, offset, canonical low and high, float32 of the box's shape: action = scale * canonical + offset."""
    low, high = box.low.astype(np.float64), box.high.astype(np.float64)
    bounded = np.isfinite(low) & np.isfinite(high)
    scale = np.where(bounded, high - np.where(bounded, low, 0), 2.0) / 2.0
    offset = np.where(bounded, np.where(bounded, low, 0) + scale, 0.0)
    scale, offset = scale.astype(np.float32), offset.astype(np.float32)
    canonical_low = np.where(bounded, -1.0, low).astype(np.float32)
    canonical_high = np.where(bounded, 1.0, high).astype(np.float32)
    return scale, offset, canonical_low, canonical_high


def _box_decoder(box: spaces.Box) -> Decoder:
    scale, offset, canonical_low, canonical_high = box_scaling(box)
    as_is = bool((scale == 1).all() and (offset == 0).all())  # no rescaling needed
    as_is &= bool((canonical_low == box.low).all() and (canonical_high == box.high).all())  # a bound of 0.7 is rounded

    def decode(action: np.ndarray) -> np.ndarray:
        decoded = np.maximum(action, canonical_low)  # np.clip takes 3 us more
        np.minimum(decoded, canonical_high, out=decoded)
        if as_is:
            return decoded.astype(box.dtype, copy=False)
        decoded *= scale
        decoded += offset
        decoded = decoded.astype(box.dtype, copy=False)
        np.maximum(decoded, box.low, out=decoded)  # rounding may exceed the bounds
        np.minimum(decoded, box.high, out=decoded)
        return decoded

    return decode


def unbatch(space: Space) -> Callable[[Tree], list[Any]]:
    """A function from a batch of decoded actions to a list of single actions for an environment's `step`."""
    match space:
        case spaces.Dict():
            by_key = {key: unbatch(sub) for key, sub in space.spaces.items()}

            def split_dict(action: Tree) -> list[Any]:
                columns = [split(action[key]) for key, split in by_key.items()]
                return [dict(zip(by_key, row, strict=True)) for row in zip(*columns, strict=True)]

            return split_dict
        case spaces.Tuple():
            each = [unbatch(sub) for sub in space.spaces]
            return lambda action: list(zip(*[split(a) for split, a in zip(each, action, strict=True)], strict=True))
        case spaces.Discrete():
            return lambda action: action.tolist()
        case spaces.Box(shape=()):  # whose rows NumPy gives as numbers
            return lambda action: [np.asarray(row) for row in action]
        case _:
            return list


def random_action(space: Space, rng: np.random.Generator, n: int) -> Tree:
    """Uniform canonical actions [n, ...]; standard normal in Box dimensions without two finite bounds."""
    match space:
        case spaces.Dict():
            return {key: random_action(sub, rng, n) for key, sub in space.spaces.items()}
        case spaces.Tuple():
            return tuple(random_action(sub, rng, n) for sub in space.spaces)
        case spaces.Discrete():
            return rng.integers(int(space.n), size=n)
        case spaces.MultiDiscrete():
            return rng.integers(space.nvec, size=(n, *space.nvec.shape))
        case spaces.MultiBinary():
            return rng.integers(2, size=(n, *space.shape), dtype=np.int8)
    assert isinstance(space, spaces.Box)
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    uniform = rng.uniform(-1, 1, (n, *space.shape))
    return np.where(bounded, uniform, rng.standard_normal((n, *space.shape))).astype(np.float32)
