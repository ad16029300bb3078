"""What brings a Python environment back into the middle of an episode: its state, or its start and actions."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np

from rlframe.core.seeding import EpisodeSeeds, seed_of_round
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.envs import object_codec
from rlframe.envs.object_codec import Opaque
from rlframe.envs.simulator_state import KNOWN, game_of, is_sticky, settle


class Keeper:
    """Resets the environments of a batch, and keeps what each can be restored from.

    Where an environment's state can be read, that is it; its generator is moved on from episode to episode. Else its
    episode is played again: from a seed of its own, or where seeding is dear, as in ALE, which then loads its game
    anew, from the state that was read before the reset.
    """

    def __init__(self, envs: Sequence[gymnasium.Env], seeds: Sequence[int]) -> None:
        self._envs, self._given = envs, list(seeds)
        self._inner = [env.unwrapped for env in envs]
        self._games = [game_of(env) for env in envs]  # ALE's, None for others
        self._hidden = [game is not None and is_sticky(game) for game in self._games]  # see `settle`
        self._seeds = [EpisodeSeeds(seed) for seed in seeds]
        self.episodes = [-1] * len(envs)
        self._starts: list[Any] = [()] * len(envs)  # states before the reset; () where a seed says it all
        self._undecided = True
        self.trail: Trail | None = Trail(len(envs))  # None: all states can be read

    def seed(self, index: int) -> int:
        """That of the running episode, or of the environment if its episodes have none."""
        return self._seeds[index][max(0, self.episodes[index])] if self._seeds_each(index) else self._seeds[index].own

    def _seeds_each(self, index: int) -> bool:
        return self.trail is not None and self._games[index] is None

    def begin_round(self, number: int) -> None:
        """The next resets begin the episodes of another round (see `seed_of_round`)."""
        self._seeds = [EpisodeSeeds(seed_of_round(seed, number)) for seed in self._given]
        self.episodes = [-1] * len(self._envs)

    def reset(self, index: int) -> Any:
        """Begin the next episode of an environment; its observation."""
        self.episodes[index] += 1
        env, episode = self._envs[index], self.episodes[index]
        self._starts[index] = ()
        if episode == 0 or self._seeds_each(index):
            observation, _ = env.reset(seed=self._seeds[index][episode])
        else:
            self._move_on(index)
            observation, _ = env.reset()
        if self.trail is not None:
            self.trail.restart(index)
        return observation

    def _move_on(self, index: int) -> None:
        """Get an environment ready to begin its next episode without a seed."""
        if self._games[index] is not None:
            settle(self._games[index])
            if self.trail is not None:
                self._starts[index] = take(self._envs[index])
            return
        rng = vars(self._inner[index]).get("_np_random")  # Gymnasium's, which is made when it is first needed
        if type(rng) is np.random.Generator and type(rng.bit_generator) is np.random.PCG64:
            self._seeds[index].move(rng, self.episodes[index])

    def add(self, action: Tree) -> None:
        """Remember actions that are about to be carried out; while there is a trail.

        Whether there must be one shows after the first step: an environment may make its simulator only then.
        """
        assert self.trail is not None
        if self._undecided and leaves(self.trail.actions(0)):
            self._undecided = False
            if not self._why_hidden():
                self.trail = None
                return
        self.trail.add(action)

    def _why_hidden(self) -> str:
        """What cannot be read of the first environment; empty if all can. The others are alike."""
        try:
            self._take(0)
        except Opaque as problem:
            return str(problem)
        return ""

    def _take(self, index: int) -> list[Any]:
        if self._hidden[index]:
            raise Opaque("it repeats actions by chance, and which one only ALE knows")
        return take(self._envs[index])

    def state(self, index: int) -> dict[str, Any]:
        """Environment `index` as it is now, to be restored."""
        facts = {"seed": self._seeds[index].own, "episode": self.episodes[index]}
        if self.episodes[index] < 0:
            return {**facts, "anew": "it had not begun"}
        why = ""
        if self.trail is None or not self._undecided:
            try:
                return {**facts, "state": self._take(index)}
            except Opaque as problem:
                why = str(problem)
        actions = None if self.trail is None else self.trail.actions(index)
        if actions is None:
            self.trail = self.trail or Trail(len(self._envs))  # for the episodes to come
            return {**facts, "anew": f"{why}, and the episode's actions were not kept"}
        return {**facts, "start": self._starts[index], "actions": actions}

    def follow(self, states: Sequence[Any]) -> None:
        """Decide about the trail as was decided where these states come from; before they are restored."""
        if all(isinstance(saved, dict) and "state" in saved for saved in states):
            self.trail, self._undecided = None, False

    def restore(
        self, index: int, saved: dict[str, Any], play: Callable[[gymnasium.Env, Tree], None], over: bool
    ) -> str:
        """Bring environment `index`, which is fresh, to where it was; why not, or nothing if it is there.

        Args:
            play: steps it through actions [k, ...]; raises Opaque if it does not get where it was.
            over: its episode had ended.
        """
        self._seeds[index], self.episodes[index] = EpisodeSeeds(saved["seed"]), saved["episode"]
        if "anew" in saved:
            return saved["anew"]
        env = self._envs[index]
        try:
            if "state" in saved:
                put(env, saved["state"])
            elif saved["start"] == ():
                if not over:  # else all that comes is in the next episode's seed
                    env.reset(seed=self.seed(index))
                    play(env, saved["actions"])
            else:
                put(env, saved["start"])
                env.reset()
                play(env, saved["actions"])
        except Exception as problem:  # foreign code runs here, and whatever it does, the episode can begin anew
            return str(problem) if isinstance(problem, Opaque) else f"{type(problem).__name__}: {problem}"
        self._go_on(index, saved)
        return ""

    def _go_on(self, index: int, saved: dict[str, Any]) -> None:
        if self.trail is not None and "actions" in saved:
            self._starts[index] = saved["start"]
            self.trail.restart(index, saved["actions"])


def take(env: Any) -> list[Any]:
    """The state of an environment and of the wrappers around it, as plain data.

    Raises:
        Opaque: something in it cannot be read; says what.
    """
    layers = _layers(env)
    return object_codec.take([_told(layer) if _tells(layer) else layer for layer in layers], layers, KNOWN)


def put(env: Any, saved: list[Any]) -> None:
    """Bring a fresh environment into a state that `take` has read.

    Raises:
        Opaque: it does not fit; the environment must be reset.
    """
    layers = _layers(env)
    holders = [SimpleNamespace() if _tells(layer) else layer for layer in layers]
    object_codec.put(holders, layers, saved, KNOWN)
    for layer, holder in zip(layers, holders, strict=True):
        if isinstance(holder, SimpleNamespace):
            layer.set_state(holder.state)
            if holder.np_random is not None:
                layer.np_random = holder.np_random


def _layers(env: Any) -> list[Any]:
    """Wrappers from the outside in, and what they wrap."""
    found = [env]
    while isinstance(found[-1], gymnasium.Wrapper | gymnasium.vector.VectorWrapper):
        found.append(found[-1].env)
    return found


def _tells(layer: Any) -> bool:
    """Whether it has get_state() and set_state(state) of its own (see docs/extend.md)."""
    of_type = type(layer)
    methods = [inspect.getattr_static(of_type, name, None) for name in ("get_state", "set_state")]
    if not all(inspect.isfunction(method) for method in methods):
        return False
    return [len(inspect.signature(method).parameters) for method in methods] == [1, 2]


def _told(layer: Any) -> SimpleNamespace:
    return SimpleNamespace(state=layer.get_state(), np_random=vars(layer).get("_np_random"))


def same(one: Tree, other: Tree) -> bool:
    """Whether two trees of arrays are equal, bit by bit."""
    return all(np.array_equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


def row(rows: Tree, index: int) -> Tree:
    """Row `index` of a tree of arrays."""
    return map_tree(lambda x: x[index], rows)


_MOST = 100_000  # steps: longer episodes cannot be played again, for want of memory and patience


class Trail:
    """Of n environments that step together. Steps that no running episode needs are forgotten."""

    def __init__(self, n: int) -> None:
        self._steps: deque[Tree] = deque(maxlen=_MOST)  # [n, ...] each
        self._n_seen = 0  # steps so far
        self._starts = np.full(n, -1, np.int64)  # the step of each episode's first action; -1: before all that was seen
        self._before: list[Tree] = [()] * n  # actions [k, ...] of the episode before that step; () for none

    def add(self, action: Tree) -> None:
        """Keep a copy of the actions [n, ...] of one step."""
        self._steps.append(map_tree(np.copy, action))
        self._n_seen += 1

    def restart(self, index: int, before: Tree = ()) -> None:
        """The episode of environment `index` begins with the next step; or it goes on, after actions `before`."""
        self._starts[index], self._before[index] = self._n_seen, before
        oldest = int(self._starts.min())
        while self._steps and self._n_seen - len(self._steps) < oldest:
            self._steps.popleft()

    def actions(self, index: int) -> Tree | None:
        """Those of the running episode [k, ...]; None where its start was not seen or is too long ago."""
        start = int(self._starts[index])
        n = self._n_seen - start
        if start < 0 or n > len(self._steps):
            return None
        own = [map_tree(lambda x: x[index], action) for action in list(self._steps)[len(self._steps) - n :]]
        before = self._before[index]
        if not own:
            return before
        stacked = map_tree(lambda *each: np.stack(each), *own)
        return stacked if not leaves(before) else map_tree(lambda *each: np.concatenate(each), before, stacked)
