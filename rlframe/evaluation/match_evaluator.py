"""MatchEvaluator: evaluates an agent by games against fixed players, `eval.opponents`."""

from __future__ import annotations

import numpy as np
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError
from rlframe.core.multi_agent import JointSpace
from rlframe.core.seeding import Role, seed_int
from rlframe.envs import EnvConfig
from rlframe.evaluation.evaluator import BaseEvaluator, EvalConfig, EvaluationStopped, Stop, never
from rlframe.evaluation.matches import FunctionPlayer, PolicyPlayer, Table
from rlframe.evaluation.report import RETURN_MEAN


class MatchEvaluator(BaseEvaluator):
    """Plays n_episodes games against each player, in which the seats alternate.

    Logs eval/win_rate_<player>, the share of games that were won, and eval/return_mean over all games.
    """

    config: EvalConfig

    def __init__(
        self, env: EnvConfig, agent: Agent, spaces: tuple[Space, Space], config: EvalConfig, seed: int = 0
    ) -> None:
        """Raises:
        ConfigError: an opponent does not exist or has the name of another, or the environment has a single agent.
        """
        self.env, self.config, self.interval_steps, self._seed = env, config, config.interval_steps, seed
        self._opponents = [FunctionPlayer(name, "eval.opponents") for name in config.opponents]
        if not isinstance(spaces[0], JointSpace):
            raise ConfigError(f"eval.opponents needs an environment of several agents, and env={env.id} has one")
        self._player = PolicyPlayer("the agent", agent, spaces, env.policies, config.explore)
        self._names = [name.rpartition(":")[2] for name in config.opponents]  # of module:function, the function's
        if len({*self._names}) < len(self._names):
            raise ConfigError(f"eval.opponents=[{','.join(config.opponents)}] has two of one name")
        self._agent, self._table = agent, Table(env, config.max_length, self._follow)
        self._player.check(self._table.observation_space, self._table.action_space)
        self._heartbeat, self._stop = np.zeros(1, np.int64), never

    def evaluate(self, number: int, stop: Stop = never) -> dict[str, float]:
        self._stop = stop
        found, returns, n = dict[str, float](), 0.0, self.config.n_episodes
        with self._agent.exploring_at(self.config.epsilon):
            for name, opponent in zip(self._names, self._opponents, strict=True):
                pair = self._table.play(self._player, opponent, n, seed_int(self._seed, Role.MATCH, number))
                found[f"eval/win_rate_{name}"] = pair.won / n
                returns += pair.returns[0]
        n_games = n * len(self._opponents)
        return {RETURN_MEAN: returns / n_games, **found, "eval/n_episodes": n_games}

    def _follow(self) -> None:
        self._heartbeat[0] += 1
        if self._stop():
            raise EvaluationStopped

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self._heartbeat = heartbeat

    def close(self) -> None:
        self._table.close()
