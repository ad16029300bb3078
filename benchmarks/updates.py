"""How many gradient updates a second the replay algorithms make, compared with Stable-Baselines3, and with one another.

    python -m benchmarks.updates
    python -m benchmarks.updates rounds=15 only=sac,td3 out=updates.json
    python -m benchmarks.updates small=true     a smoke test; its numbers mean nothing

What is compared (ratios above 1 mean that rlframe is faster), each side with one torch thread on one core; the other
side makes several updates in a call, which is fastest for it:

  sac    17 observations and 6 actions, as HalfCheetah has them; two critics and an actor of 256x256, batches of 256
  td3    the same; an update of the actor and the targets for each two of the critics
  dqn_cartpole  4 observations, 2 actions, 256x256, batches of 128
  dqn_atari     stacks of four 84x84 frames, 6 actions, the Nature CNN, batches of 32
  crossq        mujoco/crossq_halfcheetah with the widths of `sac`, over rlframe's own SAC (target: 0.7)
  xqc           mujoco/xqc_halfcheetah with three layers of 256 in all networks, the same (target: 0.35)

rlframe's updates are compiled, and multiply in the precision that launch chooses (precision=auto).

An update begins with a batch drawn from replay, which holds 100,000 random rows (dqn_atari: 10,000), and ends with the
targets moved; no environment is stepped. "steps" in the table are updates.

Method. Each side runs in a separate process, pinned to the same core, built and warmed up before anything is timed.
Then they take turns, one at a time for `seconds` each while the other sleeps, for `rounds` rounds, with OpenMP and
malloc set as launch sets them for all. A rate is the median over the rounds; a ratio is the median of the ratios
within each round, so that a drifting speed of the machine affects both alike. Run it on an idle machine.

Stable-Baselines3 is not a dependency of rlframe: pip install stable-baselines3.
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

SB3 = "stable_baselines3"


def cases(small: bool) -> dict[str, Case]:
    """The cases by name."""
    rows, frames = (1_000, 200) if small else (100_000, 10_000)
    return {
        "sac": Case("sac", (17,), 6, (256, 256), 256, rows),
        "td3": Case("td3", (17,), 6, (256, 256), 256, rows),
        "dqn_cartpole": Case("dqn", (4,), 2, (256, 256), 128, rows),
        "dqn_atari": Case("dqn", (4, 84, 84), 6, (), 32, frames),
    }


def beside_sb3(name: str, case: Case) -> Group:
    """Both sides of one case."""
    mine, theirs = f"rlframe, {name}", f"Stable-Baselines3, {name}"
    contenders = [
        Contender(mine, partial(updates_ours.updates, case)),
        Contender(theirs, partial(updates_others.stable_baselines3, case)),
    ]
    return Group(contenders, [Comparison("over Stable-Baselines3", (mine,), ((theirs,),), 1.3)], (SB3,))


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
    found = {name: beside_sb3(name, case) for name, case in of_all.items()}
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
    if any(SB3 in group.needs for group in asked.values()) and importlib.util.find_spec(SB3) is None:
        raise SystemExit("benchmarks.updates needs pip install stable-baselines3, but for only=crossq,xqc")
    rounds, seconds = (1, 0.01) if small else (rounds, seconds)
    run_groups(asked, rounds, seconds, out)


if __name__ == "__main__":
    chz.entrypoint(main)
