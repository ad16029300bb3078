"""Algorithms, one file each, and what they share.

The head of each says where its gradient step is read. To be skipped are the rest of `updates`, and `kernels`, which
only make it fast; `updates.schedules`, which change numbers during a run; `replay_ratio`, which says when an update
is due; `models.views`, which says what a network sees; and `replay.arrays` and `replay.frames`, in which rows lie.
"""

from rlframe.algos.base import Algorithm, UpdateMetrics
from rlframe.updates.progress import Progress

# Names of the field that are settings of another algorithm: a preset of each.
PRESETS = {
    "crossq": "mujoco/crossq_halfcheetah",
    "xqc": "mujoco/xqc_halfcheetah",
    "flashsac": "mujoco/flashsac_halfcheetah",
    "simbav2": "mujoco/simbav2_halfcheetah",
    "tqc": "classic/tqc_pendulum",
    "redq": "mujoco/redq_hopper",
    "droq": "mujoco/droq_hopper",
    "dsac": "dsac/halfcheetah",
    "c51": "atari/c51_pong",
    "qrdqn": "classic/qrdqn_cartpole",
    "rainbow": "atari/rainbow_pong",
    "btr": "atari/btr_pong",
    "apex": "async/apex_dqn_cartpole",
    "a3c": "async/a3c_cartpole",
    "mappo": "multi_agent/mappo_simple_spread",
    "vdn": "multi_agent/vdn_simple_spread",
}

__all__ = ["Algorithm", "Progress", "UpdateMetrics"]
