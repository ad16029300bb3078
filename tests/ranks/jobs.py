"""Small trainings in ranks whose results every rank returns; all in one job, because starting ranks is slow."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rlframe.algos import a2c, appo, ddpg, dqn, pg, ppo, pqn, r2d1, sac, td3
from rlframe.core.ranks import RanksDiffer, current_ranks, first_env_of_rank
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs import EnvConfig, EnvOptions, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.exploration import NoisyConfig
from rlframe.models import ModelConfig
from rlframe.replay import InMemory
from rlframe.rewards import RNDConfig
from rlframe.rewards.base import UNCHANGED
from rlframe.rewards.normalize import NormalizedRewards
from rlframe.runners import Learner, RunnerConfig, SyncRl
from rlframe.runners.nonfinite import save_skipped_update
from rlframe.runners.ranks import check_equal, learned
from rlframe.samplers import SerialSampler
from rlframe.system import distributed
from rlframe.system.distributed import RankInfo, join, launch_ranks
from tests.runners.own_callbacks import StopsRank1

CARTPOLE = EnvConfig("CartPole-v1", backend="python")
PENDULUM = EnvConfig("Pendulum-v1", {"max_episode_steps": 7}, backend="python")
ALGOS: dict[str, tuple[ModuleType, EnvConfig, dict[str, Any], dict[str, Any]]] = {
    "dqn": (
        dqn,
        CARTPOLE,
        {
            "batch_size": 8,
            "explore": NoisyConfig(epsilon="linear(1,0.1,0.02)", epsilon_last="linear(1,0.01,0.02)"),
            "prioritized": True,
        },
        {},
    ),
    "r2d1": (r2d1, CARTPOLE, {"batch_size": 4, "burn_in": 2, "learn_T": 4}, {"memory": "lstm", "memory_size": 8}),
    "ddpg": (ddpg, PENDULUM, {"batch_size": 8}, {"normalize_observation": True}),
    "td3": (td3, PENDULUM, {"batch_size": 8, "max_grad_norm": 0.5}, {"normalize_observation": True}),
    "sac": (sac, PENDULUM, {"batch_size": 8}, {"normalize_observation": True}),
}
RATIO, LEARN_FROM = 2.0, 32


def on_policy(config: Any, B: int, n_updates: int, model: dict[str, Any]) -> dict[str, Any]:
    """Train on the batches of a real sampler of B environments; the parameters and counts afterwards.

    In the environments after the fourth, those of rank 1, nobody acts after the first step.
    """
    envs = make_envs(CARTPOLE, B, env_seeds(3, Role.ENV, B))
    agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(16,), **model), 3)
    with closing(SerialSampler(envs, agent, batch_T=8, seed=3)) as sampler:
        algo = config.make_algorithm(agent, sampler.batch_spec, 4_000, 3)
        n_valid = []
        for _ in range(n_updates):
            samples = sampler.collect()
            samples.valid[1:, 4 - first_env_of_rank(B) :] = False
            samples = replace(samples, n_env_steps=int(samples.valid.sum()))
            n_valid.append(samples.n_env_steps)
            algo.receive(samples)
            algo.update()
    return {
        "parameters": {name: x.detach().clone() for name, x in agent.state_dict().items()},
        "env_steps": algo.progress.env_steps,
        "n_valid": n_valid,
    }


BY_KL = {"epochs": 20, "learning_rate": 0.01, "target_kl": 0.004, "kl_coef": 1.0, "kl_coef_target": 0.002}
ON_POLICY: dict[str, tuple[Any, int, dict[str, Any]]] = {  # config, updates, model
    "a2c": (a2c.Config(), 20, {}),
    "pg, normalized": (pg.Config(), 10, {"normalize_observation": True}),
    "ppo, one minibatch": (ppo.Config(minibatches=1, epochs=3), 5, {"normalize_observation": True}),
    "ppo, by the kl": (ppo.Config(minibatches=1, **BY_KL), 8, {}),
    "pqn, one minibatch": (pqn.Config(minibatches=1, epochs=2), 5, {"norm": "layer"}),
    "appo, one minibatch": (appo.Config(minibatches=1, epochs=2), 5, {}),
    "a2c, recurrent": (a2c.Config(), 5, {"memory": "gru", "memory_size": 8}),
}


def off_policy(name: str, n_batches: int = 24, B: int = 2, T: int = 4) -> dict[str, Any]:
    """Train on replay; returns what must be equal on all ranks and what must differ."""
    module, env, settings, model = ALGOS[name]
    config = module.Config(replay=InMemory(size=1000), replay_ratio=RATIO, learning_starts=LEARN_FROM, **settings)
    envs = make_envs(env, B, env_seeds(5, Role.ENV, B))
    agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,), **model), 5)
    due: list[int] = []
    with closing(SerialSampler(envs, agent, batch_T=T, seed=5)) as sampler:
        algo = config.make_algorithm(agent, sampler.batch_spec, 1_000, 5)
        n_valid = 0
        for _ in range(n_batches):
            samples = sampler.collect()
            n_valid += int(samples.valid.sum())
            algo.receive(samples)
            due.append(algo.updates_due())
            while algo.updates_due():
                algo.update()
        check_equal(learned(Learner(agent, algo)), current_ranks())
        state = sampler.collect().state
    return {
        "due": due,
        "updates": algo.progress.updates,
        "env_steps": algo.progress.env_steps,
        "n_valid": n_valid,
        "ratio": algo.counters()["replay/ratio"],
        "rows": algo.counters()["replay/rows"],
        "n_learned": len(algo.progress.learned),
        "envs": state.explore.env.tolist() if name in ("dqn", "r2d1") else [],
        "last_env": float(agent.exploration.level[2]) if name in ("dqn", "r2d1") else 0.0,
    }


def evaluated(config: EvalConfig) -> list[tuple[int, float, int]]:
    """The episodes of an evaluation."""
    envs = make_envs(CARTPOLE, 1, [0])
    agent = a2c.Config().make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 0)
    envs.close()
    with closing(Evaluator(CARTPOLE, agent, config, seed=9)) as evaluator:
        return [(t.env, t.return_, t.length) for t in evaluator.play()]


EVALS = {
    "uneven": EvalConfig(n_envs=3, n_episodes=7, n_workers=0),
    "with noise": EvalConfig(n_envs=4, n_episodes=4, n_workers=0, explore=True),
}


def trained(n_steps: int = 200) -> dict[str, Any]:
    """Train with SyncRl; returns the last row, and the error after a change on one rank alone."""
    envs = make_envs(CARTPOLE, 4, env_seeds(1, Role.ENV, 4))
    agent = a2c.Config().make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 1)
    sampler = SerialSampler(envs, agent, batch_T=8, seed=1)
    algo = a2c.A2C(agent, n_steps)
    evaluator = Evaluator(CARTPOLE, agent, EvalConfig(n_envs=2, n_episodes=2, n_workers=0), 1)
    options = RunnerConfig(n_steps=n_steps, log_interval_steps=n_steps)
    with SyncRl(sampler, Learner(agent, algo), options, evaluator) as runner:
        row = runner.train()
        own = {"n_episodes": runner.log.n_episodes, "n_recent": len(runner.log.recent)}
        with torch.no_grad():
            next(agent.parameters()).add_(current_ranks().rank)
        try:
            runner.report()
        except RanksDiffer as error:
            own["error"] = str(error)
    return {"row": row, **own}


def normalized(B: int, n_batches: int = 5) -> dict[str, Any]:
    """The rewards of the last of some batches, and the statistics that they are divided by."""
    envs = make_envs(PENDULUM, B, env_seeds(2, Role.ENV, B))
    agent = a2c.Config().make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 2)
    rewards = NormalizedRewards(0.9, EnvOptions(normalize_reward=True))
    with closing(SerialSampler(envs, agent, batch_T=6, seed=2)) as sampler:
        for _ in range(n_batches):
            found = rewards(sampler.collect()).reward.clone()
    return {
        "reward": found,
        "statistics": {name: float(x) for name, x in rewards.deviation.state_dict()["statistics"].items()},
    }


def curious(B: int, n_batches: int = 4) -> dict[str, Any]:
    """Batches of B environments with a bonus that learns from all steps at once; its networks and statistics."""
    config = RNDConfig(hidden=(8,), embedding=8, learning_starts=8, batch_size=8 * B, share=1.0, learning_rate=1e-2)
    envs = make_envs(CARTPOLE, B, env_seeds(4, Role.ENV, B))
    agent = a2c.Config().make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 4)
    with closing(SerialSampler(envs, agent, batch_T=8, seed=4)) as sampler:
        algo = a2c.Config().make_algorithm(agent, sampler.batch_spec, 1000, 4)
        rewards = config.add_to(UNCHANGED, algo, (envs.observation_space, envs.action_space), 1000, 4)
        learner = Learner(agent, algo, rewards)
        for _ in range(n_batches):
            learner.receive(sampler.collect())
            algo.update()
        check_equal(learned(learner), current_ranks())
    own = rewards.state_dict()
    return own["networks"] | {name: torch.tensor(x) for name, x in own["deviation"]["statistics"].items()}


def stopped(n_steps: int = 10_000) -> dict[str, Any]:
    """A SyncRl that a callback of rank 1 stops, without evaluation; its env_steps and metrics."""
    envs = make_envs(CARTPOLE, 4, env_seeds(1, Role.ENV, 4))
    agent = a2c.Config().make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 1)
    sampler = SerialSampler(envs, agent, batch_T=8, seed=1)
    algo = a2c.A2C(agent, n_steps)
    options = RunnerConfig(n_steps=n_steps, log_interval_steps=n_steps)
    with SyncRl(sampler, Learner(agent, algo), options, callbacks=[StopsRank1()]) as runner:
        return {"row": runner.train(), "env_steps": runner.env_steps}


def skipped(config: Any, env: EnvConfig) -> dict[str, Any]:
    """Make an update with NaN rewards on rank 1; returns what was skipped and which parameters stayed the same."""
    envs = make_envs(env, 4, env_seeds(1, Role.ENV, 4))
    agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 1)
    with closing(SerialSampler(envs, agent, batch_T=8, seed=1)) as sampler:
        algo = config.make_algorithm(agent, sampler.batch_spec, 1_000, 1)
        samples = sampler.collect()
        if current_ranks().rank:
            samples.reward.fill_(math.nan)
        algo.receive(samples)
        before = [x.detach().clone() for x in algo.progress.learned]
        metrics = algo.update()
        check_equal(learned(Learner(agent, algo)), current_ranks())
        kept = [torch.equal(x, y) for x, y in zip(before, algo.progress.learned, strict=True)]
        told = save_skipped_update(Learner(agent, algo), algo.progress.skipped_updates[0], metrics)
    return {"skipped": algo.progress.skipped, "kept": kept, "told": told}


SKIPPED = {
    "ppo": (ppo.Config(minibatches=2, epochs=2), CARTPOLE),
    "dqn": (dqn.Config(batch_size=8, learning_starts=8, replay=InMemory(size=1000)), CARTPOLE),
    "sac": (sac.Config(batch_size=8, learning_starts=8, replay=InMemory(size=1000)), PENDULUM),
}


def exchanged() -> dict[str, Any]:
    """One exchange of every kind."""
    ranks = current_ranks()
    number = ranks.rank + 1
    tensors = [torch.full((2, 2), float(number)), torch.tensor([10.0 * number])]
    ranks.average(tensors, weight=torch.tensor(2 * ranks.rank + 1))
    none = [torch.zeros(3)]
    ranks.average(none, weight=torch.tensor(0))
    return {
        "sum": ranks.sum(number),
        "largest": ranks.max(-number),
        "total": ranks.sum_tensor(torch.tensor([number, 0.5])),
        "stack": ranks.stack(torch.tensor([number])),
        "average": tensors,
        "none": none,
        "gather": ranks.gather({"rank": ranks.rank}),
        "broadcast": ranks.broadcast(f"of {ranks.rank}"),
        "every": (ranks.all(True), ranks.all(ranks.rank == 0)),
    }


def everything(place: RankInfo, folder: Path) -> None:
    """Save the results of all functions above, of every rank."""
    torch.set_num_threads(1)
    with join(place, timeout_s=60.0):
        found: dict[str, Any] = {
            "exchanged": exchanged(),
            "on policy": {name: on_policy(c, 4, n, net) for name, (c, n, net) in ON_POLICY.items()},
            "off policy": {name: off_policy(name) for name in ALGOS},
            "evaluated": {name: evaluated(config) for name, config in EVALS.items()},
            "trained": trained(),
            "stopped": stopped(),
            "normalized": normalized(2),
            "curious": curious(2),
            "skipped": {name: skipped(*each) for name, each in SKIPPED.items()},
        }
        torch.save(found, folder / f"{place.rank}.pt")


def failing(place: RankInfo, how: str) -> None:
    """Rank 1 fails between exchanges; rank 0 notices in an exchange, or is busy."""
    with join(place, timeout_s=60.0) as ranks:
        ranks.sum(1)
        if place.rank:
            if how.startswith("raise"):
                raise ValueError("bad luck")
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            if how.endswith("while rank 0 is busy"):
                time.sleep(1000)
            ranks.sum(1)


def leaving(place: RankInfo, worked: Path) -> bool:
    """Rank 1 works longer; returns whether this rank has waited for it."""
    with join(place, timeout_s=60.0) as ranks:
        ranks.sum(1)
        if place.rank:
            time.sleep(0.5)
            worked.touch()
    return worked.exists()


if __name__ == "__main__":
    distributed._GRACE_S = 0.5
    launch_ranks(partial(failing, how=sys.argv[1]), 2)
