"""Where an agent is evaluated: in this process, or on a copy of its parameters in one of its own, while it learns."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError
from rlframe.core.ranks import current_ranks
from rlframe.envs import EnvConfig, make_envs
from rlframe.evaluation.evaluator import BaseEvaluator, EvalConfig, Evaluator, NoEvaluator, Result, Stop, never
from rlframe.evaluation.function import EvaluationFunction, find_function
from rlframe.evaluation.match_evaluator import MatchEvaluator
from rlframe.rollout.cpu_worker import ParameterCopies, parameters
from rlframe.system.affinity import Affinity
from rlframe.system.machine import retain_freed_memory
from rlframe.system.process import SLICE_S, ChildDied, ChildProcess
from rlframe.system.service import RestartBudget, Service, Supervision, WorkersFailed
from rlframe.system.shared import Shared, make_shared_parameters, post_parameters
from rlframe.system.worker_main import PROGRESS, ParentLink

MakeEvaluator = Callable[[Agent], BaseEvaluator]
_READY, _EVALUATE = range(2)  # commands
_TRIES = 3  # of an evaluation


def make_evaluator(
    config: EvalConfig,
    env: EnvConfig,
    agent: Agent,
    spaces: tuple[Space, Space],
    seed: int,
    affinity: Affinity,
    supervision: Supervision,
) -> BaseEvaluator:
    """The evaluator that a config describes.

    Args:
        spaces: of observations and actions of training.    supervision: of its processes.
    Raises:
        ConfigError: eval.env has other spaces, there is no eval.function, or eval.video_every cannot film.
    """
    if config.env:
        _check_spaces(env, spaces)
    if config.function:
        function = find_function(config.function)
        make: MakeEvaluator = partial(
            EvaluationFunction, function, env, spaces=spaces, interval_steps=config.interval_steps
        )
    elif config.opponents:
        make = partial(MatchEvaluator, env, spaces=spaces, config=config, seed=seed)
    else:
        workers = replace(supervision, name="evaluation worker", fresh_seeds=False)
        make = partial(Evaluator, env, config=config, seed=seed, cpus=affinity.workers, supervision=workers)
    if current_ranks().rank and (config.asynchronous or config.function or config.opponents):
        return NoEvaluator(config.interval_steps)  # rank 0 evaluates
    if not config.asynchronous:
        return make(agent)
    supervision = replace(supervision, name="evaluation")
    return EvaluatorProcess(make, agent, config.interval_steps, affinity.master, supervision)


def _check_spaces(env: EnvConfig, spaces: tuple[Space, Space]) -> None:
    with closing(make_envs(env, 1, [0])) as envs:
        found = envs.observation_space, envs.action_space
    for name, of_training, own in zip(("observation", "action"), spaces, found, strict=True):
        if own != of_training:
            raise ConfigError(f"eval.env={env.id} has the {name} space {own}, and the agent is for {of_training}")


class EvaluationService(Service):
    """The process of an EvaluatorProcess, and the evaluation that it makes."""

    def __init__(
        self, arguments: tuple[Any, ...], cpus: tuple[int, ...], supervision: Supervision, parameters: Shared
    ) -> None:
        super().__init__(
            supervision.name,
            RestartBudget(
                supervision.max_restarts, "sampler.max_restarts", "the evaluation's process", "an evaluation"
            ),
            "If a step of its environments may take that long, raise sampler.timeout_s (of sampler=cpu)",
        )
        self._arguments, self._cpus, self._supervision, self._shared = arguments, cpus, supervision, parameters
        self.folder = ""  # for films
        self.number = -1  # of the running evaluation; -1: none
        self._deaths = 0  # in this evaluation
        self.has_begun = False  # some process has made its evaluator

    def launch(self) -> ChildProcess:
        method, preload = self._supervision.start_method, ("rlframe.evaluation.process",)
        child = ChildProcess(self.name, _main, self._arguments, self._cpus, method, preload)
        with suppress(ChildDied):  # who waits for it replaces it
            child.send_memory(self._shared)
        return child

    def make_ready(self) -> None:
        if self.number >= 0:
            self._begin()

    def died_early(self) -> bool:
        return not self.has_begun

    def renew(self) -> str:
        if self.number < 0:
            return "another one starts"
        self._deaths += 1
        again, number = self._deaths < _TRIES, self.number
        self.number = number if again else -1
        return f"the evaluation of env_steps {number:,} is {'made again' if again else 'lost'}"

    def begin(self, number: int) -> None:
        """Start an evaluation."""
        self.number, self._deaths = number, 0
        self._begin()

    def _begin(self) -> None:
        self.child.start_command(_EVALUATE, self.number)
        with suppress(ChildDied):  # `finished` replaces it
            self.child.send(self.folder)


class EvaluatorProcess(BaseEvaluator):
    """`evaluate` starts an evaluation, and `finished` returns its result when it is there.

    The metrics are those of `make(agent)` in this process with one torch thread. If the process dies, it is replaced
    and makes the same evaluation again; the third time the evaluation is lost.
    """

    def __init__(
        self,
        make: MakeEvaluator,
        agent: Agent,
        interval_steps: float,
        cpus: Sequence[int] = (),
        supervision: Supervision | None = None,
    ) -> None:
        """Start the process and wait until it is ready.

        Args:
            make: makes the evaluator in the process, on a copy of the agent.    cpus: for the process.
        Raises:
            ConfigError, EnvError: the evaluator cannot be made.    WorkersFailed: too many processes died.
        """
        self.interval_steps = interval_steps
        supervision = supervision or Supervision(name="evaluation")
        self._timeout_s = supervision.timeout_s
        self._parameters = parameters(agent)
        self._shared = make_shared_parameters(self._parameters)
        arguments = make, copy.deepcopy(agent).to("cpu"), str(next(agent.parameters()).device)
        self._service = EvaluationService(arguments, tuple(cpus), supervision, self._shared)
        self._waiting: list[Result] = []  # that `finished` has not returned yet
        self._checked_at = 0.0
        try:
            self._service.start()
            self._wait_for_evaluator()
        except BaseException:
            self.close()
            raise

    def _wait_for_evaluator(self) -> None:
        while not self._service.has_begun:
            self._service.child.start_command(_READY)
            try:
                self._service.has_begun = self._wait(never)
            except ChildDied as death:
                self._service.replace(death)

    @property
    def busy(self) -> bool:
        return self._service.number >= 0

    def evaluate(self, number: int, stop: Stop = never) -> dict[str, float]:
        """Start an evaluation of the parameters as they are now; returns nothing yet."""
        if self.busy:
            raise RuntimeError(f"the evaluation of env_steps {self._service.number} is not finished")
        post_parameters(self._shared.tree, self._parameters)
        self._checked_at = time.monotonic()
        self._service.begin(number)
        return {}

    def film_in(self, folder: str) -> None:
        self._service.folder = folder

    def evaluate_now(self, number: int) -> dict[str, float]:
        """Raises:
        WorkersFailed: its process died again and again.
        """
        self._waiting += self._next_result(wait=True, stop=never)  # it is for `finished`
        self.evaluate(number)
        found = self._next_result(wait=True, stop=never)
        if not found:
            raise WorkersFailed(f"the evaluation of env_steps {number:,} was lost, since its process died")
        return found[0][1]

    def finished(self, wait: bool, stop: Stop = never) -> list[Result]:
        found, self._waiting = self._waiting, []
        return found + self._next_result(wait, stop)

    def _next_result(self, wait: bool, stop: Stop) -> list[Result]:
        """The result of the evaluation that is running, if it is there; empty if it is not, or was lost."""
        while self.busy:
            try:
                if not (self._wait(stop) if wait else self._is_done()):
                    return []
                number, metrics = self._service.number, self._service.child.answer(self._timeout_s)
            except ChildDied as death:
                self._service.replace(death)
                if wait:
                    continue
                return []
            self._service.number = -1
            restarts = metrics.get("eval/restarts", 0) + self._service.restarts.n
            return [(number, {**metrics, "eval/restarts": restarts})]
        return []

    def _is_done(self) -> bool:
        waited_s, self._checked_at = time.monotonic() - self._checked_at, time.monotonic()
        child = self._service.child
        return bool(child.wait(0.0) or child.check(waited_s, self._timeout_s))

    def _wait(self, stop: Stop) -> bool:
        """Wait until the command is done; False if `stop()` became true first."""
        child = self._service.child
        while not (child.wait(SLICE_S) or child.check(SLICE_S, self._timeout_s)):
            if stop():
                return False
        return True

    def close(self) -> None:
        if child := self._service.child:
            child.stop()
            child.close(0.0 if self.busy else SLICE_S)
        self._shared.close()


def _main(parent: ParentLink, make: MakeEvaluator, agent: Agent, device: str) -> None:
    """Main function of the process."""
    retain_freed_memory()
    torch.set_num_threads(1)
    agent.to(torch.device(device))
    copies, evaluator = ParameterCopies(agent, parent.receive_memory().tree), make(agent)
    evaluator.set_heartbeat(parent.control[PROGRESS:])

    def handle(command: int, number: int) -> Any:
        if command == _READY:
            return None
        copies.refresh()
        evaluator.film_in(parent.receive())
        return evaluator.evaluate(number)

    try:
        parent.serve(handle)
    finally:
        evaluator.close()
