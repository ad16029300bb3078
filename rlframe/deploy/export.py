"""Export of a greedy policy as a torch.export program or an ONNX file.

Inputs are observations as in the environment's observation space, outputs are actions as in its action space.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from rlframe.core import spaces as canonical
from rlframe.core.errors import ConfigError, ReadableError, one_line
from rlframe.core.objects import is_own
from rlframe.core.spaces import PRIVILEGED
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.evaluation.policy import GreedyPolicy

N_CHECKED = 1000  # observations that `compare` checks
_BATCH = 50
_TOLERANCE = 1e-4  # of rounding; see `_difference`

Policy = Callable[[list[np.ndarray]], list[np.ndarray]]  # an exported policy: arrays in, arrays out


class ExportError(ReadableError):
    """The policy cannot be exported, or the exported one acts differently."""


def example_of(space: Space, n: int) -> Tree:
    """n samples of an observation space, stacked: [n, ...]; without what only critics see."""
    found = map_tree(lambda *samples: np.stack(samples), *(space.sample() for _ in range(n)))
    return {key: x for key, x in found.items() if key != PRIVILEGED} if isinstance(found, dict) else found


class FlatGreedy(nn.Module):
    """Greedy with one argument and one result for every array, by name; a policy without state takes no state."""

    def __init__(self, greedy: GreedyPolicy) -> None:
        super().__init__()
        self.greedy = greedy.eval().requires_grad_(False)
        observation = map_tree(torch.from_numpy, example_of(greedy.observation_space, 2))
        state, reward = greedy.initial_state(2), torch.zeros(2)
        arguments = (observation, state, reward) if greedy.stateful else (observation,)
        with torch.no_grad():
            results = greedy(observation, state, reward)
        self.example, self._form = pytree.tree_flatten(arguments)
        self.inputs = _names(["observation", "state", "reward"][: len(arguments)], arguments)
        self.outputs = _names(["action", "next_state"], results)

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        arguments = pytree.tree_unflatten(list(flat), self._form)
        if not self.greedy.stateful:
            arguments = (*arguments, (), torch.zeros(flat[0].shape[0], device=flat[0].device))
        return tuple(pytree.tree_leaves(self.greedy(*arguments)))


def _names(roots: list[str], trees: Any) -> list[str]:
    """A name for every array: its root and its path."""
    found = []
    for root, tree in zip(roots, trees, strict=True):
        for path, _ in pytree.tree_flatten_with_path(tree)[0]:
            found.append("_".join([root, *(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path)]))
    return found


def trace(flat: FlatGreedy) -> ExportedProgram:
    """The policy as a program of tensor operations, for any batch size.

    Raises:
        ExportError: a part of it cannot be traced.
    """
    shapes = (tuple({0: Dim("batch")} for _ in flat.example),)
    try:
        with torch.no_grad():
            return torch.export.export(flat, tuple(flat.example), dynamic_shapes=shapes)
    except Exception as error:
        raise ExportError(
            f"{type(flat.greedy.agent).__name__} cannot be exported, perhaps because of its model.encoder: "
            f"{type(error).__name__}: {one_line(error, 400)}"
        ) from error


def save_torch(program: ExportedProgram, flat: FlatGreedy, out: Path) -> Policy:
    """Write a torch.export program, and load it."""
    facts = {"inputs": flat.inputs, "outputs": flat.outputs, "initial_state": "zeros; state_first is true"}
    torch.export.save(program, out, extra_files={"policy.json": json.dumps(facts)})
    module = torch.export.load(out).module()
    return lambda arrays: [x.detach().numpy() for x in module(*map(torch.from_numpy, arrays))]


def require_onnx() -> None:
    """Check that the packages that ONNX needs are installed."""
    try:
        import onnx  # noqa: F401  # an extra
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f'format=onnx needs {error.name}: pip install "rlframe[onnx]"') from None


def save_onnx(program: ExportedProgram, flat: FlatGreedy, out: Path) -> Policy:
    """Write an ONNX file, and load it.

    Raises:
        ExportError: ONNX cannot express a part of it.
    """
    from onnxruntime import InferenceSession

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns about packages that are not needed here
    names: dict[str, Any] = {"input_names": flat.inputs, "output_names": flat.outputs}
    try:
        torch.onnx.export(program, (), str(out), **names, dynamo=True, verbose=False, external_data=False)
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(f"ONNX cannot express a part of this policy: {error}; use format=torch") from error
    session = InferenceSession(str(out), providers=["CPUExecutionProvider"])
    index = {name: i for i, name in enumerate(flat.inputs)}
    used = [each.name for each in session.get_inputs()]  # ONNX drops inputs that have no effect
    return lambda arrays: session.run(None, {name: arrays[index[name]] for name in used})


def _difference(expected: np.ndarray, found: np.ndarray) -> float:
    """The largest of two actions [n, ...], relative to the largest real number above 1; inf if one is not finite."""
    exact = expected.astype(np.float64)
    unit = max(1.0, float(np.abs(exact).max())) if expected.dtype.kind == "f" else 1.0
    largest = float((np.abs(exact - found) / unit).max())
    return largest if math.isfinite(largest) else math.inf


def compare(flat: FlatGreedy, policy: Policy) -> float:
    """The largest `_difference` between actions of the exported policy and of `Agent.step`, each with its own state.

    Raises:
        ExportError: they differ by more than rounding.
    """
    greedy, space = flat.greedy, flat.greedy.observation_space
    decode = canonical.action_decoder(greedy.action_space)
    noise = map_tree(lambda x: torch.zeros(_BATCH, *np.shape(x)), greedy.agent.noise(np.random.default_rng(0), ()))
    live, exploring = greedy.initial_state(_BATCH), greedy.exploration_state(_BATCH)
    state = [x.numpy() for x in pytree.tree_leaves(live)]
    reward, largest = np.zeros(_BATCH, np.float32), 0.0
    space.seed(0)
    for _ in range(N_CHECKED // _BATCH):
        observation = example_of(space, _BATCH)
        seen = map_tree(torch.from_numpy, observation)
        action, live, exploring = greedy.step(seen, live, torch.from_numpy(reward), noise, exploring)
        expected = leaves(decode(map_tree(as_numpy, action)))
        results = policy([*leaves(observation), *state, *([reward] if state else [])])
        state = list(results[len(expected) :])
        for one, other in zip(expected, results, strict=False):
            largest = max(largest, _difference(one, other))
    if largest > _TOLERANCE and is_own(greedy.agent):
        name = type(greedy.agent).__name__
        raise ExportError(
            f"the exported policy, which is {name}.greedy, acts otherwise than {name}.step with noise of zeros, by "
            f"{largest:g}; both must give the same action, as evaluations play by step"
        )
    if largest > _TOLERANCE:
        raise ExportError(f"the exported policy acts differently, by {largest:g}; please report this")
    return largest
