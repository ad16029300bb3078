"""SAC on MuJoCo: one environment, replay, and a gradient step of every network for each env step.

    python examples/example_7.py
    python examples/example_7.py env=Hopper-v5 n_steps=300_000 seed=1 run_ID=1 log_dir=data/hopper

It needs `pip install "rlframe[mujoco]"`. The first 5,000 env steps act at random. `eval/return_mean` is the mean
return of greedy episodes in separate environments. `--help` lists the arguments; experiments/mujoco has the same as a
preset.
"""

import torch

import rlframe
from rlframe.algos import sac
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs import EnvConfig, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.replay import InMemory
from rlframe.runners import Learner, MinibatchRl, RunnerConfig
from rlframe.samplers import SerialSampler


def train(
    env: str = "HalfCheetah-v5",
    n_steps: int = 100_000,
    learning_starts: int = 5_000,
    seed: int = 0,
    log_dir: str = "",
    run_ID: int = 0,
) -> None:
    """Train SAC for `n_steps` env steps, with random actions for the first `learning_starts` of them."""
    torch.set_num_threads(1)  # enough for networks of this size
    env_config, log_interval_steps = EnvConfig(env), max(1, n_steps // 20)
    model = ModelConfig(hidden=(256, 256), activation="relu")
    config = sac.Config(
        replay=InMemory(size=max(n_steps, 1000)), critic_learning_rate=1e-3, learning_starts=learning_starts
    )
    evaluation = EvalConfig(n_envs=5, n_episodes=5)

    envs = make_envs(env_config, 1, env_seeds(seed, Role.ENV, 1))
    agent = config.make_agent(envs.observation_space, envs.action_space, model, seed)
    sampler = SerialSampler(envs, agent, batch_T=1, seed=seed)
    algo = config.make_algorithm(agent, sampler.batch_spec, n_steps, seed)
    evaluator = Evaluator(env_config, agent, evaluation, seed)
    options = RunnerConfig(n_steps=n_steps, log_interval_steps=log_interval_steps)
    runner = MinibatchRl(sampler, Learner(agent, algo), options, evaluator)

    # params.json gets these under the keys of the command line, so that evaluate, plot and resume= can read this run.
    with runner, logger_context(log_dir, run_ID, f"sac_{env}") as run:
        runner.train()
    print(f"run: {run.directory}")


if __name__ == "__main__":
    rlframe.entrypoint(train)
