"""How fast environments of many agents are sampled, beside one agent that does the same arithmetic, and beside others.

    python -m benchmarks.multi_agent
    python -m benchmarks.multi_agent rounds=9 only=columns,learning out=multi_agent.json

What is compared (ratios above 1 mean that rlframe is faster), in rows of agents a second:

  columns    an environment of 16 agents, one policy of 64x64, SerialSampler: against 16 environments of a single agent
             whose steps do the same arithmetic, in the same sampler
  learning   PPO on mpe2's simple_spread, 3 agents, 8 environments x 128 steps, 64x64, 4 epochs of 4 minibatches:
             against Stable-Baselines3's PPO over SuperSuit's vector environment, which does the same
  rllib      the same PPO against RLlib's, with one environment runner in the algorithm's process

Method. As benchmarks.sampling: contenders run in separate processes, pinned to one core, with one torch thread, built
and warmed up before anything is timed, and take turns. Stable-Baselines3, SuperSuit and RLlib are no dependencies of
rlframe: pip install stable-baselines3 supersuit "ray[rllib]". Run it on an idle machine.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import chz

from benchmarks.parts import many
from benchmarks.parts.turns import Comparison, Contender, Group, run_groups
from rlframe.system.machine import limit_threads

N_AGENTS = 16


def columns() -> Group:
    """One environment of 16 agents, and 16 of one."""
    several, single = f"{N_AGENTS} agents of one environment", f"{N_AGENTS} environments of one agent"
    contenders = [
        Contender(several, partial(many.team_sampling, N_AGENTS)),
        Contender(single, partial(many.single_sampling, N_AGENTS)),
    ]
    return Group(contenders, [Comparison("over single agents", (several,), ((single,),), 0.9)])


def learning() -> Group:
    """PPO of simple_spread beside Stable-Baselines3."""
    mine, theirs = "rlframe, simple_spread", "Stable-Baselines3 and SuperSuit, simple_spread"
    contenders = [Contender(mine, many.spread), Contender(theirs, many.spread_sb3)]
    needs = ("stable_baselines3", "supersuit", "mpe2")
    return Group(contenders, [Comparison("over Stable-Baselines3", (mine,), ((theirs,),), 2.0)], needs)


def rllib() -> Group:
    """PPO of simple_spread beside RLlib."""
    mine, theirs = "rlframe, simple_spread", "RLlib, simple_spread"
    contenders = [Contender(mine, many.spread), Contender(theirs, many.spread_rllib)]
    return Group(contenders, [Comparison("over RLlib", (mine,), ((theirs,),), 5.0)], ("ray.rllib", "mpe2"))


GROUPS = {"columns": columns, "learning": learning, "rllib": rllib}


def main(rounds: int = 5, seconds: float = 3.0, only: str = "", out: str = "") -> None:
    """Measure and print.

    Args:
        rounds: turns of each contender.    seconds: length of a turn.    only: groups, separated by commas.
        out: JSON file for all results."""
    limit_threads()
    chosen = [name for name in only.split(",") if name] or list(GROUPS)
    if unknown := set(chosen) - set(GROUPS):
        raise SystemExit(f"only={','.join(sorted(unknown))}: not one of {', '.join(GROUPS)}")
    groups = {name: GROUPS[name]() for name in chosen}
    for name, group in groups.items():
        for package in group.needs:
            if importlib.util.find_spec(package.partition(".")[0]) is None:
                raise SystemExit(f"{name} needs {package}, see above; only=... chooses other groups")
    run_groups(groups, rounds, seconds, out)


if __name__ == "__main__":
    chz.entrypoint(main)
