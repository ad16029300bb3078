"""Every form in which rlframe.train takes Python objects, and the same settings by name; for a script and for cells.

Names lead to this file, `./forms.py:Class`, and objects to what the script or notebook itself has defined.
"""

import functools
import tempfile
from typing import Any

import chz
import gymnasium
import numpy as np
import torch

import rlframe
from rlframe.algos import ppo
from rlframe.core.parts import flatten
from rlframe.distributions import Beta
from rlframe.exploration import ActionNoise, ExploreState
from rlframe.models import ModelConfig
from rlframe.optimizers import AdamConfig
from rlframe.record import Logger
from rlframe.record.snapshot import load_newest
from rlframe.rollout import EpisodeStatistic
from rlframe.runners import Callback


class Walk(gymnasium.Env):
    def __init__(self, length: int = 6, discrete: bool = True) -> None:
        self.length, self.discrete = length, discrete
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (length,), np.float32)
        box = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2) if discrete else box

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.place, self.time = int(self.np_random.integers(self.length - 1)), 0
        return self.observe(), {}

    def step(self, action):
        self.place = max(self.place + (1 if np.sum(action) > 0 else -1), 0)
        self.time += 1
        arrived = self.place == self.length - 1
        return self.observe(), float(arrived) - 0.1, arrived, self.time == 9 and not arrived, {}

    def observe(self) -> np.ndarray:
        return np.eye(self.length, dtype=np.float32)[self.place]

    def make(self) -> gymnasium.Env:
        return type(self)(self.length, self.discrete)


def short_walk() -> gymnasium.Env:
    return Walk(4)


class Twice(gymnasium.RewardWrapper):
    def reward(self, reward: Any) -> Any:
        return 2 * float(reward)


class Slower(Callback):
    """It halves the learning rate at each batch, so that it changes what is learned."""

    def __init__(self, factor: float = 0.5) -> None:
        self.factor, self.n_batches = factor, 0

    def on_batch(self, samples: Any) -> None:
        self.n_batches += 1
        self.runner.algo.learning_rate = 1e-3 * self.factor**self.n_batches


class Rows(Logger):
    def __init__(self, *where: Any) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, row) -> None:
        self.rows.append(dict(row))

    def truncate_after(self, env_steps: int) -> None: ...

    def close(self) -> None: ...


class Ones(EpisodeStatistic):
    def add(self, observation, action, reward) -> None: ...

    def result(self) -> dict[str, float]:
        return {"ones": 1.0}


class Net(torch.nn.Module):
    def __init__(self, space: gymnasium.Space) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(space.shape[0], 5)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layer(observation).tanh()


class Noise(ActionNoise):
    """Pushes all actions by `level`."""

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Any:
        return np.ones((*lead, 1), np.float32)

    def perturb(self, action: Any, inputs: Any, noise: Any, state: ExploreState, level: Any, xp: Any) -> Any:
        return (action + self.level_of(level, state, xp).reshape(-1, 1) * noise).clip(-1, 1), state


class MyBeta(Beta): ...


@chz.chz
class FastPPO(ppo.Config):
    learning_rate: float = 1e-2


def score(policy: Any, make_env: Any) -> dict[str, float]:
    return {"return_mean": float(make_env().unwrapped.length)}


HERE, RADAM = "./forms.py", {"algo.optimizer": "torch.optim:RAdam"}
if "Walk-v0" not in gymnasium.registry:  # names import this file once more
    gymnasium.register("Walk-v0", Walk)

Settings = dict[str, Any]
FORMS: dict[str, tuple[Settings, Settings]] = {  # by objects, by name
    "class": ({"env": Walk}, {"env": f"{HERE}:Walk"}),
    "class with arguments": (
        {"env": {"name": Walk, "kwargs": {"length": 8}}},
        {"env": f"{HERE}:Walk", "env_kwargs.length": 8},
    ),
    "function": ({"env": short_walk}, {"env": f"{HERE}:short_walk"}),
    "lambda": ({"env": lambda: Walk(4)}, {"env": f"{HERE}:short_walk"}),
    "partial": ({"env": functools.partial(Walk, 4)}, {"env": f"{HERE}:short_walk"}),
    "bound method": ({"env": Walk(4).make}, {"env": f"{HERE}:short_walk"}),
    "instance": ({"env": Walk(4)}, {"env": f"{HERE}:short_walk"}),
    "wrapped instance": (
        {"env": Twice(Walk(4))},
        {"env": f"{HERE}:short_walk", "env.wrappers": [f"{HERE}:Twice"]},
    ),
    "made instance": ({"env": gymnasium.make("CartPole-v1")}, {"env": "CartPole-v1"}),
    "spec": ({"env": gymnasium.spec("CartPole-v1")}, {"env": "CartPole-v1"}),
    "own id": ({"env": "Walk-v0"}, {"env": f"{HERE}:Walk"}),
    "instance of own id": (
        {"env": gymnasium.make("Walk-v0", length=8)},
        {"env": f"{HERE}:Walk", "env_kwargs.length": 8},
    ),
    "instance with an argument that is no JSON": (
        {"env": gymnasium.make("Walk-v0", length=np.int64(8))},
        {"env": f"{HERE}:Walk", "env_kwargs.length": 8},
    ),
    "name of main": ({"env": "__main__:Walk"}, {"env": f"{HERE}:Walk"}),
    "eval.env": (
        {"env": Walk, "eval": {"env": lambda: Walk(6)}},
        {"env": f"{HERE}:Walk", "eval.env": f"{HERE}:Walk"},
    ),
    "wrapper": ({"env": {"name": Walk, "wrappers": [Twice]}}, {"env": f"{HERE}:Walk", "env.wrappers": f"{HERE}:Twice"}),
    "callback": ({"callbacks": [Slower()]}, {"callbacks": [f"{HERE}:Slower"]}),
    "class of callback": ({"callbacks": [Slower]}, {"callbacks": [f"{HERE}:Slower"]}),
    "logger": ({"loggers": [Rows()]}, {"loggers": [f"{HERE}:Rows"]}),
    "class of logger": ({"loggers": Rows}, {"loggers": [f"{HERE}:Rows"]}),
    "evaluation": ({"env": Walk, "eval.function": score}, {"env": f"{HERE}:Walk", "eval.function": f"{HERE}:score"}),
    "statistic": ({"sampler.statistics": [Ones]}, {"sampler.statistics": [f"{HERE}:Ones"]}),
    "optimizer": ({"algo.optimizer": torch.optim.RAdam}, RADAM),
    "optimizer with arguments": (
        {"algo.optimizer": functools.partial(torch.optim.RAdam, eps=1e-3)},
        {**RADAM, "algo.optimizer.kwargs.eps": 1e-3},
    ),
    "config of an optimizer": (
        {"algo": {"optimizer": AdamConfig(betas=(0.5, 0.9))}},
        {"algo.optimizer.betas": [0.5, 0.9]},
    ),
    "encoder": ({"model.encoder": Net}, {"model.encoder": f"{HERE}:Net"}),
    "function of an encoder": ({"model": {"encoder": lambda space: Net(space)}}, {"model.encoder": f"{HERE}:Net"}),
    "distribution": (
        {"env": lambda: Walk(6, False), "model.distribution": MyBeta},
        {"env": f"{HERE}:Walk", "env_kwargs.discrete": False, "model.distribution": f"{HERE}:MyBeta"},
    ),
    "dicts": (
        {
            "model": {"hidden": [16, 8]},
            "algo": {"name": "ppo", "learning_rate": 1e-3, "optimizer": {"name": "rmsprop"}},
        },
        {"model.hidden": "16,8", "algo": "ppo", "algo.learning_rate": 1e-3, "algo.optimizer": "rmsprop"},
    ),
    "configs": (
        {"model": ModelConfig(hidden=(16, 8)), "algo": ppo.Config(epochs=2)},
        flatten(model=ModelConfig(hidden=(16, 8)), algo=ppo.Config(epochs=2)),  # all keys, not the algorithm's defaults
    ),
    "class of a config": ({"algo": FastPPO}, {"algo": f"{HERE}:FastPPO"}),
    "module": ({"algo": ppo}, {"algo": "ppo"}),
    "exploration": (
        {"algo": "td3", "env": lambda: Walk(6, False), "algo.explore": Noise, "algo.learning_starts": 32},
        {
            "algo": "td3",
            "env": f"{HERE}:Walk",
            "env_kwargs.discrete": False,
            "algo.explore": f"{HERE}:Noise",
            "algo.learning_starts": 32,
        },
    ),
    "bonus": (
        {"reward": {"bonus": {"name": "rnd", "hidden": [8], "embedding": 4}}},
        {"reward.bonus": "rnd", "reward.bonus.hidden": 8, "reward.bonus.embedding": 4},
    ),
}
SMALL: Settings = {"sampler.batch_T": 16, "sampler.batch_B": 4, "runner.log_interval_steps": 64, "affinity": "none"}
SMALL |= {"eval.n_episodes": 2, "eval.n_envs": 1, "log_level": "WARNING"}


def in_one_process(settings: Settings) -> dict[str, torch.Tensor]:
    with rlframe.build(n_steps=128, **settings) as run:
        run.train()
        return run.agent.state_dict()


def recorded(settings: Settings) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        return load_newest(rlframe.train(n_steps=128, log_dir=folder, **settings).directory, key="agent")[1]


def check(keys: Settings, names: list[str] | None = None) -> None:
    """Train by objects and by name, and compare all weights."""
    train = recorded if "world_size" in keys else in_one_process
    for name in names or FORMS:
        both = []
        for form in FORMS[name]:
            group = "model" in form and not isinstance(form["model"], dict)
            hidden = (
                {} if group or "model.hidden" in form or "hidden" in form.get("model", {}) else {"model.hidden": [8]}
            )
            both.append(train({"algo": "ppo", "env": f"{HERE}:Walk", **SMALL, **hidden, **keys, **form}))
        assert both[0].keys() == both[1].keys(), name
        assert all(torch.equal(both[0][key], both[1][key]) for key in both[0]), name
    print(f"{len(names or FORMS)} forms are equal")
