"""Which ids of environments a message offers in the place of one that does not exist."""

from __future__ import annotations

import gymnasium
from gymnasium.envs.registration import EnvSpec

from rlframe.core.config import nearest
from rlframe.envs import pettingzoo


def nearest_id(id_: str) -> str:
    """`; did you mean ...?` with ids of Gymnasium and PettingZoo: of each environment its newest version."""
    specs = sorted(gymnasium.registry.values(), key=lambda spec: spec.version or 0)
    newest = {(spec.namespace, spec.name): spec.id for spec in specs if not _is_old_name(spec)}
    return nearest(id_, [*newest.values(), *pettingzoo.known()])


def _is_old_name(spec: EnvSpec) -> bool:
    """Whether it is one of ale_py's old names, such as PongNoFrameskip-v4, whose game has one in ALE/ too."""
    return spec.namespace is None and str(spec.entry_point).startswith("ale_py")
