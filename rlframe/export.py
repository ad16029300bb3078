"""python -m rlframe.export RUN_DIR_OR_SNAPSHOT [key=value ...]: the greedy policy as a torch.export or ONNX file."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from rlframe.core.command_line import KeyValues, run_command
from rlframe.core.errors import ConfigError, ReadableError
from rlframe.core.spaces import action_decoder
from rlframe.core.struct import as_numpy, leaves, map_tree
from rlframe.deploy.greedy import Greedy, example_of
from rlframe.deploy.load import Trained, load_trained

_KEYS = ("format", "out", "trust", "traceback")
_N_CHECKED = 1000  # observations
_BATCH = 50
_TOLERANCE = 1e-4  # of rounding, in units of the action
_USAGE = """\
usage: python -m rlframe.export RUN_DIR_OR_SNAPSHOT [key=value ...]

  format=torch     torch (a torch.export program, .pt2) | onnx
  out=FILE         default: policy.pt2 or policy.onnx in the working directory
  trust=false      run what the run's config names that is no part of rlframe: module:Class, ./file.py

What is exported takes (observation, state, reward) in batches and gives (action, state): observations as the
environment's space has them, normalised inside, actions as the environment wants them. A policy without memory takes
the observation alone. Afterwards it is compared with the agent on 1,000 observations.
"""

Run = Callable[[list[np.ndarray]], list[np.ndarray]]  # the exported policy: arrays in, arrays out


class ExportError(ReadableError):
    """The policy cannot be exported, or the exported one acts differently."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    if not argv or any(word in ("-h", "--help", "help") for word in argv):
        print(_USAGE)
        return 0 if argv else 2
    return run_command(_export, argv)


def _export(argv: list[str]) -> int:
    words = KeyValues(argv[1:])
    kind, trust = words.text("format", "torch"), words.flag("trust")
    out = Path(words.text("out", "policy.onnx" if kind == "onnx" else "policy.pt2"))
    words.check_unknown(_KEYS)
    if kind not in ("torch", "onnx"):
        raise ConfigError(f"format={kind!r} is not one of torch, onnx")
    if kind == "onnx":
        _require_onnx()
    trained = load_trained(Path(argv[0]), "cpu", trust)
    greedy = _Flat(trained)
    program = trace(greedy, trained)
    out.parent.mkdir(parents=True, exist_ok=True)
    run = _save_onnx(program, greedy, out) if kind == "onnx" else _save_torch(program, greedy, out)
    difference = compare(trained, greedy, run)
    print(f"{out}: {', '.join(greedy.inputs)} -> {', '.join(greedy.outputs)}, each with a leading dimension")
    print(f"checked on {_N_CHECKED:,} observations: the actions are the agent's, largest difference {difference:.1e}")
    return 0


class _Flat(torch.nn.Module):
    """Greedy with every array an argument and an answer of its own, by name; those that are not looked at left out."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.greedy = Greedy(trained.agent, trained.observation_space, trained.action_space).eval()
        observation = map_tree(torch.from_numpy, example_of(trained.observation_space, 2))
        state = self.greedy.initial_state(2)
        arguments = (observation, state, torch.zeros(2)) if self.greedy.stateful else (observation,)
        with torch.no_grad():
            action, after = self.greedy(observation, state, torch.zeros(2))
        self.example, self._form = pytree.tree_flatten(arguments)
        self.inputs = _named(["observation", "state", "reward"][: len(arguments)], arguments)
        self.outputs = _named(["action", "next_state"], (action, after))

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        arguments = pytree.tree_unflatten(list(flat), self._form)
        observation, state, reward = arguments if self.greedy.stateful else (*arguments, (), flat[0].new_zeros(()))
        if not self.greedy.stateful:
            reward = torch.zeros(flat[0].shape[0], device=flat[0].device)
        return tuple(pytree.tree_leaves(self.greedy(observation, state, reward)))


def _named(names: list[str], trees: Any) -> list[str]:
    found = []
    for name, tree in zip(names, trees, strict=True):
        for path, _ in pytree.tree_flatten_with_path(tree)[0]:
            found.append("_".join([name, *(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path)]))
    return found


def trace(greedy: _Flat, trained: Trained) -> ExportedProgram:
    """The policy as a program of tensor operations, for any size of batch.

    Raises:
        ExportError: some part of it does what cannot be traced.
    """
    try:
        with torch.no_grad():
            batch = Dim("batch")
            shapes = (tuple({0: batch} for _ in greedy.example),)
            return torch.export.export(greedy, tuple(greedy.example), dynamic_shapes=shapes)
    except Exception as error:
        agent = trained.agent
        encoder = trained.experiment.model.encoder
        raise ExportError(
            f"{type(agent).__name__} with model.encoder={encoder} cannot be exported: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        ) from error


def _facts(greedy: _Flat) -> dict[str, Any]:
    return {"inputs": greedy.inputs, "outputs": greedy.outputs, "initial_state": "zeros; state_first is true"}


def _save_torch(program: ExportedProgram, greedy: _Flat, out: Path) -> Run:
    torch.export.save(program, out, extra_files={"policy.json": json.dumps(_facts(greedy))})
    module = torch.export.load(out).module()
    return lambda arrays: [x.detach().numpy() for x in module(*map(torch.from_numpy, arrays))]


def _require_onnx() -> None:
    try:
        import onnx  # an extra
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f'format=onnx needs {error.name}: pip install "rlframe[onnx]"') from None
    del onnx


def _save_onnx(program: ExportedProgram, greedy: _Flat, out: Path) -> Run:
    from onnxruntime import InferenceSession

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # which tells of packages that this needs not
    try:
        torch.onnx.export(
            program, (), str(out), input_names=greedy.inputs, output_names=greedy.outputs, dynamo=True, verbose=False
        )
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(f"ONNX has no form for a part of this policy: {error}; use format=torch") from error
    session = InferenceSession(str(out), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    known = {name: index for index, name in enumerate(greedy.inputs)}
    return lambda arrays: session.run(None, {name: arrays[known[name]] for name in names})


def compare(trained: Trained, flat: _Flat, run: Run) -> float:
    """The largest difference between the exported policy's actions and those of the agent's own `step`, decoded as for
    the environments; state is carried along by each for itself.

    Raises:
        ExportError: they differ by more than rounding.
    """
    greedy, agent, decode = flat.greedy, trained.agent, action_decoder(trained.action_space)
    noise = map_tree(lambda x: torch.zeros(_BATCH, *np.shape(x)), agent.noise(np.random.default_rng(0), ()))
    live = greedy.initial_state(_BATCH)
    state = [x.numpy() for x in pytree.tree_leaves(live)]
    reward, largest = np.zeros(_BATCH, np.float32), 0.0
    trained.observation_space.seed(0)
    for _ in range(_N_CHECKED // _BATCH):
        observation = example_of(trained.observation_space, _BATCH)
        action, live = greedy.step(map_tree(torch.from_numpy, observation), live, torch.from_numpy(reward), noise)
        expected = leaves(decode(map_tree(as_numpy, action)))
        answers = run([*leaves(observation), *state, *([reward] if state else [])])
        state = list(answers[len(expected) :])
        for mine, its in zip(expected, answers, strict=False):
            largest = max(largest, float(np.abs(mine.astype(np.float64) - its).max()))
    if largest > _TOLERANCE:
        raise ExportError(f"the exported policy acts differently, by {largest:g}; please report this")
    return largest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
