"""The rows of `benchmarks.compare`: hyperparameters, one set for all frameworks, and the ratios to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CARTPOLE, CHEETAH, PONG = "CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5"
NEEDS = {CHEETAH: {"mujoco": '"gymnasium[mujoco]"'}, PONG: {"ale_py": "ale-py", "cv2": "opencv-python"}}  # pip names


@dataclass(frozen=True)
class PPO:
    """PPO with CleanRL's hyperparameters, the learning rate linear. Minibatches are n_envs * T / minibatches rows."""

    n_envs: int
    clip: float
    T: int = 128
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 2.5e-4
    discount: float = 0.99
    gae_lambda: float = 0.95
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    hidden: tuple[int, ...] = (64, 64)  # of tanh, for policy and value each; images: the Nature CNN, shared

    def minibatch(self) -> int:
        """Rows of a gradient step."""
        return self.n_envs * self.T // self.minibatches

    def warm_up(self) -> int:
        """Env steps before anything is timed: two batches."""
        return 2 * self.n_envs * self.T


@dataclass(frozen=True)
class OffPolicy:
    """SAC, TD3 or DQN with one environment. Training begins with `learning_starts` random steps."""

    algo: str  # sac | td3 | dqn
    batch_size: int
    every: int  # env steps for an update
    learning_rate: float
    hidden: tuple[int, ...]  # of relu; images: the Nature CNN
    replay_rows: int
    target_every: int = 0  # env steps between copies to the target network of dqn; sac and td3 move theirs by tau
    epsilon: float = 0.0  # of dqn, as at the end of its schedule, so that acting costs as much as in most of a run
    tau: float = 0.005
    discount: float = 0.99
    learning_starts: int = 1_000
    max_grad_norm: float = 10.0  # of dqn
    noise: float = 0.1  # of td3: standard deviation of the exploration noise

    def warm_up(self) -> int:
        """Env steps before anything is timed: those before learning, and a hundred updates."""
        return self.learning_starts + 100 * self.every


@dataclass(frozen=True)
class Row:
    """One training that every framework does, in a separate process."""

    env: str
    n_threads: int  # and cores
    work: PPO | OffPolicy
    asked: Mapping[str, float] = field(default_factory=dict)  # least rate of rlframe over a framework's
    differs: Mapping[str, str] = field(default_factory=dict)  # why a framework's work is not the same
    of_limit: float = 0.0  # target: the least ratio of rlframe's rate to its limit; 0: not measured


_SAC = OffPolicy("sac", 256, 1, 3e-4, (256, 256), 1_000_000)
_TD3 = OffPolicy("td3", 256, 1, 3e-4, (256, 256), 1_000_000)
_DQN = OffPolicy("dqn", 128, 10, 2.5e-4, (120, 84), 10_000, target_every=500, epsilon=0.05)
_DQN_PONG = OffPolicy("dqn", 32, 4, 1e-4, (), 100_000, target_every=1_000, epsilon=0.01)

_OF_CHEETAH = {"sb3": 2.5, "sbx": 1.4}
_FREE = {"sbx": "gradients are not clipped", "tianshou": "gradients are not clipped"}
_120 = {"sbx": "gradients are not clipped, the layers are 120 and 120"}
ROWS: Mapping[str, Row] = {
    "ppo_cartpole": Row(
        CARTPOLE,
        1,
        PPO(4, 0.2),
        {"sb3": 4.0},
        {"sbx": "policy and value have an optimizer each and are clipped apart"},
    ),
    "ppo_pong": Row(
        PONG,
        2,
        PPO(8, 0.1),
        {"sb3": 2.2},
        {"sbx": "policy and value have a CNN each, kept equal by copying: about twice the work"},
        of_limit=0.85,
    ),
    "sac_cheetah": Row(CHEETAH, 1, _SAC, _OF_CHEETAH),
    "sac_cheetah_2": Row(CHEETAH, 2, _SAC, _OF_CHEETAH),
    "td3_cheetah": Row(CHEETAH, 1, _TD3, _OF_CHEETAH),
    "td3_cheetah_2": Row(CHEETAH, 2, _TD3, _OF_CHEETAH),
    "dqn_cartpole": Row(CARTPOLE, 1, _DQN, {"sb3": 3.0}, {**_FREE, **_120}),
    "dqn_pong": Row(PONG, 1, _DQN_PONG, {"sb3": 2.5}, _FREE),
    "dqn_pong_2": Row(PONG, 2, _DQN_PONG, {"sb3": 2.5}, _FREE),
}
