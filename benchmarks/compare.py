"""How fast rlframe trains compared with other frameworks that do the same on the same cores.

    python -m benchmarks.compare
    python -m benchmarks.compare rows=ppo_cartpole,sac_cheetah frameworks=rlframe,sb3 rounds=5 seconds=4
    python -m benchmarks.compare out=compare.json chart=compare.png
    python -m benchmarks.compare ours="precision=fp32"     with other keys on rlframe's command line

The rows, all with one set of hyperparameters (benchmarks/parts/rows.py) for all frameworks, in env steps a second:

  ppo_cartpole                  PPO, CartPole-v1, 4 environments x 128, CleanRL's hyperparameters; one thread
  ppo_pong                      PPO, ALE/Pong-v5, 8 environments x 128, the same for Atari; two threads
  sac_cheetah, sac_cheetah_2    SAC, HalfCheetah-v5, 256x256, batches of 256, an update a step; one thread, and two
  td3_cheetah, td3_cheetah_2    TD3, the same
  dqn_cartpole                  DQN, CartPole-v1, 120-84, batches of 128 every 10 steps; one thread
  dqn_pong, dqn_pong_2          DQN, ALE/Pong-v5, batches of 32 every 4 steps; one thread, and two
  solve_cartpole                seconds from the start of a process to 475 over 100 episodes of evaluation, PPO with
                                tuned settings, two cores, for `seeds` seeds: rlframe and Stable-Baselines3 in turns
                                (benchmarks/parts/solve.py)

The frameworks are rlframe, sb3 (Stable-Baselines3), tianshou, torchrl and sbx; one that is not installed is left out,
and so is a row whose environment is not installed; the output names both, with the command that installs them.

Method. Each framework trains in a separate process, pinned to as many cores as the row has threads, with as many torch
threads (JAX: as many cores), in its own training loop as its users run it. rlframe runs as `launch` does, with
MinibatchRl and its defaults for what depends on the machine (sampler and environment backend; shown in the table), and
logs every 10,000 env steps, without snapshots. Stable-Baselines3 and SBX run `learn`; Tianshou and TorchRL run their
collectors, replay and updates in the loop that their users write. They have no loggers, and Python environments in one
process. Once all are built, compiled and past the first updates they take turns, A B C A B C, of `seconds`, to the end
of the current iteration, for `rounds` rounds; the others sleep meanwhile. A rate is the median over the rounds. A
ratio is rlframe's rate over theirs, the median of the ratios within each round, so that a drifting speed of the
machine affects all alike. A ratio marked * compares different work; the notes say why. Exploration of DQN stays at its
last value, and learning begins after 1,000 steps.

The limit of ppo_pong is the rate of rlframe's parts alone: the bare vector environment's steps, the agent's steps for
fixed observations, and the updates of a fixed batch, by the same objects and kernels, each measured in a separate
process with the same cores and threads, in the same turns; their times for a step are added.

Run it on an idle machine.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import chz

from benchmarks.parts import bare, gate, solve
from benchmarks.parts.chart import draw
from benchmarks.parts.chosen import chosen
from benchmarks.parts.frameworks import OURS, Framework, all_frameworks
from benchmarks.parts.machine import PACKAGES, machine
from benchmarks.parts.rows import NEEDS, PPO, ROWS, Row
from benchmarks.parts.turns import Comparison, Contender, Line, Remote, line, measured, show

SOLVE = "solve_cartpole"
LIMIT = ("limit: environment", "limit: acting", "limit: learning")
Frameworks = Mapping[str, Framework]


@dataclass
class Found:
    """All results."""

    rates: list[Line] = field(default_factory=list)  # env steps a second
    ratios: list[Line] = field(default_factory=list)
    facts: list[Line] = field(default_factory=list)  # seconds
    notes: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Add other results."""
        self.rates += other.rates
        self.ratios += other.ratios
        self.facts += other.facts
        self.notes += other.notes


def train(name: str, row: Row, known: Frameworks, n_rounds: int, seconds: float, found: Found) -> None:
    """Measure one row in turns."""
    found.notes += [f"{name}, {known[key].title}: * {why}" for key, why in row.differs.items() if key in known]
    with ExitStack() as stack:
        remotes: dict[str, Remote] = {}
        for key, framework in known.items():
            try:
                remotes[key] = stack.enter_context(closing(Remote(framework.contender(row), gate.serve)))
            except (SystemExit, TimeoutError) as failure:
                found.notes.append(f"{name}: left out, as it failed: {failure}")
        if row.of_limit and OURS in remotes:
            parts = limit(row, known[OURS])
            remotes |= {part.name: stack.enter_context(closing(Remote(part))) for part in parts}
        rounds = [{key: measured(remote, seconds) for key, remote in remotes.items()} for _ in range(n_rounds)]
        for key, remote in remotes.items():
            rates = [each[key] for each in rounds]
            found.rates.append(line(name, remote.name + _mark(row, key), rates, remote.where()))
    for each in comparisons(row, list(remotes), known):
        found.ratios.append(line(name, each.name, each.ratios(rounds), asked=each.asked))


def limit(row: Row, framework: Framework) -> list[Contender]:
    """Measure rlframe's parts, each alone."""
    from benchmarks.parts import train_rlframe as ours

    work, n, (words,) = row.work, row.n_threads, framework.arguments
    assert isinstance(work, PPO)
    makes = (
        partial(bare.pong_stepping, work.n_envs, n, work.T),
        partial(ours.acting, row, words),
        partial(ours.learning, row, words),
    )
    variables = framework.contender(row).variables
    return [Contender(name, make, n, n, variables=variables) for name, make in zip(LIMIT, makes, strict=True)]


def comparisons(row: Row, names: Sequence[str], known: Frameworks) -> list[Comparison]:
    """Rates of rlframe over those of each other framework, and over its limit."""
    others = [key for key in names if key in known and key != OURS]
    if OURS not in names:
        return []
    found = [
        Comparison(f"over {known[key].title}{_mark(row, key)}", (OURS,), ((key,),), row.asked.get(key, 0.0))
        for key in others
    ]
    return [*found, Comparison("over its limit", (OURS,), (LIMIT,), row.of_limit)] if row.of_limit else found


def _mark(row: Row, key: str) -> str:
    return " *" if key in row.differs else ""


def solve_cartpole(known: Frameworks, n_seeds: int, words: Mapping[str, str], found: Found) -> None:
    """Race the frameworks to a solved CartPole."""
    keys = [key for key in solve.KEYS if key in known]
    times = solve.race(keys, n_seeds, words)
    for key in keys:
        asked = solve.ASKED_S if key == OURS else 0.0
        found.facts.append(line(SOLVE, f"{known[key].title}: seconds to 475", times[key], "s", asked))
    if len(keys) == 2:
        ratios = [theirs / ours for ours, theirs in zip(*(times[key] for key in solve.KEYS), strict=True)]
        found.ratios.append(line(SOLVE, "seconds of Stable-Baselines3 over ours", ratios, asked=solve.ASKED_RATIO))


def available(names: Sequence[str], known: Frameworks) -> tuple[list[str], Frameworks, list[str]]:
    """The rows and frameworks that are installed here, and notes on the others."""
    absent = [each for each in known.values() if not each.installed()]
    notes = [f"{each.title} is not installed and left out: {each.install}" for each in absent]
    rows = []
    for name in names:
        needs = NEEDS.get(ROWS[name].env, {}) if name in ROWS else {}
        if lacking := [install for package, install in needs.items() if importlib.util.find_spec(package) is None]:
            notes.append(f"{name} is left out: pip install {' '.join(lacking)}")
        else:
            rows.append(name)
    return rows, {key: each for key, each in known.items() if each not in absent}, notes


def words_of(ours: str) -> dict[str, str]:
    """Split the words of rlframe's command line.

    Raises:
        SystemExit: one is not key=value.
    """
    pairs = [word.partition("=") for word in ours.split()]
    if wrong := [key for key, equals, _ in pairs if not equals]:
        raise SystemExit(f"ours={ours!r}: {wrong[0]!r} is not key=value for rlframe.launch")
    return {key: value for key, _, value in pairs}


def check(rounds: int, seconds: float, seeds: int, chart: str) -> None:
    """Raises:
    SystemExit: a number is too small, or matplotlib is missing.
    """
    if rounds < 1 or seeds < 1 or not seconds > 0:
        raise SystemExit(f"rounds={rounds} and seeds={seeds} must be at least 1, seconds={seconds} above 0")
    if chart and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit('chart= needs pip install "rlframe[plot]"')


def main(
    rows: str = "",
    frameworks: str = "",
    rounds: int = 5,
    seconds: float = 4.0,
    seeds: int = 10,
    ours: str = "",
    out: str = "",
    chart: str = "",
) -> None:
    """Measure and print.

    Args:
        rows, frameworks: names, separated by commas; default: all.
        rounds: turns of each framework.    seconds: length of a turn, at least.    seeds: of solve_cartpole.
        ours: key=value words for rlframe's command line, separated by spaces, which override the row's.
        out: JSON file for all results.    chart: PNG, SVG or PDF file for the bars.
    """
    check(rounds, seconds, seeds, chart)
    words = words_of(ours)
    known = all_frameworks(words)
    keys = chosen(frameworks, known, "frameworks")
    names, known, notes = available(chosen(rows, [*ROWS, SOLVE], "rows"), {key: known[key] for key in keys})
    about = machine(
        tuple(dict.fromkeys([*PACKAGES, *(name for each in known.values() for name in each.distributions)]))
    )
    print(", ".join(f"{name} {fact}" for name, fact in about.items()))
    print(f"{rounds} rounds, {seconds} s a turn", flush=True)
    found = Found(notes=notes)
    for note in notes:
        print(note)
    for name in names:
        print(f"\nmeasuring {name}", flush=True)
        of_row = Found()
        if name == SOLVE:
            solve_cartpole(known, seeds, words, of_row)
        else:
            train(name, ROWS[name], known, rounds, seconds, of_row)
        show(of_row.rates, of_row.ratios, of_row.facts)
        for note in of_row.notes:
            print(note)
        found.add(of_row)
    if out:
        content = {"machine": about, "seconds": seconds, "ours": ours, **asdict(found)}
        Path(out).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if chart and found.rates:
        draw(found.rates, chart)


if __name__ == "__main__":
    chz.entrypoint(main)
