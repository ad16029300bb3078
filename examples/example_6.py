"""DQN on an Atari game, evaluated after training from the snapshot alone.

    python examples/example_6.py
    python examples/example_6.py game=ALE/Breakout-v5 n_steps=10_000_000 replay_size=1_000_000 log_dir=data/breakout

Replay stores every frame once and stacks them when it reads: 7.1 kB for a transition, and a tenth of it with
`compress`. It needs the extra `atari`, and `lz4` to compress. `--help` lists the arguments.
"""

from contextlib import closing
from pathlib import Path

import torch

import rlframe
from rlframe.agents import QAgent, make_q_agent
from rlframe.algos import dqn
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs import EnvConfig, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.exploration import EpsilonConfig
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.record.snapshot import load_snapshot
from rlframe.replay import InMemory
from rlframe.runners import Learner, MinibatchRl, RunnerConfig
from rlframe.samplers import SerialSampler


def train(
    game: str = "ALE/Pong-v5",
    n_steps: int = 1_000_000,
    log_interval_steps: int = 50_000,
    learning_starts: int = 10_000,
    replay_size: int = 200_000,
    compress: bool = False,
    n_eval_episodes: int = 8,
    max_frames: int = 108_000,
    seed: int = 0,
    log_dir: str = "",
    run_ID: int = 0,
) -> None:
    """Train DQN on `game`; a game is truncated after `max_frames` frames (60 per second, 4 per env step)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    env, model = EnvConfig(game, {"max_num_frames_per_episode": max_frames}), ModelConfig(activation="relu")
    config = dqn.Config(
        replay=InMemory(size=replay_size, compress=compress),
        double=True,
        learning_starts=learning_starts,
        target_interval=1_000,
        explore=EpsilonConfig(epsilon="linear(1,0.01,0.1)"),
    )

    envs = make_envs(env, 8, env_seeds(seed, Role.ENV, 8))
    agent = make_q_agent(envs.observation_space, envs.action_space, model, config.kind(), config.explore, seed).to(
        device
    )
    sampler = SerialSampler(envs, agent, batch_T=4, seed=seed)
    algo = config.make_algorithm(agent, sampler.batch_spec, n_steps, seed)
    options = RunnerConfig(n_steps=n_steps, log_interval_steps=log_interval_steps)
    runner = MinibatchRl(sampler, Learner(agent, algo), options)

    name = f"dqn_{game.removeprefix('ALE/')}"
    with runner, logger_context(log_dir, run_ID, name) as run:
        runner.train()
    score(run.directory, agent, env, n_eval_episodes)
    print(f"run: {run.directory}")


def score(directory: Path, agent: QAgent, env: EnvConfig, n_episodes: int) -> None:
    """Play whole games greedily with the weights of the run's last snapshot, in separate environments."""
    weights, meta = load_snapshot(directory, key="agent")
    agent.load_state_dict(weights)
    with closing(Evaluator(env, agent, EvalConfig(n_envs=8, n_episodes=n_episodes))) as evaluator:
        returns = [trajectory.return_ for trajectory in evaluator.play()]
    print(
        f"after {meta['env_steps']:,} env_steps: mean return {sum(returns) / len(returns):.1f} of {len(returns)} games"
    )


if __name__ == "__main__":
    rlframe.entrypoint(train)
