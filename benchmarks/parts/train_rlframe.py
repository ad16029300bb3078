"""rlframe's side of `benchmarks.compare`: trains as `launch` does, by the words of a command line."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing

from benchmarks.parts.command import Words, words_of
from benchmarks.parts.gate import Gate
from benchmarks.parts.rows import Row
from benchmarks.parts.turns import Unit
from rlframe.core.parts import part_name
from rlframe.core.seeding import Role, generators
from rlframe.envs import EnvConfig
from rlframe.experiment import hardware
from rlframe.experiment.build import Built, build
from rlframe.experiment.settings import from_flat
from rlframe.kernels.device import learning_in
from rlframe.record import logger_context
from rlframe.rollout.inference import BatchInference, block_size, empty_batch
from rlframe.samplers import serial
from rlframe.system.machine import retain_freed_memory


def _built(row: Row, more: Words, stack: ExitStack) -> tuple[Built, str]:
    """The objects of a training, and a description of what was chosen."""
    retain_freed_memory()
    words = words_of(row, more)
    resolved = hardware.resolve(from_flat(words))
    built = build(resolved.experiment, resolved.affinity)
    stack.callback(built.close)
    sampler = part_name(resolved.experiment.sampler, "rlframe.samplers") + " sampler"
    chosen = [sampler, built.runner.sampler.backend, built.precision]
    return built, ", ".join([*chosen, *(f"{key}={value}" for key, value in more.items())])


def train(more: Words, row: Row, gate: Gate) -> None:
    """MinibatchRl.train with a run directory, but without snapshots."""
    with ExitStack() as stack:
        built, gate.facts = _built(row, more, stack)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(logger_context(log_dir=folder, snapshot_mode="none", console=False))
        runner = built.runner
        iterate = runner.iterate

        def gated() -> None:
            gate(runner.env_steps)
            iterate()

        runner.iterate = gated  # type: ignore[method-assign]
        built.train()


def acting(row: Row, more: Words, stack: ExitStack) -> Unit:
    """The agent's steps alone, for fixed observations."""
    built, _ = _built(row, more, stack)
    agent, (T, B, _) = built.runner.agent, built.runner.sampler.batch_spec
    with closing(serial.Config(batch_T=T, batch_B=B).make_envs(EnvConfig(row.env), 0, ())) as envs:
        batch = empty_batch(envs.observation_space, envs.action_space, agent, T, B)
    inference = BatchInference(agent, batch, 0, generators(0, Role.NOISE, B), True, block_size(B))

    def unit() -> int:
        for t in range(T):
            inference.act(t)
        return T * B

    return unit


def learning(row: Row, more: Words, stack: ExitStack) -> Unit:
    """All updates of one batch, repeated with the same batch."""
    built, _ = _built(row, more, stack)
    runner = built.runner
    samples = runner.sampler.collect()

    def unit() -> int:
        with learning_in(built.precision):
            runner.algo.receive(samples)
            while runner.algo.updates_due():
                runner.algo.update()
        return samples.reward.numel()

    return unit
