"""The command `rlframe`, also `python -m rlframe`: `rlframe launch ...` is `python -m rlframe.launch ...`."""

import runpy
import sys

_COMMANDS = {
    "launch": "train a run, resume one, or queue a study of many",
    "evaluate": "evaluate trained agents, film or watch them",
    "study": "show the progress of a study, or add a run to it",
    "plot": "draw learning curves, or a search",
    "results": "keep the curves of all seeds in small files, and make tables of them",
    "data": "list, describe, merge, split, filter, convert and import datasets",
    "export": "write a trained policy as a program of its own",
}


def main() -> int:
    """Run the command that the first word names, which ends the process; returns 0 for help, 2 for an unknown word."""
    word = sys.argv[1] if len(sys.argv) > 1 else "help"
    if word in _COMMANDS:
        sys.argv = [f"rlframe {word}", *sys.argv[2:]]
        runpy.run_module(f"rlframe.{word}", run_name="__main__", alter_sys=True)
    if word in ("-h", "--help", "help"):
        print("usage: rlframe COMMAND [key=value ...]\n")
        print("\n".join(f"  {name:<10} {does}" for name, does in _COMMANDS.items()))
        print("\nrlframe COMMAND --help says more.")
        return 0
    from rlframe.core.config import nearest  # slow to import

    hint = f"; did you mean rlframe launch {word}?" if "=" in word else nearest(word, _COMMANDS)
    print(f"error: {word!r} is not one of {', '.join(_COMMANDS)}{hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
