"""What scripts call says which part is in a wrong place, and where the right one comes from; it checks nothing else."""

import inspect
import typing
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from rlframe import critics
from rlframe.agents import make_policy_agent, make_q_agent
from rlframe.algos import a2c, appo, ddpg, dqn, es, iql, ppo, pqn, r2d1, sac
from rlframe.core.errors import ConfigError
from rlframe.core.types import BatchSpec
from rlframe.envs import EnvConfig, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.evaluation.estimate import estimate
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.runners import AsyncRl, Callback, Learner, MinibatchRl, OfflineRl, RunnerConfig
from rlframe.samplers import CpuSampler, GpuSampler, SerialSampler, serial

ENV = EnvConfig("CartPole-v1")


class Parts:
    """One of each part."""

    def __init__(self) -> None:
        self.envs = make_envs(ENV, 1, [0])
        self.spaces = self.envs.observation_space, self.envs.action_space
        self.agent = make_policy_agent(*self.spaces, ModelConfig(hidden=(4,)), seed=0)
        self.sampler = SerialSampler(self.envs, self.agent, batch_T=4)
        self.algo = ppo.PPO(self.agent, self.sampler.batch_spec, 1e3)  # type: ignore[arg-type]  # as in many scripts
        self.q_agent = make_q_agent(*self.spaces, ModelConfig(hidden=(4,)), critics.ExpectedValue(), "epsilon")
        self.learner, self.options = Learner(self.agent, self.algo), RunnerConfig(n_steps=8)


@pytest.fixture(scope="module")
def parts() -> Parts:
    return Parts()


CALL = "MinibatchRl(sampler, learners, options, evaluator, callbacks, ...): "
WRONG: dict[str, Callable[[Any], Any]] = {
    "PPO(agent, batch_spec, n_steps, config, seed): n_steps must be a number, not ppo.Config": (
        lambda p: ppo.PPO(p.agent, p.sampler.batch_spec, ppo.Config())
    ),
    "batch_spec must be BatchSpec (such as sampler.batch_spec), not SerialSampler": (
        lambda p: ppo.PPO(p.agent, p.sampler, 8)
    ),
    "config must be ppo.Config or None, not dqn.Config": (
        lambda p: ppo.PPO(p.agent, p.sampler.batch_spec, 8, dqn.Config())
    ),
    "agent must be QAgent (from make_q_agent(...)), not PolicyAgent": lambda p: dqn.DQN(p.agent, p.sampler, p.algo, 8),
    "replay must be Replay (from config.make_replay(...)), not SerialSampler": (
        lambda p: dqn.DQN(p.q_agent, p.sampler, p.algo, 8)
    ),
    "envs must be Envs (from make_envs(...)), not TimeLimit": (
        lambda p: SerialSampler(gymnasium.make("CartPole-v1"), p.agent, 4)
    ),
    "envs must be WorkerPool (as WorkerPool(config, n, seeds)), not PythonEnvs": (
        lambda p: CpuSampler(p.envs, p.agent, batch_T=4)
    ),
    "collector must be a subclass of Collector, not the class Callback": (
        lambda p: SerialSampler(p.envs, p.agent, 4, collector=Callback)
    ),
    "policy must be TargetPolicy (from load_policy(...).target() or run.policy.target()), not PolicyAgent": (
        lambda p: estimate(p.agent, [], 0.9, ["fqe"])
    ),
    "env must be EnvConfig (such as EnvConfig('CartPole-v1')), not str": (
        lambda p: Evaluator("CartPole-v1", p.agent, EvalConfig())
    ),
    "make_policy_agent(observation_space, action_space, config, seed, explore): config must be ModelConfig, not": (
        lambda p: make_policy_agent(*p.spaces, {}, 0)
    ),
    "make_envs(config, n, seeds, first): seeds must be a list of int, not int": lambda _: make_envs(ENV, 1, 0),
    "EnvConfig(id, kwargs, backend, n_threads, options, ...): options must be EnvOptions, not an empty dict": (
        lambda _: EnvConfig("CartPole-v1", options={})
    ),
    "config must be a dict, not RunnerConfig": lambda p: logger_context("", 0, "x", p.options),
    CALL + "learners must be Learner (as Learner(agent, algo)) or a dict of Learner, not PPO": (
        lambda p: MinibatchRl(p.sampler, p.algo, p.options)
    ),
    "learners must be Learner (as Learner(agent, algo)) or a dict of Learner, not a dict of PPO": (
        lambda p: MinibatchRl(p.sampler, {"a": p.algo}, p.options)
    ),
    "n_steps must be a number, not BatchSpec": lambda p: a2c.A2C(p.agent, p.sampler.batch_spec),
    "observation_space must be Space (such as envs.observation_space), not PythonEnvs": (
        lambda p: make_policy_agent(p.envs, p.spaces[1], ModelConfig(), 0)
    ),
    CALL + "callbacks must be a list of Callback, not a list of the class Callback": (
        lambda p: MinibatchRl(p.sampler, p.learner, p.options, callbacks=[Callback])
    ),
    CALL + "evaluator must be BaseEvaluator (such as Evaluator(env, agent, config)) or None, not EvalConfig": (
        lambda p: MinibatchRl(p.sampler, p.learner, p.options, evaluator=EvalConfig())
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_argument_of_another_class_is_named(message: str, parts: Parts) -> None:
    with pytest.raises(TypeError) as error:
        WRONG[message](parts)
    assert message in str(error.value)


def test_objects_where_a_setting_is_text_are_refused(parts: Parts) -> None:
    with pytest.raises(ConfigError, match=r"model\.activation=.* is not one of tanh, relu, .*did you mean relu.$"):
        ModelConfig(activation=nn.ReLU)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model\.encoder=Identity\(\) must be text: auto .* module:Class"):
        ModelConfig(encoder=nn.Identity())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'must be text such as "torch.nn.modules.linear:Identity": auto'):
        ModelConfig(encoder=nn.Identity)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"algo\.double='false' must be True or False: the online network"):
        dqn.Config(double="false")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sampler\.statistics='a:B' must be a tuple of names: \[module:Class\]"):
        serial.Config(statistics="a:B")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sampler\.batch_T=0 must be"):
        SerialSampler(parts.envs, parts.agent, batch_T=0)


class Own(ppo.PPO):
    """An algorithm of a user's own, whose annotations are their own matter."""

    def __init__(self, agent: Any, spec: BatchSpec, n_steps: "how long", *more: int, seed: int = None) -> None:  # type: ignore # noqa: F722, RUF013
        super().__init__(agent, spec, n_steps)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()


def test_a_users_own_subclass_is_not_checked_but_what_it_calls_is(parts: Parts) -> None:
    class Generic(Own, typing.Generic[typing.TypeVar("T")], name="a class with arguments"):  # type: ignore[misc]
        pass

    Generic[int](parts.agent, parts.sampler.batch_spec, 8, 1, 2, seed="x")
    with pytest.raises(TypeError, match=r"^PPO\(agent, batch_spec, .*: batch_spec must be BatchSpec .*, not int"):
        Own(parts.agent, 3, 8)  # type: ignore[arg-type]


def test_whatever_else_serves_is_taken(parts: Parts) -> None:
    seeds: Any = np.array([1, 2])
    make_envs(EnvConfig("CartPole-v1", MappingProxyType({}), whole_episodes=np.bool_(False)), 2, seeds).close()  # type: ignore[arg-type]
    ppo.PPO(parts.agent, parts.sampler.batch_spec, torch.tensor(8.0), None, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'n_steps'"):
        ppo.PPO(parts.agent, parts.sampler.batch_spec)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'lr'"):
        ppo.PPO(parts.agent, parts.sampler.batch_spec, 8, lr=3)  # type: ignore[call-arg]


PUBLIC = [
    *(a2c.A2C, appo.APPO, ddpg.DDPG, dqn.DQN, es.ES, iql.IQL, pqn.PQN, r2d1.R2D1, sac.SAC),
    *(SerialSampler, CpuSampler, GpuSampler, MinibatchRl, AsyncRl, OfflineRl, Evaluator, WorkerPool),
]


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_what_scripts_construct_is_checked(kind: type) -> None:
    names = [*inspect.signature(kind).parameters]
    with pytest.raises(TypeError, match=rf"{kind.__name__}\({names[0]}, .*: {names[0]} must be .*, not Callback"):
        kind(Callback())


def test_a_sampler_names_the_spaces_of_an_agent_that_was_made_for_others() -> None:
    envs = make_envs(ENV, 1, [0])
    swapped = make_policy_agent(envs.action_space, envs.observation_space, ModelConfig(hidden=(4,)), seed=0)
    with pytest.raises(ConfigError, match=r"has observation_space=Discrete\(2\), and the environments have Box"):
        SerialSampler(envs, swapped, batch_T=4)
