"""The names of the environments that are known here, for lists."""

from __future__ import annotations

import gymnasium

from rlframe.envs import pettingzoo
from rlframe.envs.make import gives_raw_frames, register_atari


def registered_envs() -> list[tuple[str, str]]:
    """The ids that Gymnasium and PettingZoo know here, without raw frames, and where each comes from."""
    register_atari()
    known = [spec for spec in gymnasium.registry.values() if not gives_raw_frames(spec)]
    found = [(spec.id, str(spec.vector_entry_point or spec.entry_point).partition(":")[0]) for spec in known]
    return sorted([*found, *((id_, "pettingzoo, of several agents") for id_ in pettingzoo.known())])
