"""python -m rlframe.export RUN_DIR_OR_SNAPSHOT [key=value ...]: the greedy policy as a torch.export or ONNX file."""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_command: during imports Ctrl-C shows no traceback

import sys
from pathlib import Path

from rlframe.core.command_line import KeyValues, exit_with, run_command
from rlframe.core.config import check_one_of
from rlframe.core.errors import ConfigError
from rlframe.core.files import prepare_output, writing
from rlframe.deploy.export import N_CHECKED, FlatGreedy, compare, require_onnx, save_onnx, save_torch, trace
from rlframe.deploy.load import load_policy
from rlframe.evaluation.policy import Policy
from rlframe.experiment.weights import policies_at

_SUFFIX = {"torch": ".pt2", "onnx": ".onnx"}
_USAGE = """\
usage: python -m rlframe.export RUN_DIR_OR_SNAPSHOT [key=value ...]

  format=torch     torch (a torch.export program, .pt2) | onnx
  out=FILE         default: policy.pt2 or policy.onnx in the working directory; of several policies a folder, default:
                   policies, with a file for each
  policy=NAME      one of several policies
  snapshot=NAME    best, last or step_...; default: the run's best snapshot if it keeps one, else the newest
  trust=false      allow the run's config to name code that is not part of rlframe (module:Class, ./file.py)

The exported policy maps batches of (observation, state, reward) to (action, state). Observations are those of the
environment, normalisation is part of the policy, and actions are as the environment takes them. A policy without memory
takes the observation alone. After the export, its actions on 1,000 observations are compared with the agent's.
"""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    return run_command(_export, argv, _USAGE)


def _export(argv: list[str]) -> int:
    words = KeyValues(argv[1:])
    kind, name, trust = words.text("format", "torch"), words.text("policy"), words.flag("trust")
    out, path, snapshot = words.text("out"), Path(argv[0]), words.text("snapshot")
    words.check_unknown()
    check_one_of("format", kind, _SUFFIX)
    if kind == "onnx":
        require_onnx()
    several = [] if name else policies_at(path)
    suffix = _SUFFIX[kind]
    if out and not several and Path(out).suffix != suffix:
        other = next((f"format={each}, or " for each, end in _SUFFIX.items() if Path(out).suffix == end), "")
        raise ConfigError(f"out={out} must end in {suffix}; use {other}out={Path(out).with_suffix(suffix)}")
    names = {Path(out or "policies", f"{each}{suffix}"): each for each in several}
    names = names or {Path(out or f"policy{suffix}"): name}
    for file in names:
        if not out and file.exists():
            raise ConfigError(f"{file} exists, perhaps of another run; replace it by out={file}, or give another name")
        prepare_output(file)
    policy = load_policy(path, "cpu", trust, name=name, snapshot=snapshot)
    for file, each in names.items():
        _write(file, kind, policy.of(each))
    return 0


def _write(out: Path, kind: str, policy: Policy) -> None:
    """Write a policy, and compare the file with it."""
    flat = FlatGreedy(policy.greedy)
    program = trace(flat)
    with writing(out) as new:
        exported = (save_onnx if kind == "onnx" else save_torch)(program, flat, new)
        difference = compare(flat, exported)
    print(f"{out}: {', '.join(flat.inputs)} -> {', '.join(flat.outputs)}, each with a leading batch dimension")
    print(f"checked on {N_CHECKED:,} observations: the actions are the agent's, largest difference {difference:.1e}")


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
