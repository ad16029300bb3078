"""IMPALA with AsyncRl: a separate process samples while this one learns from batches that are an update or two old.

    python examples/example_10.py
    python examples/example_10.py n_steps=500_000 n_slots=4 seed=1 run_ID=1 log_dir=data/impala

On two cores the learner and the sampler get one each; on more cores the sampler gets all but one. The log shows how
old batches were (`async/staleness_mean`, in updates), how many were waiting for the learner (`async/queue_mean`) and
how much each side waited for the other (`time/fraction_sampling`, `time/fraction_sampler_waiting`). For another
algorithm replace the two lines with `impala`: A3C is `a2c.Config()`. `--help` lists the arguments;
docs/guides/async.md says when to use it.
"""

import torch

import rlframe
from rlframe.algos import impala
from rlframe.envs import EnvConfig
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.runners import AsyncRl, AsyncRlConfig, Learner
from rlframe.samplers import BackgroundProcess, BackgroundSampler, serial
from rlframe.system.affinity import pin, plan, read_topology


def train(n_steps: int = 200_000, n_slots: int = 2, seed: int = 0, log_dir: str = "", run_ID: int = 0) -> None:
    """Train IMPALA on CartPole for `n_steps` env steps, with `n_slots` batches between sampler and learner."""
    torch.set_num_threads(1)  # enough for a network of this size
    env, model, log_interval_steps = EnvConfig("CartPole-v1"), ModelConfig(), max(1, n_steps // 10)
    config = impala.Config(learning_rate="linear(7e-4,0)", entropy_coef=0.0)
    sampling = serial.Config(batch_T=5, batch_B=16)  # or cpu.Config(...), gpu.Config(...), with workers of their own
    evaluation = EvalConfig(n_envs=8, n_episodes=16, n_workers=0)

    affinity = plan("auto", read_topology(), learner_cores=1)
    print(affinity.describe())
    pin(affinity.master)
    process = BackgroundProcess(sampling, env, seed, affinity.sampler, affinity.workers)  # makes the environments
    agent = config.make_agent(process.observation_space, process.action_space, model, seed)
    sampler = BackgroundSampler(process, agent, n_slots)
    algo = config.make_algorithm(agent, sampler.batch_spec, n_steps, seed)
    evaluator = Evaluator(env, agent, evaluation, seed)
    options = AsyncRlConfig(n_steps=n_steps, log_interval_steps=log_interval_steps)
    runner = AsyncRl(sampler, Learner(agent, algo), options, evaluator)

    with runner, logger_context(log_dir, run_ID, "impala_CartPole") as run:
        runner.train()
    print(f"run: {run.directory}")


if __name__ == "__main__":
    rlframe.entrypoint(train)
