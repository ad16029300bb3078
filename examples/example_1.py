"""PPO on CartPole-v1: environments, agent, sampler, algorithm, runner and run directory, built one by one.

    python examples/example_1.py
    python examples/example_1.py n_steps=50_000 seed=1 run_ID=1 log_dir=data/cartpole

It reports the returns of the training episodes. `--help` lists the arguments. Evaluate and plot the run afterwards with
`python -m rlframe.evaluate RUN_DIR` and `python -m rlframe.plot RUN_DIR`.
"""

import torch

import rlframe
from rlframe.agents import make_policy_agent
from rlframe.algos import ppo
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs import EnvConfig, make_envs
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.runners import Learner, MinibatchRl, RunnerConfig
from rlframe.samplers import SerialSampler


def train(n_steps: int = 100_000, seed: int = 0, log_dir: str = "", run_ID: int = 0) -> None:
    """Train PPO on CartPole-v1 for `n_steps` env steps."""
    torch.set_num_threads(1)  # enough for a network of this size
    T, B, log_interval_steps = 32, 8, max(1, n_steps // 20)
    env, model = EnvConfig("CartPole-v1"), ModelConfig(hidden=(64, 64))
    config = ppo.Config(
        learning_rate="linear(1e-3,0)",
        discount=0.98,
        gae_lambda=0.8,
        clip="linear(0.2,0)",
        epochs=20,
        minibatches=1,
        entropy_coef=0.0,
    )

    envs = make_envs(env, B, env_seeds(seed, Role.ENV, B))
    agent = make_policy_agent(envs.observation_space, envs.action_space, model, seed)
    sampler = SerialSampler(envs, agent, batch_T=T, seed=seed)
    algo = ppo.PPO(agent, sampler.batch_spec, n_steps, config, seed)
    options = RunnerConfig(n_steps=n_steps, log_interval_steps=log_interval_steps)
    runner = MinibatchRl(sampler, Learner(agent, algo), options)

    # params.json gets what these objects were made with, so that evaluate, plot and resume= can read this run.
    with runner, logger_context(log_dir, run_ID, "ppo_cartpole") as run:
        runner.train()
    print(f"run: {run.directory}")


if __name__ == "__main__":
    rlframe.entrypoint(train)
