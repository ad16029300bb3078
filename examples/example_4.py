"""PPO on Acrobot-v1 with CpuSampler: worker processes on all cores act and step, and others evaluate.

    python examples/example_4.py
    python examples/example_4.py n_workers=4 n_steps=300_000 seed=1 run_ID=1 log_dir=data/acrobot

Seed 0 reaches a return of -83 after 102,000 env_steps and after 200,000 (-500 at first), in 28 s on two cores of an
AMD EPYC that was busy with other work too. A batch takes 61 ms at best, and 95 with `SerialSampler`, which gives the
same batches and so the same returns. `--help` lists the arguments; docs/guides/sampling.md says when to use which
sampler.
"""

import torch

import rlframe
from rlframe.agents import make_policy_agent
from rlframe.algos import ppo
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs import EnvConfig
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.runners import Learner, MinibatchRl, RunnerConfig
from rlframe.samplers import CpuSampler, cpu
from rlframe.system.affinity import pin, plan, read_topology


def train(n_steps: int = 200_000, seed: int = 0, log_dir: str = "", run_ID: int = 0, n_workers: int = 0) -> None:
    """Train PPO on Acrobot-v1 for `n_steps` env steps, sampling with `n_workers` processes; 0: one for each core."""
    torch.set_num_threads(1)  # enough for a network of this size
    T, B, log_interval_steps = 128, 16, max(1, n_steps // 10)
    affinity = plan("auto", read_topology(), n_workers)  # the CPUs of this process and of each worker
    print(affinity.describe())
    pin(affinity.master)
    cpus = affinity.workers[:B]  # at most one worker for each environment

    env = EnvConfig("Acrobot-v1", backend="python")  # EnvPool, if installed, would step in microseconds
    model = ModelConfig(hidden=(64, 64), normalize_observation=True)
    config = ppo.Config(learning_rate="linear(1e-3,0)", clip=0.2, epochs=4, minibatches=8, entropy_coef=0.0)
    sampling = cpu.Config(batch_T=T, batch_B=B, n_workers=len(cpus))
    evaluation = EvalConfig(n_envs=8, n_episodes=16, n_workers=len(cpus))

    envs = WorkerPool(env, B, env_seeds(seed, Role.ENV, B), len(cpus), cpus, preload=sampling.preload())
    agent = make_policy_agent(envs.observation_space, envs.action_space, model, seed)
    sampler = CpuSampler(envs, agent, batch_T=T, seed=seed)
    algo = ppo.PPO(agent, sampler.batch_spec, n_steps, config, seed)
    evaluator = Evaluator(env, agent, evaluation, seed, cpus)
    options = RunnerConfig(n_steps=n_steps, log_interval_steps=log_interval_steps)
    runner = MinibatchRl(sampler, Learner(agent, algo), options, evaluator)

    with runner, logger_context(log_dir, run_ID, "ppo_acrobot") as run:
        runner.train()
    print(f"run: {run.directory}")


if __name__ == "__main__":
    rlframe.entrypoint(train)
