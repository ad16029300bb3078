"""What scripts call says which argument is of a wrong class, and where one of the right class comes from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from torch import nn

from rlframe.agents import make_policy_agent
from rlframe.algos import dqn, ppo
from rlframe.core.arguments import checked
from rlframe.core.errors import ConfigError
from rlframe.core.types import BatchSpec
from rlframe.envs import EnvConfig, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.runners import Callback, Learner, MinibatchRl, RunnerConfig
from rlframe.samplers import CpuSampler, SerialSampler

ENV = EnvConfig("CartPole-v1")


class Parts:
    """One of each part."""

    def __init__(self) -> None:
        self.envs = make_envs(ENV, 1, [0])
        self.spaces = self.envs.observation_space, self.envs.action_space
        self.agent = make_policy_agent(*self.spaces, ModelConfig(hidden=(4,)), seed=0)
        self.sampler = SerialSampler(self.envs, self.agent, batch_T=4)
        self.algo = ppo.PPO(self.agent, self.sampler.batch_spec, 1e3)  # type: ignore[arg-type]  # as in many scripts
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
    "envs must be Envs (from make_envs(...)), not TimeLimit": (
        lambda p: SerialSampler(gymnasium.make("CartPole-v1"), p.agent, 4)
    ),
    "envs must be WorkerPool (as WorkerPool(config, n, seeds)), not PythonEnvs": (
        lambda p: CpuSampler(p.envs, p.agent, batch_T=4)
    ),
    "collector must be a subclass of Collector, not the class Callback": (
        lambda p: SerialSampler(p.envs, p.agent, 4, collector=Callback)
    ),
    "env must be EnvConfig (such as EnvConfig('CartPole-v1')), not str": (
        lambda p: Evaluator("CartPole-v1", p.agent, EvalConfig())
    ),
    "make_policy_agent(observation_space, action_space, config, seed, explore): config must be ModelConfig, not dict": (
        lambda p: make_policy_agent(*p.spaces, {"hidden": (4,)}, 0)
    ),
    "make_envs(config, n, seeds, first): seeds must be a list of int, not int": lambda _: make_envs(ENV, 1, 0),
    "EnvConfig(id, kwargs, backend, n_threads, options, ...): options must be EnvOptions, not dict": (
        lambda _: EnvConfig("CartPole-v1", options={})
    ),
    "config must be a dict, not RunnerConfig": lambda p: logger_context("", 0, "x", p.options),
    CALL + "learners must be Learner (as Learner(agent, algo)) or a dict of Learner, not PPO": (
        lambda p: MinibatchRl(p.sampler, p.algo, p.options)
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
    with pytest.raises(ConfigError, match=r"model\.activation=.* is not one of tanh, relu, .*did you mean relu or"):
        ModelConfig(activation=nn.ReLU)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model\.encoder=Identity\(\) must be text: auto .* module:Class"):
        ModelConfig(encoder=nn.Identity())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sampler\.batch_T=0 must be"):
        SerialSampler(parts.envs, parts.agent, batch_T=0)


@checked
def several(spec: BatchSpec, n: int, x: float | None, names: Sequence[str], of: Mapping[str, Any], other: Any) -> int:
    return n


def test_what_serves_as_well_is_taken() -> None:
    seeds: Any = np.array([1, 2])
    assert several(BatchSpec(1, 1), np.int64(3), 2, seeds, ENV.kwargs, object()) == 3  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'other'"):
        several(BatchSpec(1, 1), 3, None, (), {})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'm'"):
        several(BatchSpec(1, 1), m=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="names must be a list of str, not str"):
        several(BatchSpec(1, 1), 3, 1.0, "a", {}, None)
