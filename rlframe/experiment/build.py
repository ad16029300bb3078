"""build(): from an Experiment to live objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError, pluralize
from rlframe.experiment.config import Experiment
from rlframe.kernels.precision import choose_precision, learning_in
from rlframe.models.encoders import has_images
from rlframe.record.snapshot import load_snapshot
from rlframe.runners import Runner, async_rl
from rlframe.samplers import BackgroundProcess, BackgroundSampler, Evaluator, Sampler, gpu
from rlframe.samplers.base import WorkersConfig
from rlframe.system.affinity import Affinity
from rlframe.system.supervision import Supervision


def choose_device(name: str, gpus: Sequence[int] = ()) -> torch.device:
    """`auto`: the first of `gpus`, or of all, if there is one.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        return torch.device(f"cuda:{gpus[0]}" if gpus else "cuda") if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is not a device; use auto, cpu or cuda:0") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name}: {torch.cuda.device_count()} GPUs are visible; use device=cpu or auto")
    return device


@dataclass(frozen=True)
class Built:
    """The live objects of one experiment."""

    runner: Runner
    precision: str  # fp32 or bf16
    facts: dict[str, str]  # what was chosen, for the log

    def train(self) -> None:
        """The whole run, in its precision."""
        with learning_in(self.precision):
            self.runner.train()

    def close(self) -> None:
        """Close samplers and environments."""
        self.runner.close()


def torch_threads(experiment: Experiment, affinity: Affinity, observation_space: Space) -> int:
    """Threads that the main process computes with."""
    chosen = experiment.threads if experiment.threads > 0 else 0
    return chosen or (affinity.threads if has_images(observation_space) else 1)


def build(experiment: Experiment, affinity: Affinity) -> Built:
    """From configs, which the hardware has settled, to live objects.

    Raises:
        ConfigError: something does not fit together; nothing is left open that was opened here.
    """
    device = choose_device(experiment.device, affinity.gpus)
    precision = choose_precision(experiment.precision, device)
    envs = _make_envs(experiment, affinity)
    try:
        threads = torch_threads(experiment, affinity, envs.observation_space)
        torch.set_num_threads(threads)
        agent = make_agent(experiment, envs.observation_space, envs.action_space, device)
        sampler = _make_sampler(experiment, envs, agent, device)
        n_steps = experiment.runner.n_steps
        algo = experiment.algo.make_algorithm(agent, sampler.batch_spec, n_steps, experiment.seed)
        runner = experiment.runner.make_runner(sampler, agent, algo, lambda: _evaluator(experiment, agent, affinity))
    except ValueError as error:
        envs.close()
        raise ConfigError(str(error)) from error
    except BaseException:
        envs.close()
        raise
    parameters, (T, B) = sum(p.numel() for p in agent.parameters()), sampler.batch_spec
    facts = {
        "environments": f"{experiment.env}, {B} x {T} steps a batch, {sampler.backend}",
        "agent": f"{type(agent).__name__}, {parameters:,} parameters, on {device}, "
        f"{pluralize(threads, 'torch thread')}",
        "precision": f"{precision}, of learning's matrix products",
        **algo.facts(),
    }
    return Built(runner, precision, facts)


def _make_envs(experiment: Experiment, affinity: Affinity) -> Any:
    """The environments, for the sampler in this process; or the process that will have one of its own."""
    config, runner = experiment.sampler, experiment.runner
    if not isinstance(runner, async_rl.Config):
        return config.make_envs(experiment.env_config(), experiment.seed, affinity.workers)
    return BackgroundProcess(
        config,
        experiment.env_config(),
        experiment.seed,
        affinity.sampler,
        affinity.workers,
        max(1, affinity.sampler_threads),
        runner.supervision(),
    )


def _make_sampler(experiment: Experiment, envs: Any, agent: Agent, device: torch.device) -> Sampler:
    if not isinstance(envs, BackgroundProcess):
        return experiment.sampler.make_sampler(envs, agent, experiment.seed)
    acts_on = str(device) if isinstance(experiment.sampler, gpu.Config) else "cpu"
    return BackgroundSampler(envs, agent, experiment.runner.n_slots, acts_on)


def _evaluator(experiment: Experiment, agent: Agent, affinity: Affinity) -> Evaluator:
    config, sampler = experiment.eval, experiment.sampler
    supervision = sampler.supervision() if isinstance(sampler, WorkersConfig) else Supervision()
    supervision = replace(supervision, name="evaluation worker")
    return Evaluator(experiment.eval_env_config(), agent, config, experiment.seed, affinity.workers, supervision)


def make_agent(experiment: Experiment, observation_space: Any, action_space: Any, device: torch.device) -> Agent:
    """The experiment's agent, with weights from its seed, or from `init`."""
    agent: Agent = experiment.algo.make_agent(observation_space, action_space, experiment.model, experiment.seed)
    if experiment.init:
        load_weights(agent, load_snapshot(Path(experiment.init), key="agent")[0], experiment.init)
    return agent.to(device)


def load_weights(agent: Agent, weights: Mapping[str, Any], source: str) -> None:
    """Give an agent saved weights.

    Raises:
        ConfigError: they are those of another network; names what differs.
    """
    try:
        agent.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{source} holds another network: {error}") from None
