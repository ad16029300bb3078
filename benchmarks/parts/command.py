"""A row of `benchmarks.compare` as the words of rlframe's command line."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.parts.rows import PONG, PPO, OffPolicy, Row

Words = Mapping[str, str]


def words_of(row: Row, more: Words) -> dict[str, str]:
    """The command line that trains a row; `more` overrides it."""
    work = row.work
    common = {
        "env": row.env,
        "threads": str(row.n_threads),
        "runner": "minibatch_rl",
        "runner.n_steps": "1e9",
        "snapshot_mode": "none",
        "algo.discount": str(work.discount),
        "algo.learning_rate": str(work.learning_rate),
        "model.hidden": ",".join(map(str, work.hidden or (64, 64))),
    }
    if row.env == PONG:
        common["env_kwargs.repeat_action_probability"] = "0.0"
    return {**common, **(_ppo(work) if isinstance(work, PPO) else _off_policy(work)), **more}


def _ppo(work: PPO) -> dict[str, str]:
    return {
        "algo": "ppo",
        "algo.learning_rate": f"linear({work.learning_rate},0)",
        "sampler.batch_T": str(work.T),
        "sampler.batch_B": str(work.n_envs),
        "algo.epochs": str(work.epochs),
        "algo.minibatches": str(work.minibatches),
        "algo.clip": str(work.clip),
        "algo.gae_lambda": str(work.gae_lambda),
        "algo.entropy_coef": str(work.entropy_coef),
        "algo.value_coef": str(work.value_coef),
        "algo.max_grad_norm": str(work.max_grad_norm),
    }


def _off_policy(work: OffPolicy) -> dict[str, str]:
    words = {
        "algo": work.algo,
        "sampler.batch_T": str(work.every),
        "sampler.batch_B": "1",
        "model.activation": "relu",
        "algo.batch_size": str(work.batch_size),
        "algo.replay_ratio": str(work.batch_size / work.every),
        "algo.learning_starts": str(work.learning_starts),
        "algo.replay.size": str(work.replay_rows),
    }
    if work.algo == "dqn":
        return words | {
            "algo.n_step": "1",
            "algo.double": "false",
            "algo.target_interval": str(work.target_every // work.every),
            "algo.explore.epsilon": str(work.epsilon),
            "algo.max_grad_norm": str(work.max_grad_norm),
        }
    words |= {"algo.critic_learning_rate": str(work.learning_rate), "algo.tau": str(work.tau)}
    return words | {"algo.explore.std": str(work.noise)} if work.algo == "td3" else words
