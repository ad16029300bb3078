"""PPO with an LSTM and an alternating GpuSampler: the policy acts for one group of workers while the other steps.

    python examples/example_5.py
    python examples/example_5.py n_workers=8 n_steps=400_000 seed=1 run_ID=1 log_dir=data/masked

The policy is on a GPU if there is one. CartPole hides its velocities here, so the policy needs the LSTM's memory to
know which way the pole falls; without memory, returns stay below 50. Seed 0 reaches a return of 500 from 122,000
env_steps on, to the end at 200,000, in 93 s on two cores of an AMD EPYC that was busy with other work too, without a
GPU. CartPole steps too fast for this sampler to be the best choice: 28 s of the 93 are sampling, and `SerialSampler`
takes 13 for the same batches. `--help` lists the arguments; docs/guides/sampling.md says when to use it.
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
from rlframe.samplers import GpuSampler, gpu
from rlframe.system.affinity import plan, read_topology


def train(n_steps: int = 200_000, seed: int = 0, log_dir: str = "", run_ID: int = 0, n_workers: int = 2) -> None:
    """Train PPO with an LSTM on masked CartPole for `n_steps` env steps, sampling with `n_workers` processes."""
    torch.set_num_threads(1)  # enough for a network of this size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    T, B, log_interval_steps = 128, 16, max(1, n_steps // 10)
    env = EnvConfig("rlframe.envs.debug_envs:masked_cartpole")
    model = ModelConfig(memory="lstm", memory_size=64, normalize_observation=True)
    config = ppo.Config(
        learning_rate="linear(1e-3,0)",
        clip="linear(0.2,0)",
        epochs=10,
        minibatches=2,  # of 8 sequences
        entropy_coef=0.0,
    )
    sampling = gpu.Config(batch_T=T, batch_B=B, n_workers=n_workers, n_groups=2)
    evaluation = EvalConfig(n_envs=8, n_episodes=16, n_workers=0)  # in this process

    cpus = plan("auto", read_topology(), n_workers).workers  # near the GPU, if there is one
    envs = WorkerPool(env, B, env_seeds(seed, Role.ENV, B), n_workers, cpus)
    agent = make_policy_agent(envs.observation_space, envs.action_space, model, seed).to(device)
    sampler = GpuSampler(envs, agent, batch_T=T, seed=seed, n_groups=sampling.n_groups)
    algo = ppo.PPO(agent, sampler.batch_spec, n_steps, config, seed)
    evaluator = Evaluator(env, agent, evaluation, seed)
    options = RunnerConfig(n_steps=n_steps, log_interval_steps=log_interval_steps)
    runner = MinibatchRl(sampler, Learner(agent, algo), options, evaluator)

    with runner, logger_context(log_dir, run_ID, "ppo_masked_cartpole") as run:
        runner.train()
    print(f"run: {run.directory}")


if __name__ == "__main__":
    rlframe.entrypoint(train)
