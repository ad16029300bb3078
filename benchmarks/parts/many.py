"""For benchmarks.multi_agent: agents of one environment that do the arithmetic of single ones, and PPO of others."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from benchmarks.parts.turns import Unit
from rlframe.envs import EnvConfig
from rlframe.models import ModelConfig
from rlframe.samplers import serial

SIZE, N_ACTIONS, LENGTH = 8, 4, 200
T, B, N_SPREAD, EPOCHS, MINIBATCHES = 128, 8, 3, 4, 4  # of PPO on simple_spread
_PUSH = np.random.default_rng(0).standard_normal((N_ACTIONS, SIZE)).astype(np.float32)


def advance(state: np.ndarray, action: int) -> tuple[np.ndarray, float]:
    """The state of one agent after an action, and the reward."""
    state = np.float32(0.9) * state + _PUSH[action]
    return state, -float(state @ state)


class One(gymnasium.Env[np.ndarray, int]):
    """A single agent."""

    observation_space = spaces.Box(-np.inf, np.inf, (SIZE,), np.float32)
    action_space = spaces.Discrete(N_ACTIONS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._t, self._state = 0, np.zeros(SIZE, np.float32)
        return self._state, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._t += 1
        self._state, reward = advance(self._state, action)
        return self._state, reward, False, self._t >= LENGTH, {}


class Many(ParallelEnv[str, Any, Any]):
    """The same for n agents."""

    metadata: ClassVar[dict[str, Any]] = {"name": "many"}
    render_mode = None

    def __init__(self, n: int) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(n)]

    def observation_space(self, agent: str) -> spaces.Box:
        return One.observation_space

    def action_space(self, agent: str) -> spaces.Discrete:
        return One.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.agents, self._t = self.possible_agents[:], 0
        self._states = {agent: np.zeros(SIZE, np.float32) for agent in self.agents}
        return dict(self._states), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        self._t += 1
        rewards = {}
        for agent, action in actions.items():
            self._states[agent], rewards[agent] = advance(self._states[agent], action)
        cut, agents = self._t >= LENGTH, self.agents
        self.agents = [] if cut else agents
        no, flags, infos = dict.fromkeys(agents, False), dict.fromkeys(agents, cut), {agent: {} for agent in agents}
        return dict(self._states), rewards, no, flags, infos


def _collecting(env: EnvConfig, n: int, stack: ExitStack) -> Unit:
    from rlframe.agents.policy import make_policy_agent
    from rlframe.agents.team import Team
    from rlframe.core.multi_agent import JointSpace, columns_of

    config = serial.Config(batch_T=T, batch_B=n)
    envs = config.make_envs(env, 0, ())
    seen, done = envs.observation_space, envs.action_space
    if not isinstance(seen, JointSpace):
        agent: Any = make_policy_agent(seen, done, ModelConfig())
        sampler = stack.enter_context(closing(config.make_sampler(envs, agent, 0)))
        return lambda: sampler.collect().n_rows
    agent = Team({"shared": make_policy_agent(seen.own["shared"], done.own["shared"], ModelConfig())}, seen, done)
    sampler = stack.enter_context(closing(config.make_sampler(envs, agent, 0)))
    return lambda: columns_of(sampler.collect(), "shared").n_rows


def team_sampling(n: int, stack: ExitStack) -> Unit:
    """Collect batches of one environment of n agents; counts rows of agents."""
    return _collecting(EnvConfig(Many, {"n": n}), 1, stack)


def single_sampling(n: int, stack: ExitStack) -> Unit:
    """Collect batches of n environments of one agent."""
    return _collecting(EnvConfig(One), n, stack)


def spread(stack: ExitStack) -> Unit:
    """rlframe's PPO on simple_spread, as `launch` runs it, without log and evaluation; counts rows of agents."""
    import rlframe

    words = {"runner.n_steps": 10**9, "runner.log_interval_steps": 10**9, "eval.n_episodes": 0}
    sizes = {"sampler.batch_T": T, "sampler.batch_B": B, "algo.epochs": EPOCHS, "algo.minibatches": MINIBATCHES}
    run = rlframe.build(
        algo="ppo", env="mpe2/simple_spread_v3", sampler="serial", runner="minibatch_rl", affinity="none", threads=1,
        compile="true", **words, **sizes,
    )  # fmt: skip
    stack.callback(run.close)
    runner = run.runner
    runner.refresh()

    def unit() -> int:
        before = runner.env_steps
        run._within(runner.iterate)
        return N_SPREAD * (runner.env_steps - before)

    return unit


def spread_sb3(stack: ExitStack) -> Unit:
    """Stable-Baselines3's PPO over SuperSuit's vector environment, of the same sizes."""
    import supersuit
    from mpe2 import simple_spread_v3
    from stable_baselines3 import PPO

    single = supersuit.pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env())
    envs = supersuit.concat_vec_envs_v1(single, B, num_cpus=0, base_class="stable_baselines3")
    stack.callback(envs.close)
    rows = T * B * N_SPREAD
    sizes = {"n_steps": T, "batch_size": rows // MINIBATCHES, "n_epochs": EPOCHS}
    model = PPO("MlpPolicy", envs, device="cpu", **sizes)

    def unit() -> int:
        model.learn(rows, reset_num_timesteps=False)
        return rows

    return unit


def spread_rllib(stack: ExitStack) -> Unit:
    """RLlib's PPO of the same sizes, all in the algorithm's process."""
    import ray
    from mpe2 import simple_spread_v3
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
    from ray.tune.registry import register_env

    ray.init(address="local", num_cpus=1, log_to_driver=False, include_dashboard=False)
    stack.callback(ray.shutdown)
    register_env("spread", lambda config: ParallelPettingZooEnv(simple_spread_v3.parallel_env()))
    config = PPOConfig().environment("spread")
    config = config.env_runners(num_env_runners=0, rollout_fragment_length=T)
    config = config.multi_agent(policies={"shared"}, policy_mapping_fn=lambda agent, episode, **_: "shared")
    sizes = {"minibatch_size": T * B * N_SPREAD // MINIBATCHES, "num_epochs": EPOCHS}
    config = config.training(train_batch_size_per_learner=T * B, **sizes)
    config = config.rl_module(model_config={"fcnet_hiddens": [64, 64], "vf_share_layers": False})
    algo = config.learners(num_learners=0).build_algo()
    stack.callback(algo.stop)
    before = 0

    def unit() -> int:
        nonlocal before
        result = algo.train()
        steps = int(result["env_runners"]["num_env_steps_sampled_lifetime"])
        made, before = steps - before, steps
        return N_SPREAD * made

    return unit
