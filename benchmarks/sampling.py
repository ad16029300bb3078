"""How fast SerialSampler fills batches, next to Stable-Baselines3 and to the parts a sampler cannot do without.

    python benchmarks/sampling.py
    python benchmarks/sampling.py rounds=9 only=cartpole64,native64 out=sampling.json
    python benchmarks/sampling.py small=true     a smoke run; its numbers mean nothing

What is compared (ratios above 1 mean that rlframe is faster):

  cartpole8, cartpole64   CartPole-v1, 8 and 64 Python environments, one core, one torch thread: SerialSampler against
                          Stable-Baselines3's PPO.collect_rollouts over DummyVecEnv, 128 steps a batch
  native64                the same with 64 environments in Gymnasium's vector environment, against the 64 of
                          Stable-Baselines3 in DummyVecEnv
  pong8                   ALE/Pong-v5, 8 environments, all cores, as many torch and ALE threads: SerialSampler against
                          the sum of two times, that of stepping a bare AtariVectorEnv of the same options and that of
                          the bare forward passes with sampled actions; and against a bare loop of both in turn

How. Every contender lives in a process of its own, pinned to its cores, with its thread count; it is built and warmed
up before anything is timed. Then they take turns, one at a time for `seconds` each while the others sleep, for `rounds`
rounds, with OpenMP waiting as launch sets it for all. A rate is the median over the rounds; a ratio is the median of
the ratios within each round, so that drifting speed favours nobody. Run it on a machine that has nothing else to do.

What is equal. Both CartPole policies are two tanh networks of 64x64 for policy and value at their first weights; both
sides sample actions, store log-probabilities and values, and end each batch with the bootstrap value and GAE, for
collect_rollouts does so. Steps are those that an environment took: rlframe's rows in which it reset do not count. The
Python environments of Stable-Baselines3 are what gymnasium.make gives, without a Monitor. On Pong every row counts, on
both sides, and the bare network is plain torch: Nature CNN, two heads, the largest of logits plus Gumbel noise.

Stable-Baselines3 is no dependency of rlframe: pip install stable-baselines3.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import chz
import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from rlframe.agents import make_policy_agent
from rlframe.algos.parts import values
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs import EnvConfig, make_envs
from rlframe.envs.atari import ALE_DEFAULTS
from rlframe.envs.single import register_atari
from rlframe.models import ModelConfig
from rlframe.ops.returns import generalized_advantage
from rlframe.samplers import SerialSampler
from rlframe.system.threads import limit_spinning, n_cpus

BATCH_T = 128  # time steps a batch
PONG, PONG_B = "ALE/Pong-v5", 8
N_ACTIONS = 6  # of Pong
DEADLINE_S = 300  # for one answer of a contender

Unit = Callable[[], int]  # does some work; returns the env steps in it


@dataclass(frozen=True)
class Contender:
    """Who is measured, and on what."""

    name: str
    make: Callable[[], Unit]
    n_threads: int  # torch threads, and cores it is pinned to


@dataclass(frozen=True)
class Comparison:
    """A ratio of rates, and what is asked of it (0: nothing)."""

    name: str
    ratio: Callable[[Mapping[str, float]], float]
    asked: float


def make_sampler(env_id: str, n: int, backend: str, T: int) -> SerialSampler:
    """A sampler with a fresh agent."""
    torch.manual_seed(0)
    envs = make_envs(EnvConfig(env_id, backend=backend), n, env_seeds(0, Role.ENV, n))
    agent = make_policy_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(64, 64)))
    return SerialSampler(envs, agent, T)


def cartpole(n: int, backend: str, T: int) -> Unit:
    """Collect a batch, then bootstrap value and advantages; counts valid rows."""
    sampler = make_sampler("CartPole-v1", n, backend, T)
    agent: Any = sampler.collector.actors[0].agent

    def unit() -> int:
        samples = sampler.collect()
        sampler.trajectories()
        ends = (samples.terminated, samples.truncated, samples.valid)
        generalized_advantage(samples.reward, values(agent, samples), *ends, 0.99, 0.95)
        return int(samples.valid.sum())

    return unit


def cartpole_sb3(n: int, T: int) -> Unit:
    """Stable-Baselines3's collect_rollouts, as its `learn` calls it."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = DummyVecEnv([partial(gymnasium.make, "CartPole-v1")] * n)
    model = PPO("MlpPolicy", env, n_steps=T, seed=0, device="cpu")
    _, callback = model._setup_learn(total_timesteps=10**9)

    def unit() -> int:
        model.collect_rollouts(env, callback, model.rollout_buffer, n_rollout_steps=T)
        return n * T

    return unit


def pong(T: int) -> Unit:
    """Collect a batch; counts all rows."""
    sampler = make_sampler(PONG, PONG_B, "auto", T)

    def unit() -> int:
        sampler.collect()
        sampler.trajectories()
        return T * PONG_B

    return unit


def bare_pong() -> Any:
    """The vector environment that rlframe steps, without rlframe."""
    register_atari()
    options = {**ALE_DEFAULTS, "num_threads": min(PONG_B, n_cpus()), "reward_clipping": False, "episodic_life": False}
    env = gymnasium.make_vec(PONG, num_envs=PONG_B, vectorization_mode="vector_entry_point", **options)
    env.reset(seed=np.asarray(env_seeds(0, Role.ENV, PONG_B)))
    return env


def pong_stepping(T: int) -> Unit:
    """Step the bare environment with actions drawn beforehand."""
    env = bare_pong()
    actions = np.random.default_rng(0).integers(N_ACTIONS, size=(T, PONG_B))

    def unit() -> int:
        for action in actions:
            env.step(action)
        return T * PONG_B

    return unit


class BareNetwork(nn.Module):
    """The Nature CNN with a policy and a value head, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(
                nn.Conv2d(4, 32, 8, 4),
                nn.ReLU(),
                nn.Conv2d(32, 64, 4, 2),
                nn.ReLU(),
                nn.Conv2d(64, 64, 3, 1),
                nn.ReLU(),
            ),
            *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()),
        )
        self.policy, self.value = nn.Linear(512, N_ACTIONS), nn.Linear(512, 1)

    @torch.inference_mode()
    def act(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sampled actions [B] and values [B, 1]."""
        features = self.body(observation.float() * (1 / 255))
        return (self.policy(features) + noise).argmax(-1), self.value(features)


def gumbel(T: int) -> Tensor:
    """Noise for a batch [T, B, actions]."""
    return torch.from_numpy(np.random.default_rng(0).gumbel(size=(T, PONG_B, N_ACTIONS)).astype(np.float32))


def pong_forward(T: int) -> Unit:
    """Run the bare network on observations that stay."""
    network, noise = BareNetwork(), gumbel(T)
    observation = torch.randint(0, 256, (PONG_B, 4, 84, 84), dtype=torch.uint8)

    def unit() -> int:
        for t in range(T):
            network.act(observation, noise[t])
        return T * PONG_B

    return unit


def pong_loop(T: int) -> Unit:
    """Bare network and bare environment in turn; nothing is stored."""
    env, network, noise = bare_pong(), BareNetwork(), gumbel(T)
    observation = torch.zeros(PONG_B, 4, 84, 84, dtype=torch.uint8)

    def unit() -> int:
        nonlocal observation
        for t in range(T):
            action, _ = network.act(observation, noise[t])
            observation = torch.from_numpy(env.step(action.numpy())[0])
        return T * PONG_B

    return unit


def over(contender: str, other: str) -> Callable[[Mapping[str, float]], float]:
    """The ratio of two rates."""
    return lambda rate: rate[contender] / rate[other]


def over_the_sum(contender: str, parts: tuple[str, ...]) -> Callable[[Mapping[str, float]], float]:
    """The time that the parts take for a step, added up, over the contender's."""
    return lambda rate: sum(1 / rate[part] for part in parts) * rate[contender]


def groups(T: int) -> dict[str, tuple[list[Contender], list[Comparison]]]:
    """What can be measured, by name, in batches of `T` time steps."""
    found: dict[str, tuple[list[Contender], list[Comparison]]] = {}
    for name, n, backend, asked in (
        ("cartpole8", 8, "python", 1.5),
        ("cartpole64", 64, "python", 1.2),
        ("native64", 64, "native", 3.0),
    ):
        ours, theirs = f"SerialSampler, {n} {backend} environments", f"Stable-Baselines3, {n} in DummyVecEnv"
        contenders = [
            Contender(ours, partial(cartpole, n, backend, T), 1),
            Contender(theirs, partial(cartpole_sb3, n, T), 1),
        ]
        found[name] = contenders, [Comparison("over Stable-Baselines3", over(ours, theirs), asked)]
    step, forward, loop = "stepping alone", "forward passes alone", "bare loop"
    makers = {"SerialSampler": pong, step: pong_stepping, forward: pong_forward, loop: pong_loop}
    found["pong8"] = (
        [Contender(name, partial(make, T), n_cpus()) for name, make in makers.items()],
        [
            Comparison("over stepping + forward passes", over_the_sum("SerialSampler", (step, forward)), 0.9),
            Comparison("over the bare loop", over("SerialSampler", loop), 0.0),
        ],
    )
    return found


def serve(contender: Contender, cores: list[int], connection: Connection) -> None:
    """A contender's process: build, warm up, then measure whenever asked to; ends when the connection does."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(contender.n_threads)
    unit = contender.make()
    unit()
    connection.send(torch.get_num_threads())
    while (seconds := connection.recv()) > 0:
        steps, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds or not steps:
            steps += unit()
        connection.send(steps / passed)


class Remote:
    """The process of one contender."""

    def __init__(self, contender: Contender) -> None:
        self.name = contender.name
        context = multiprocessing.get_context("spawn")
        allowed = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
        self.cores = allowed[: contender.n_threads]
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(contender, self.cores, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.n_threads = int(self._answer())

    def _answer(self) -> float:
        if not self.connection.poll(DEADLINE_S):
            raise TimeoutError(f"{self.name}: no answer within {DEADLINE_S} s")
        try:
            return self.connection.recv()
        except EOFError:
            raise SystemExit(f"{self.name}: its process ended, see above") from None

    def measure(self, seconds: float) -> float:
        """Steps per second over at least `seconds`."""
        self.connection.send(seconds)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self.process.is_alive():
            self.connection.send(0.0)
        self.process.join(10)
        self.process.kill()


@dataclass(frozen=True)
class Line:
    """One line of the result: a rate in steps/s, or a ratio."""

    group: str
    name: str
    median: float
    rounds: list[float]
    where: str  # cores and threads of a rate
    asked: float  # of a ratio; 0: nothing


def run_group(
    contenders: list[Contender], comparisons: list[Comparison], group: str, rounds: int, seconds: float
) -> tuple[list[Line], list[Line]]:
    """Rates and ratios of one group, measured in turns."""
    with ExitStack() as stack:
        remotes = [stack.enter_context(closing(Remote(contender))) for contender in contenders]
        found = [{remote.name: measured(remote, seconds) for remote in remotes} for _ in range(rounds)]
    rates = [line(group, r.name, [row[r.name] for row in found], where(r)) for r in remotes]
    return rates, [line(group, c.name, [c.ratio(row) for row in found], asked=c.asked) for c in comparisons]


def measured(remote: Remote, seconds: float) -> float:
    """One turn, after a pause in which the threads of the turn before fall asleep."""
    time.sleep(min(0.3, seconds))
    return remote.measure(seconds)


def where(remote: Remote) -> str:
    """Cores and threads, in words."""
    cores = f"cores {','.join(map(str, remote.cores))}" if remote.cores else "not pinned"
    return f"{cores}; {remote.n_threads} torch thread{'s' if remote.n_threads > 1 else ''}"


def line(group: str, name: str, rounds: list[float], where: str = "", asked: float = 0.0) -> Line:
    """A line with its median."""
    return Line(group, name, statistics.median(rounds), rounds, where, asked)


def show(rates: list[Line], ratios: list[Line]) -> None:
    """Print both tables."""
    print(f"\n{'group':<11} {'contender':<40} {'steps/s':>9} {'lowest':>9} {'highest':>9}  where")
    for x in rates:
        print(f"{x.group:<11} {x.name:<40} {x.median:>9,.0f} {min(x.rounds):>9,.0f} {max(x.rounds):>9,.0f}  {x.where}")
    print(f"\n{'group':<11} {'ratio':<40} {'median':>9} {'lowest':>9} {'highest':>9}  asked")
    for x in ratios:
        verdict = f"{x.asked:.1f}, {'met' if x.median >= x.asked else 'not met'}" if x.asked else "-"
        print(f"{x.group:<11} {x.name:<40} {x.median:>9.2f} {min(x.rounds):>9.2f} {max(x.rounds):>9.2f}  {verdict}")


def machine() -> dict[str, Any]:
    """What it ran on."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    model = next((row.partition(":")[2].strip() for row in text.splitlines() if row.startswith("model name")), "")
    packages = ("torch", "gymnasium", "numpy", "ale-py", "stable-baselines3")
    found = {name: version(name) for name in packages if importlib.util.find_spec(name.replace("-", "_"))}
    return {"cpu": model or platform.processor(), "n_cpus": n_cpus(), "python": platform.python_version(), **found}


def main(rounds: int = 5, seconds: float = 2.0, only: str = "", small: bool = False, out: str = "") -> None:
    """Measure and print.

    Args:
        rounds: turns of each contender.    seconds: length of a turn.    only: groups, separated by commas.
        small: one very short round.    out: JSON file for all that was measured."""
    limit_spinning()
    known = groups(8 if small else BATCH_T)
    chosen = [name for name in only.split(",") if name] or list(known)
    if unknown := set(chosen) - set(known):
        raise SystemExit(f"only={only}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    if chosen != ["pong8"] and importlib.util.find_spec("stable_baselines3") is None:
        raise SystemExit("needs Stable-Baselines3: pip install stable-baselines3 (only=pong8 does without)")
    rounds, seconds = (1, 0.01) if small else (rounds, seconds)
    facts = machine()
    print(", ".join(f"{name} {fact}" for name, fact in facts.items()))
    print(f"{rounds} rounds, {seconds} s a turn", flush=True)
    rates: list[Line] = []
    ratios: list[Line] = []
    for name in chosen:
        more_rates, more_ratios = run_group(*known[name], name, rounds, seconds)
        rates, ratios = rates + more_rates, ratios + more_ratios
    show(rates, ratios)
    if out:
        content = {"machine": facts, "seconds": seconds, "rates": rates, "ratios": ratios}
        Path(out).write_text(json.dumps(content, default=asdict, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    chz.entrypoint(main)
