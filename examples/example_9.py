"""PPO on CartPole-v1 with SyncRl: several processes, each with its own environments, average their gradients.

    python examples/example_9.py
    python examples/example_9.py world_size=4 n_steps=50_000 log_dir=data/ranks
    torchrun --standalone --nproc-per-node 2 examples/example_9.py log_dir=data/ranks run_ID=1

`train` runs in each process. Within `join`, counts, seeds and gradients are those of one rank among all; only the
first rank writes the run directory. `--help` lists the arguments; docs/guides/scaling.md says how to choose sizes and
learning rates for a number of ranks.
"""

from functools import partial

import torch

import rlframe
from rlframe.agents import make_policy_agent
from rlframe.algos import ppo
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs import EnvConfig, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.runners import Learner, RunnerConfig, SyncRl
from rlframe.samplers import SerialSampler
from rlframe.system.distributed import RankInfo, join, launch_ranks


def train(n_steps: int, seed: int, log_dir: str, run_ID: int, place: RankInfo) -> None:
    """Train as one rank, for `n_steps` env steps of all ranks together."""
    torch.set_num_threads(1)  # enough for a network of this size
    T, B, log_interval_steps = 32, 8 // place.world_size, max(1, n_steps // 10)  # B: environments of each rank
    env, model, evaluation = EnvConfig("CartPole-v1"), ModelConfig(hidden=(64, 64)), EvalConfig(n_episodes=20)
    config = ppo.Config(
        learning_rate="linear(1e-3,0)", discount=0.98, gae_lambda=0.8, clip=0.2, epochs=20, minibatches=1
    )

    with join(place):
        envs = make_envs(env, B, env_seeds(seed, Role.ENV, B))
        agent = make_policy_agent(envs.observation_space, envs.action_space, model, seed)
        sampler = SerialSampler(envs, agent, batch_T=T, seed=seed)
        algo = ppo.PPO(agent, sampler.batch_spec, n_steps, config, seed)
        evaluator = Evaluator(env, agent, evaluation, seed)
        options = RunnerConfig(n_steps=n_steps, log_interval_steps=log_interval_steps)
        runner = SyncRl(sampler, Learner(agent, algo), options, evaluator)

        # params.json gets these under the keys of the command line, so that evaluate, plot and resume= can read it.
        with runner, logger_context(log_dir, run_ID, "ppo_cartpole") as run:
            runner.train()
    if place.rank == 0:
        print(f"run: {run.directory}")


def main(world_size: int = 2, n_steps: int = 100_000, seed: int = 0, log_dir: str = "", run_ID: int = 0) -> None:
    """Train in `world_size` processes, or in those that torchrun started."""
    launch_ranks(partial(train, n_steps, seed, log_dir, run_ID), world_size)


if __name__ == "__main__":
    rlframe.entrypoint(main)
