"""python -m rlframe.export RUN_DIR_OR_SNAPSHOT [key=value ...]: the greedy policy as a torch.export or ONNX file."""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command: during imports Ctrl-C shows no traceback

import sys
from pathlib import Path

from rlframe.core.command_line import KeyValues, exit_with, run_command
from rlframe.core.errors import ConfigError
from rlframe.core.files import clear_output, prepare_output
from rlframe.deploy.export import N_CHECKED, FlatGreedy, compare, require_onnx, save_onnx, save_torch, trace
from rlframe.deploy.load import load_trained
from rlframe.evaluation.policy import GreedyPolicy

_KEYS = ("format", "out", "trust", "traceback")
_USAGE = """\
usage: python -m rlframe.export RUN_DIR_OR_SNAPSHOT [key=value ...]

  format=torch     torch (a torch.export program, .pt2) | onnx
  out=FILE         default: policy.pt2 or policy.onnx in the working directory
  trust=false      allow the run's config to name code that is not part of rlframe (module:Class, ./file.py)

The exported policy maps batches of (observation, state, reward) to (action, state). Observations are those of the
environment, normalisation is part of the policy, and actions are as the environment takes them. A policy without memory
takes the observation alone. After the export, its actions on 1,000 observations are compared with the agent's.
"""


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
        require_onnx()
    prepare_output(out, "out")
    trained = load_trained(Path(argv[0]), "cpu", trust)
    policy = FlatGreedy(GreedyPolicy(trained.agent, trained.observation_space, trained.action_space))
    program = trace(policy)
    clear_output(out)
    exported = (save_onnx if kind == "onnx" else save_torch)(program, policy, out)
    difference = compare(policy, exported)
    print(f"{out}: {', '.join(policy.inputs)} -> {', '.join(policy.outputs)}, each with a leading batch dimension")
    print(f"checked on {N_CHECKED:,} observations: the actions are the agent's, largest difference {difference:.1e}")
    return 0


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
