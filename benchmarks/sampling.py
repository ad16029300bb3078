"""How fast the samplers fill batches, compared with other packages and with the limits that their parts set.

    python -m benchmarks.sampling
    python -m benchmarks.sampling rounds=9 only=cartpole64,pong out=sampling.json
    python -m benchmarks.sampling small=true     a smoke test; its numbers mean nothing

What is compared (ratios above 1 mean that rlframe is faster):

  cartpole8, cartpole64   CartPole-v1, 8 and 64 Python environments, one core, one torch thread: SerialSampler against
                          Stable-Baselines3's PPO.collect_rollouts over DummyVecEnv, 128 steps a batch
  native64                the same with 64 environments in Gymnasium's vector environment, against the 64 of
                          Stable-Baselines3 in DummyVecEnv
  synthetic               16 environments whose step burns 200 us of CPU time, policy and value of 64x64, two workers:
                          CpuSampler and GpuSampler, each against its limit
  cheetah                 HalfCheetah-v5, 16 Python environments, policy and value of 256x256, two workers: the same.
                          Acting for 8 of them takes half as long as stepping them; with n_cheetahs=8 as long, with
                          n_cheetahs=32 a third
  pong                    ALE/Pong-v5, 8 environments in ALE's vector environment, two cores: SerialSampler with two
                          torch and two ALE threads, CpuSampler and GpuSampler with two workers of one ALE thread:
                          against their limits; SerialSampler also against a bare loop that acts and steps in turn
  subprocess              CartPole-v1, 16 environments, policy and value of 64x64 that act: CpuSampler and GpuSampler
                          with two workers, of Python environments or of Gymnasium's vector environment, against
                          Gymnasium's AsyncVectorEnv and Stable-Baselines3's SubprocVecEnv, as they are by default: with
                          16 processes
  alternating             GpuSampler in two groups against one, where acting, on the first core, takes as long as
                          stepping, on the second: 200 us of CPU time for each of 8 environments, and for each row
  worker                  no rates, but the cost of a worker process that only steps: seconds until it is ready, the
                          first one not counted, and memory beyond that of its environment in a bare process

A limit is the sum of two times: that of stepping the same environments in bare loops, and that of the bare forward
passes, each alone, in as many processes as the sampler has for it and on the same cores. Where there are two
processes, they start together and the slower one counts. "The fastest" is the sampler and the limit with the highest
rates.

Method. Every contender runs in separate processes, pinned to its cores, with its thread count; it is built and warmed
up before anything is timed. Then they take turns, one at a time for `seconds` each while the others sleep, for
`rounds` rounds, with OpenMP and malloc set as launch sets them for all. A rate is the median over the rounds; a ratio
is the median of the ratios within each round, so that a drifting speed of the machine affects all alike. Run it on an
idle machine.

Equal work. Both sides of the first three sample actions, store log-probabilities and values, and end each batch with
the bootstrap value and GAE, as collect_rollouts does; each has two networks of 64x64 with tanh at their initial
weights. In the other groups the other side stores nothing, and acts in plain torch: the same networks, actions sampled
with noise drawn beforehand, log-probabilities, values. Bare Python environments have no wrappers. Steps are those that
an environment took: rows of rlframe in which it reset do not count, nor do those of AsyncVectorEnv; those of bare Pong
do, which is one in a thousand.

Stable-Baselines3 is not a dependency of rlframe: pip install stable-baselines3.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import chz

from benchmarks.parts import bare, others, ours, worker
from benchmarks.parts.bare import Policy, Steps, act_discrete, act_gaussian
from benchmarks.parts.ours import SomeConfig
from benchmarks.parts.synthetic import N_ACTIONS, SIZE, Burning, agree
from benchmarks.parts.turns import Comparison, Contender, Group, Make, run_groups
from rlframe.envs import EnvConfig
from rlframe.models import ModelConfig
from rlframe.samplers import cpu, gpu, serial
from rlframe.system.machine import limit_threads

BATCH_T = 128  # time steps a batch
N_WORKERS = 2  # worker processes, and cores of all groups but the first three
SB3, ALE, MUJOCO = "stable_baselines3", "ale_py", "mujoco"
INSTALL = {SB3: "stable-baselines3", ALE: '"rlframe[atari]"', MUJOCO: '"rlframe[mujoco]"'}
SMALL = ModelConfig(hidden=(64, 64))
NATURE = ModelConfig(activation="relu")  # for images
WORKER = "worker"  # the group that is not measured in turns

Limits = dict[str, tuple[str, ...]]  # by the sampler's name, the contenders whose times add up


def beside_sb3(n: int, backend: str, T: int, asked: float) -> Group:
    """The serial samplers of both."""
    mine, theirs = f"SerialSampler, {n} {backend} environments", f"Stable-Baselines3, {n} in DummyVecEnv"
    contenders = [
        Contender(mine, partial(ours.with_advantages, n, backend, T)),
        Contender(theirs, partial(others.collect_rollouts, n, T)),
    ]
    return Group(contenders, [Comparison("over Stable-Baselines3", (mine,), ((theirs,),), asked)], (SB3,))


def _sampling(config: SomeConfig, env: EnvConfig, model: ModelConfig = SMALL) -> Make:
    return partial(ours.sampling, config, env, model)


def configs(B: int, T: int) -> dict[str, SomeConfig]:
    """The samplers with worker processes."""
    return {
        "CpuSampler": cpu.Config(batch_T=T, batch_B=B, n_workers=N_WORKERS),
        "GpuSampler": gpu.Config(batch_T=T, batch_B=B, n_workers=N_WORKERS),
    }


def on_both_cores(name: str, make: Make, n_threads: int = 1) -> Contender:
    """One process, perhaps with workers."""
    return Contender(name, make, n_threads, N_WORKERS)


def in_both(name: str, make: Make) -> Contender:
    """A process on each core."""
    return Contender(name, make, n_processes=N_WORKERS)


def beside_limits(
    env: EnvConfig, model: ModelConfig, steps: Steps, policy: Policy, B: int, T: int
) -> tuple[list[Contender], Limits]:
    """CpuSampler and GpuSampler on Python environments, and the parts of their limits."""
    part = B // N_WORKERS
    step, split, whole = (f"{what} alone, {n}" for what, n in _named_parts(B))
    contenders = [
        *(on_both_cores(name, _sampling(config, env, model)) for name, config in configs(B, T).items()),
        in_both(step, partial(bare.stepping, steps, part, T)),
        in_both(split, partial(bare.forward, policy, part, T)),
        Contender(whole, partial(bare.forward, policy, B, T)),
    ]
    return contenders, {"CpuSampler": (step, split), "GpuSampler": (step, whole)}


def _named_parts(B: int) -> list[tuple[str, str]]:
    split = f"{N_WORKERS} x {B // N_WORKERS}"
    return [("stepping", split), ("forward passes", split), ("forward passes", f"1 x {B}")]


def over_limits(limits: Limits, asked: float) -> list[Comparison]:
    """Each sampler over its own limit."""
    return [Comparison(f"{name} over its limit", (name,), (limit,), asked) for name, limit in limits.items()]


def fastest(limits: Limits, asked: float) -> Comparison:
    """The fastest sampler over the fastest limit."""
    return Comparison("the fastest over the fastest limit", tuple(limits), tuple(dict.fromkeys(limits.values())), asked)


def synthetic(T: int) -> Group:
    """Slow environments, a small policy."""
    policy = Policy(partial(bare.Vectors, SIZE, 64, N_ACTIONS), act_discrete, N_ACTIONS)
    steps = Steps(Burning, bare.burning_actions)
    contenders, limits = beside_limits(EnvConfig(Burning), SMALL, steps, policy, 16, T)
    return Group(contenders, over_limits(limits, 0.9))


def cheetah(B: int, T: int) -> Group:
    """A simulator, a policy of medium size."""
    policy = Policy(partial(bare.Vectors, 17, 256, bare.N_CHEETAH), act_gaussian, bare.N_CHEETAH)
    steps = Steps(bare.cheetah, bare.cheetah_actions, bare.CHEETAH_LIMIT)
    env, model = EnvConfig("HalfCheetah-v5", backend="python"), ModelConfig(hidden=(256, 256))
    contenders, limits = beside_limits(env, model, steps, policy, B, T)
    return Group(contenders, [*over_limits(limits, 0.0), fastest(limits, 0.85)], (MUJOCO,))


def pong(T: int) -> Group:
    """A fast simulator, a convolutional policy."""
    B, part, n = 8, 8 // N_WORKERS, N_WORKERS
    policy = Policy(bare.Pixels, act_discrete, bare.N_PONG)
    on_threads, split = EnvConfig("ALE/Pong-v5", n_threads=n), EnvConfig("ALE/Pong-v5", n_threads=1)
    in_two = gpu.Config(batch_T=T, batch_B=B, n_workers=n, n_groups=2)
    step_split, act_split, _ = (f"{what} alone, {how}" for what, how in _named_parts(B))
    step, act, loop = f"stepping alone, {n} threads", f"forward passes alone, {n} threads", f"bare loop, {n} threads"
    contenders = [
        on_both_cores("SerialSampler", _sampling(serial.Config(batch_T=T, batch_B=B), on_threads, NATURE), n),
        on_both_cores("CpuSampler", _sampling(configs(B, T)["CpuSampler"], split, NATURE)),
        on_both_cores("GpuSampler", _sampling(configs(B, T)["GpuSampler"], split, NATURE), n),
        on_both_cores("GpuSampler, 2 groups", _sampling(in_two, split, NATURE), n),
        on_both_cores(step, partial(bare.pong_stepping, B, n, T)),
        on_both_cores(act, partial(bare.forward, policy, B, T), n),
        on_both_cores(loop, partial(bare.pong_loop, policy, B, n, T), n),
        in_both(step_split, partial(bare.pong_stepping, part, 1, T)),
        in_both(act_split, partial(bare.forward, policy, part, T)),
    ]
    limits: Limits = {"SerialSampler": (step, act), "CpuSampler": (step_split, act_split)}
    limits |= dict.fromkeys(("GpuSampler", "GpuSampler, 2 groups"), (step_split, act))
    in_turn = Comparison("SerialSampler over the bare loop", ("SerialSampler",), ((loop,),))
    return Group(contenders, [*over_limits(limits, 0.0), in_turn, fastest(limits, 0.9)], (ALE,))


def subprocesses(T: int) -> Group:
    """Fast environments, for which worker processes cost most."""
    B = 16
    policy = Policy(partial(bare.Vectors, 4, 64, 2), act_discrete, 2)
    mine: dict[str, Make] = {
        f"{name}, {backend}": _sampling(config, EnvConfig("CartPole-v1", backend=backend))
        for backend in ("python", "native")
        for name, config in configs(B, T).items()
    }
    theirs: dict[str, Make] = {
        "AsyncVectorEnv": partial(others.async_vector_env, policy, B, T),
        "SubprocVecEnv": partial(others.subproc_vec_env, policy, B, T),
    }
    comparisons = [Comparison(f"{name} over {other}", (name,), ((other,),), 5.0) for other in theirs for name in mine]
    contenders = [on_both_cores(name, make) for name, make in {**mine, **theirs}.items()]
    return Group(contenders, comparisons, (SB3,))


def alternating(T: int) -> Group:
    """The gain of a second group if acting can overlap stepping."""
    named = {
        f"GpuSampler, {n} group{'s' if n > 1 else ''}": gpu.Config(batch_T=T, batch_B=8, n_workers=2, n_groups=n)
        for n in (1, 2)
    }
    one, two = named
    contenders = [on_both_cores(name, partial(ours.alternating, config)) for name, config in named.items()]
    return Group(contenders, [Comparison("2 groups over 1", (two,), ((one,),), 1.3)])


def groups(T: int, n_cheetahs: int) -> dict[str, Group]:
    """The groups that are measured in turns, by name, in batches of `T` time steps."""
    return {
        "cartpole8": beside_sb3(8, "python", T, 1.5),
        "cartpole64": beside_sb3(64, "python", T, 1.2),
        "native64": beside_sb3(64, "native", T, 3.0),
        "synthetic": synthetic(T),
        "cheetah": cheetah(n_cheetahs, T),
        "pong": pong(T),
        "subprocess": subprocesses(T),
        "alternating": alternating(T),
    }


def check(chosen: list[str], known: dict[str, Group]) -> None:
    """Raises:
    SystemExit: a group is unknown, or its packages are missing.
    """
    if unknown := set(chosen) - {*known, WORKER}:
        raise SystemExit(f"only={','.join(sorted(unknown))}: not one of {', '.join([*known, WORKER])}")
    for name in chosen:
        for package in known[name].needs if name in known else ():
            if importlib.util.find_spec(package) is None:
                raise SystemExit(f"{name} needs pip install {INSTALL[package]}; only=... chooses other groups")


def main(
    rounds: int = 5, seconds: float = 2.0, only: str = "", small: bool = False, out: str = "", n_cheetahs: int = 16
) -> None:
    """Measure and print.

    Args:
        rounds: turns of each contender.    seconds: length of a turn.    only: groups, separated by commas.
        small: one very short round.    out: JSON file for all results."""
    limit_threads()
    if n_cheetahs % N_WORKERS:
        raise SystemExit(f"n_cheetahs={n_cheetahs} must divide among {N_WORKERS} workers")
    known = groups(8 if small else BATCH_T, n_cheetahs)
    chosen = [name for name in only.split(",") if name] or [*known, WORKER]
    check(chosen, known)
    agree()
    rounds, seconds = (1, 0.01) if small else (rounds, seconds)
    facts = partial(worker.facts, WORKER, rounds) if WORKER in chosen else list
    run_groups({name: known[name] for name in chosen if name != WORKER}, rounds, seconds, out, facts)


if __name__ == "__main__":
    chz.entrypoint(main)
