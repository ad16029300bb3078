"""Samplers elsewhere, in a process or in actors of Ray, and RLlib's environment runner: batches of T steps in turn.

Each unit sends the newest parameters, and takes a batch.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack

from benchmarks.parts.ours import batches, sampling
from benchmarks.parts.turns import Unit
from rlframe.agents import make_policy_agent
from rlframe.envs import EnvConfig
from rlframe.models import ModelConfig
from rlframe.samplers import BackgroundProcess, BackgroundSampler, ray, serial
from rlframe.system.cluster import RayOptions, connect

T, N_SLOTS = 128, 2  # batches that a sampler is ahead
MODEL = ModelConfig(hidden=(64, 64))


def here(env: EnvConfig, n: int, stack: ExitStack) -> Unit:
    """A serial sampler in this process."""
    return sampling(serial.Config(batch_T=T, batch_B=n), env, MODEL, stack)


def in_process(env: EnvConfig, n: int, stack: ExitStack) -> Unit:
    """A serial sampler in a process on the last core; this one is on the first."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if cores:
        os.sched_setaffinity(0, cores[:1])
    process = BackgroundProcess(serial.Config(batch_T=T, batch_B=n), env, 0, cores[-1:], ())
    stack.callback(process.close)
    agent = make_policy_agent(process.observation_space, process.action_space, MODEL)
    return batches(BackgroundSampler(process, agent), agent)


def in_actors(env: EnvConfig, n: int, n_samplers: int, stack: ExitStack) -> Unit:
    """Serial samplers in actors, whose batches are taken as they arrive."""
    config = _of_actors(n, n_samplers)
    envs = config.make_envs(env, 0, ())
    stack.callback(envs.close)
    agent = make_policy_agent(envs.observation_space, envs.action_space, MODEL)
    return batches(config.make_ahead(envs, agent, 0, N_SLOTS), agent)


def in_one_actor_asked(env: EnvConfig, n: int, stack: ExitStack) -> Unit:
    """A serial sampler in an actor, which collects when it is asked."""
    return sampling(_of_actors(n, 1), env, MODEL, stack)


def _of_actors(n: int, n_samplers: int) -> ray.Config:
    connect(RayOptions(num_cpus=2))
    return ray.Config(batch_T=T, batch_B=n * n_samplers, n_samplers=n_samplers)


def rllib(env_id: str, n: int, stack: ExitStack) -> Unit:
    """RLlib's PPO, whose one environment runner is in an actor; only its sampling is measured."""
    import ray as ray_
    from ray.rllib.algorithms.ppo import PPOConfig

    ray_.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    stack.callback(ray_.shutdown)
    runners = {"num_env_runners": 1, "num_envs_per_env_runner": n, "rollout_fragment_length": T}
    config = PPOConfig().environment(env_id).env_runners(**runners).learners(num_learners=0)
    model = {"fcnet_hiddens": list(MODEL.hidden), "fcnet_activation": "tanh", "vf_share_layers": False}
    config = config.training(train_batch_size_per_learner=T * n, minibatch_size=T * n)
    algo = config.rl_module(model_config=model).build_algo()
    stack.callback(algo.stop)
    group, learner = algo.env_runner_group, algo.learner_group

    def unit() -> int:
        group.sync_weights(from_worker_or_learner_group=learner, inference_only=True)
        episodes = group.foreach_env_runner(lambda runner: runner.sample(num_timesteps=T * n), local_env_runner=False)
        return sum(len(episode) for of_runner in episodes for episode in of_runner)

    return unit
