"""A study in a script: it queues runs on slots of the machine, and each run is this script with the word `train`.

    python examples/example_8.py
    python examples/example_8.py affinity=2cpr n_seeds=5 n_steps=100_000 log_dir=data/clips
    python examples/example_8.py train clip=0.1 hidden=64,64 seed=3 log_dir=data/one

The first command trains PPO on CartPole-v1 with two clips and two networks, three seeds each: twelve runs, one slot
for each core. The same command with the same log_dir continues a study that was interrupted. A plot of the study,
`python -m rlframe.plot DIR`, has a curve for each of the four settings. docs/guides/studies.md says more, and `--help`
lists the arguments. The command line alone can do nearly the same:

    python -m rlframe.launch sweep.algo.clip=0.1,0.2 sweep.model.hidden=[16,16],[64,64] sweep.seed=0,1,2 retries=1
"""

import sys
from itertools import product
from pathlib import Path

import torch

import rlframe
from rlframe.agents import make_policy_agent
from rlframe.algos import ppo
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs import EnvConfig, make_envs
from rlframe.kernels.device import choose_device
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.record.snapshot import load_snapshot
from rlframe.runners import Learner, MinibatchRl, RunnerConfig
from rlframe.samplers import SerialSampler
from rlframe.study import QueueOptions, run_study
from rlframe.system.affinity import plan, read_topology


def study(n_seeds: int = 3, n_steps: int = 50_000, log_dir: str = "", affinity: str = "auto", retries: int = 1) -> int:
    """Train every variant with every seed; returns the exit status."""
    variants = [
        {"clip": clip, "hidden": hidden, "n_steps": n_steps}  # arguments of `train`, as key=value
        for clip, hidden in product((0.1, 0.2), ((16, 16), (64, 64)))
    ]
    command = [sys.executable, str(Path(__file__).resolve()), "train"]
    return run_study(command, variants, range(n_seeds), log_dir, affinity, options=QueueOptions(retries=retries))


def train(
    clip: float = 0.2,
    hidden: tuple[int, ...] = (64, 64),
    n_steps: int = 50_000,
    seed: int = 0,
    log_dir: str = "",
    run_ID: int = 0,
    affinity: str = "auto",
    resume: bool = False,
) -> None:
    """One run. The queue passes `seed` and the arguments after it to every run."""
    slot = plan(affinity, read_topology())  # the queue has pinned this process to its cores
    device = choose_device("auto", slot.gpus)
    torch.set_num_threads(1)  # enough for a network of this size
    T, B, log_interval_steps = 32, 8, max(1, n_steps // 20)
    env, model = EnvConfig("CartPole-v1"), ModelConfig(hidden=hidden)
    config = ppo.Config(
        learning_rate="linear(1e-3,0)", discount=0.98, gae_lambda=0.8, clip=clip, epochs=20, minibatches=1
    )

    envs = make_envs(env, B, env_seeds(seed, Role.ENV, B))
    agent = make_policy_agent(envs.observation_space, envs.action_space, model, seed).to(device)
    sampler = SerialSampler(envs, agent, batch_T=T, seed=seed)
    algo = ppo.PPO(agent, sampler.batch_spec, n_steps, config, seed)
    options = RunnerConfig(n_steps=n_steps, log_interval_steps=log_interval_steps)
    runner = MinibatchRl(sampler, Learner(agent, algo), options)

    with runner, logger_context(log_dir, run_ID, "ppo_cartpole", resume=resume) as run:
        if resume:
            runner.resume(load_snapshot(run.directory)[0])
        runner.train()
    print(f"run: {run.directory}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        rlframe.entrypoint(train, argv=sys.argv[2:])
    else:
        rlframe.entrypoint(study)
