"""PPO on an Atari game with evaluation: MinibatchRl evaluates before training and at every log interval.

    python examples/example_2.py
    python examples/example_2.py game=ALE/Breakout-v5 n_steps=10_000_000 log_dir=data/breakout

Learning sees clipped rewards, and a lost life as the end of an episode. Returns, in training and in evaluation, are
those of whole games. It needs the extra `atari`. `--help` lists the arguments.
"""

import torch

import rlframe
from rlframe.agents import make_policy_agent
from rlframe.algos import ppo
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs import EnvConfig, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.runners import Learner, MinibatchRl, RunnerConfig
from rlframe.samplers import SerialSampler


def train(
    game: str = "ALE/Pong-v5",
    n_steps: int = 1_000_000,
    log_interval_steps: int = 50_000,
    n_eval_episodes: int = 8,
    max_frames: int = 108_000,
    batch_T: int = 128,
    seed: int = 0,
    log_dir: str = "",
    run_ID: int = 0,
) -> None:
    """Train PPO on `game`; a game is truncated after `max_frames` frames (60 per second, 4 per env step)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, config = ModelConfig(activation="relu"), ppo.Config()  # the defaults are the paper's for Atari
    evaluation = EvalConfig(n_envs=8, n_episodes=n_eval_episodes, explore=True)
    env = EnvConfig(game, {"max_num_frames_per_episode": max_frames})

    envs = make_envs(env, 8, env_seeds(seed, Role.ENV, 8))
    agent = make_policy_agent(envs.observation_space, envs.action_space, model, seed).to(device)
    sampler = SerialSampler(envs, agent, batch_T=batch_T, seed=seed)
    algo = ppo.PPO(agent, sampler.batch_spec, n_steps, config, seed)
    evaluator = Evaluator(env, agent, evaluation, seed)
    options = RunnerConfig(n_steps=n_steps, log_interval_steps=log_interval_steps)
    runner = MinibatchRl(sampler, Learner(agent, algo), options, evaluator)

    name = f"ppo_{game.removeprefix('ALE/')}"
    with runner, logger_context(log_dir, run_ID, name, snapshot_mode="best") as run:
        runner.train()
    print(f"run: {run.directory}")


if __name__ == "__main__":
    rlframe.entrypoint(train)
