"""Stable-Baselines3's side of solve_cartpole: python -m benchmarks.parts.solve_sb3 seed=0 found=FILE."""

import sys
from pathlib import Path

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.parts.solve import EPISODES, EVERY, SOLVED

N_ENVS = 8


def main(seed: int, found: Path) -> None:
    """Train until the task is solved, then create the file `found`."""
    env = make_vec_env("CartPole-v1", N_ENVS, seed=seed)
    model = PPO(
        "MlpPolicy",
        env,
        learning_rate=lambda left: left * 1e-3,
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        clip_range=lambda left: left * 0.2,
        ent_coef=0.0,
        seed=seed,
        device="cpu",
    )
    stop = StopTrainingOnRewardThreshold(SOLVED)
    evaluation = EvalCallback(
        make_vec_env("CartPole-v1", N_ENVS, seed=1_000_000 + seed),
        callback_on_new_best=stop,
        n_eval_episodes=EPISODES,
        eval_freq=EVERY // N_ENVS,
        verbose=0,
    )
    model.learn(100_000, callback=evaluation)
    if evaluation.best_mean_reward >= SOLVED:
        found.touch()


if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    main(int(words["seed"]), Path(words["found"]))
