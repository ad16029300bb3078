"""DSAC, distributed SAC, composed of actors of Ray: parameter server, replay, collectors, learner and tester.

    python examples/example_11.py
    python examples/example_11.py env=LunarLanderContinuous-v3 n_steps=100_000 n_collectors=4 n_shards=4 num_cpus=8

Batches go from collectors to the learner, which sends their rows to the actors of its replay; parameters go through the
server. Collectors, testers, actors of replay and the server may die: others take their places. It needs
`pip install "rlframe[ray]"`, and `--help` lists the arguments. The command line has the same without the server:
`algo=sac runner=async_rl sampler=ray replay=ray eval.asynchronous=true`.
"""

from dataclasses import dataclass, replace

import torch

import rlframe
from rlframe.agents import ActorAgent
from rlframe.algos import sac
from rlframe.core.seeding import Role, env_seeds
from rlframe.core.struct import as_numpy, write
from rlframe.core.types import BatchSpec, Samples
from rlframe.envs import EnvConfig, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import ModelConfig
from rlframe.replay import OnRay
from rlframe.rollout.cpu_worker import parameters
from rlframe.samplers import SerialSampler
from rlframe.system.cluster import RayOptions, connect, imported
from rlframe.system.parameter_server import ParameterServer


@dataclass
class Setting:
    """What all actors know."""

    server: ParameterServer
    env: EnvConfig
    config: sac.Config
    spec: BatchSpec  # of each collector's batches
    n_steps: int
    seed: int
    version = -1  # of the parameters that the actor has

    def make_agent(self) -> ActorAgent:
        torch.set_num_threads(1)
        envs, model = make_envs(self.env, 1, [0]), ModelConfig(hidden=(64, 64), activation="relu")
        return self.config.make_agent(envs.observation_space, envs.action_space, model, self.seed)

    def follow(self, agent: ActorAgent) -> None:
        if newer := self.server.pull(self.version):
            self.version, values = newer
            write(parameters(agent), values)


class Collector:
    def __init__(self, setting: Setting, number: int) -> None:
        self.setting, self.number, self.agent = setting, number, setting.make_agent()
        T, B, n = setting.spec
        envs = make_envs(setting.env, B, env_seeds(setting.seed, Role.ENV, n * B)[number * B :][:B])
        self.sampler = SerialSampler(envs, self.agent, batch_T=T, seed=setting.seed + number)

    def collect(self) -> Samples:
        self.setting.follow(self.agent)
        self.sampler.refresh(self.agent)
        return replace(self.sampler.collect(), stream=self.number).map(as_numpy)


class Learner:
    def __init__(self, setting: Setting) -> None:
        self.server, agent = setting.server, setting.make_agent()
        self.algo = setting.config.make_algorithm(agent, setting.spec, setting.n_steps, setting.seed)

    def learn(self, samples: Samples) -> int:
        self.algo.receive(samples.map(lambda x: torch.from_numpy(x.copy())))
        while self.algo.updates_due():
            self.algo.update()
        env_steps = self.algo.progress.env_steps
        self.server.push(env_steps, {name: as_numpy(x) for name, x in parameters(self.algo.agent).items()})
        return env_steps


class Tester:
    def __init__(self, setting: Setting) -> None:
        self.setting, self.agent = setting, setting.make_agent()
        self.evaluator = Evaluator(setting.env, self.agent, EvalConfig(n_envs=5, n_episodes=5), setting.seed)

    def test(self) -> float:
        self.setting.follow(self.agent)
        return self.evaluator.evaluate(0)["eval/return_mean"]


def train(
    env: str = "Pendulum-v1",
    n_steps: int = 5_000,
    n_collectors: int = 2,
    n_shards: int = 2,
    num_cpus: int = 2,
    seed: int = 0,
    path: str = "dsac.safetensors",
) -> None:
    """Train for `n_steps` env steps of all collectors, and write the parameters to `path`."""
    connect(RayOptions(num_cpus=num_cpus))
    ray, replay, spec = imported(), OnRay(size=100_000, n_shards=n_shards), BatchSpec(20, 1, n_collectors)
    config = sac.Config(replay=replay, learning_starts=500, batch_size=64, replay_ratio=64, critic_learning_rate=1e-3)
    setting = Setting(ParameterServer(), EnvConfig(env), config, spec, n_steps, seed)

    lasting = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)  # Ray starts them again if they die
    collectors = [lasting(Collector).remote(setting, number) for number in range(n_collectors)]
    tester, learner = lasting(Tester).remote(setting), ray.remote(num_cpus=0)(Learner).remote(setting)
    batches = {collector.collect.remote(): collector for collector in collectors}
    test, env_steps, tested = tester.test.remote(), 0, 0
    while env_steps < n_steps:
        batch = ray.wait([*batches])[0][0]  # the first to arrive goes from actor to actor
        collector = batches.pop(batch)
        batches[collector.collect.remote()] = collector
        env_steps = ray.get(learner.learn.remote(batch))
        if env_steps >= tested + n_steps // 10 and ray.wait([test], timeout=0)[0]:
            print(f"env_steps {tested}: mean return {ray.get(test):.1f}", flush=True)
            test, tested = tester.test.remote(), env_steps
    ray.get(test)
    print(f"env_steps {env_steps}: mean return {ray.get(tester.test.remote()):.1f}")
    print(f"{path}: the parameters of env_steps {setting.server.save(path)}")


if __name__ == "__main__":
    rlframe.entrypoint(train)
