"""How many gradient updates a second replay algorithms make, beside Stable-Baselines3, d3rlpy, and one another.

    python -m benchmarks.updates
    python -m benchmarks.updates rounds=15 only=sac,td3 out=updates.json
    python -m benchmarks.updates small=true     a smoke test; its numbers mean nothing

What is compared (ratios above 1 mean that rlframe is faster), each side with one torch thread on one core; the other
side makes several updates in a call, which is fastest for it:

  sac    17 observations and 6 actions, as HalfCheetah has them; two critics and an actor of 256x256, batches of 256
  td3    the same; an update of the actor and the targets for each two of the critics
  dqn_cartpole  4 observations, 2 actions, 256x256, batches of 128
  dqn_atari     stacks of four 84x84 frames, 6 actions, the Nature CNN, batches of 32
  td3_bc, iql   of data, beside d3rlpy: the sizes of `sac`, each side's own defaults for the rest (target: 2)
  cql           the same with three layers of 256, and 10 actions of each kind for the gap; a fixed weight of 5 on both
  crossq        mujoco/crossq_halfcheetah with the widths of `sac`, over rlframe's own SAC (target: 0.7)
  xqc           mujoco/xqc_halfcheetah with three layers of 256 in all networks, the same (target: 0.35)

rlframe's updates are compiled, and multiply in the precision that launch chooses (precision=auto).

An update begins with a batch drawn from replay, which holds 100,000 random rows (dqn_atari: 10,000), and ends with the
targets moved; no environment is stepped. "steps" in the table are updates.

Method. Each side runs in a separate process, pinned to the same core, built and warmed up before anything is timed.
Then they take turns, one at a time for `seconds` each while the other sleeps, for `rounds` rounds, with OpenMP and
malloc set as launch sets them for all. A rate is the median over the rounds; a ratio is the median of the ratios
within each round, so that a drifting speed of the machine affects both alike. Run it on an idle machine.

Stable-Baselines3 and d3rlpy are not dependencies of rlframe: pip install stable-baselines3 d3rlpy. d3rlpy 2.8.1 pins
an old Gymnasium; it runs beside a newer one if it is installed with --no-deps.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial

import chz

from benchmarks.parts import updates_others, updates_ours
from benchmarks.parts.chosen import chosen
from benchmarks.parts.turns import Comparison, Contender, Group, run_groups
from benchmarks.parts.updates_ours import Case
from rlframe.system.machine import limit_threads

OTHERS = {
    "stable_baselines3": ("Stable-Baselines3", updates_others.stable_baselines3),
    "d3rlpy": ("d3rlpy", updates_others.d3rlpy),
}


def cases(small: bool) -> dict[str, Case]:
    """The cases by name."""
    rows, frames = (1_000, 200) if small else (100_000, 10_000)
    return {
        "sac": Case("sac", (17,), 6, (256, 256), 256, rows),
        "td3": Case("td3", (17,), 6, (256, 256), 256, rows),
        "dqn_cartpole": Case("dqn", (4,), 2, (256, 256), 128, rows),
        "dqn_atari": Case("dqn", (4, 84, 84), 6, (), 32, frames),
    }


def cases_of_data(small: bool) -> dict[str, Case]:
    """Those that learn from data."""
    rows = 1_000 if small else 100_000
    sizes = {"td3_bc": (256, 256), "iql": (256, 256), "cql": (256, 256, 256)}
    return {name: Case(name, (17,), 6, hidden, 256, rows) for name, hidden in sizes.items()}


def beside(package: str, name: str, case: Case, asked: float) -> Group:
    """Both sides of one case."""
    title, updates = OTHERS[package]
    mine, theirs = f"rlframe, {name}", f"{title}, {name}"
    contenders = [Contender(mine, partial(updates_ours.updates, case)), Contender(theirs, partial(updates, case))]
    return Group(contenders, [Comparison(f"over {title}", (mine,), ((theirs,),), asked)], (package,))


def beside_sac(name: str, case: Case, sac: Case, asked: float) -> Group:
    """A variant of SAC beside SAC."""
    mine, plain = f"rlframe, {name}", "rlframe, sac"
    contenders = [
        Contender(mine, partial(updates_ours.updates, case)),
        Contender(plain, partial(updates_ours.updates, sac)),
    ]
    return Group(contenders, [Comparison("over SAC", (mine,), ((plain,),), asked)])


def groups(small: bool) -> dict[str, Group]:
    """All groups by name."""
    of_all = cases(small)
    found = {name: beside("stable_baselines3", name, case, 1.3) for name, case in of_all.items()}
    found |= {name: beside("d3rlpy", name, case, 2.0) for name, case in cases_of_data(small).items()}
    crossq = replace(of_all["sac"], preset="mujoco/crossq_halfcheetah")
    xqc = replace(of_all["sac"], preset="mujoco/xqc_halfcheetah", hidden=(256, 256, 256))
    found["crossq"] = beside_sac("crossq", crossq, of_all["sac"], 0.7)
    found["xqc"] = beside_sac("xqc", xqc, of_all["sac"], 0.35)
    return found


def main(rounds: int = 9, seconds: float = 2.0, only: str = "", small: bool = False, out: str = "") -> None:
    """Measure and print.

    Args:
        rounds: turns of each side.    seconds: length of a turn.    only: groups, separated by commas.
        small: one very short round.    out: JSON file for all results.
    """
    limit_threads()
    known = groups(small)
    asked = {name: known[name] for name in chosen(only, known)}
    for package, (title, _) in OTHERS.items():
        needed = [name for name, group in asked.items() if package in group.needs]
        if needed and importlib.util.find_spec(package) is None:
            raise SystemExit(f"{title} is not installed, which {', '.join(needed)} need; choose others by only=")
    rounds, seconds = (1, 0.01) if small else (rounds, seconds)
    run_groups(asked, rounds, seconds, out)


if __name__ == "__main__":
    chz.entrypoint(main)
