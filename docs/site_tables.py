"""Fill in what the docs take from the code: tables of keys and metrics, the examples, and CONTRIBUTING.md.

A page names it in a comment on a line of its own, such as `<!-- keys: ppo -->`. A line `[In the repository](FILE)`
below it, for those who read the page there, is left out, and links to these files lead to their pages. mkdocs calls
`on_page_markdown` for every page (mkdocs.yml lists this file under `hooks`).
"""

import ast
import html
import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import chz

from rlframe.algos.defaults import Kind, defaults_of
from rlframe.core.config import AUTO
from rlframe.core.parts import ROOTS, Part, module_names
from rlframe.core.schedule import Schedule, accepts_schedule
from rlframe.experiment.config import Experiment
from rlframe.record import METRICS, metrics_table

_COMMENT = re.compile(r"^<!-- (\w+):? ?(.*?) -->$(?:\n\n\[In the repository\]\(.*\)$)?", re.MULTILINE)
_PAGES = {  # of files of the repository
    re.compile(r"\]\(\.\./((?:\.\./)*)examples/(\w+)\.py\)"): r"](\1examples.md#\2py)",
    re.compile(r"\]\(\.\./((?:\.\./)*)CONTRIBUTING\.md"): r"](\1contributing.md",
}
ROOT = Path(__file__).parents[1]
_GUIDES = {
    "optimizer": "[Optimizers](../guides/optimizers.md)",
    "explore": "[Exploration](../guides/exploration.md)",
    "replay": "[Replay](../guides/replay.md)",
}
PARTS = (
    "algo",
    "sampler",
    "runner",
    "model",
    "eval",
    "reward",
    "env_options",
)  # they have keys of their own


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every `<!-- name: argument -->` line whose name is in FILLERS, with the line for the repository below."""
    for link, page in _PAGES.items():
        markdown = link.sub(page, markdown)
    return _COMMENT.sub(_filled, markdown)


def _filled(match: re.Match[str]) -> str:
    name, argument = match.groups()
    return FILLERS[name](argument) if name in FILLERS else match[0]


def keys(config: str) -> str:
    """A table of a config's keys: an algorithm by its name, or `package.module:Class PREFIX`."""
    target, _, prefix = config.partition(" ")
    if ":" not in target:
        algo = importlib.import_module(f"rlframe.algos.{target}").Config
        return _table(algo, "algo.", of_vectors=defaults_of(algo, Kind.VECTORS).keys())
    module, _, name = target.partition(":")
    return _table(getattr(importlib.import_module(module), name), prefix or "algo.")


def defaults(_: str) -> str:
    """A table of what each algorithm brings besides the fields of its Config, by kind of spaces."""
    lines = ["| `algo=` | spaces | keys |", "|---|---|---|"]
    for algo in module_names(ROOTS["algo"]):
        config = importlib.import_module(f"{ROOTS['algo']}.{algo}").Config
        for kind in Kind:
            if kind is Kind.CONTINUOUS and not hasattr(config, kind.value):
                continue
            words = [f"`{key}={_spelled(value)}`" for key, value in defaults_of(config, kind).keys().items()]
            lines.append(f"| `{algo}` | {kind.value.removeprefix('for_')} | {' '.join(words)} |")
    return "\n".join(lines)


def _spelled(value: Any) -> str:
    """A value as on the command line."""
    text = f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
    return text.lower() if isinstance(value, bool) else text


def experiment_keys(_: str) -> str:
    """A table of the keys of a run that belong to no part."""
    return _table(Experiment, "", skip=PARTS)


def _table(
    config: type, prefix: str, skip: tuple[str, ...] = (), of_vectors: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """`of_vectors`: defaults that are others for environments of vectors."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in chz.chz_fields(config).items():
        if name in skip or not field._doc:  # the latter have tables of their own
            continue
        if isinstance(part := field.meta_factory, Part) and name in _GUIDES:
            lines.append(f"| `{prefix}{name}` | `{part.default}` | see {_GUIDES[name]} |")
            continue
        kind = " (number or schedule)" if accepts_schedule(field) else ""
        other = f"; vectors: `{_spelled(of_vectors[key])}`" if (key := f"{prefix}{name}") in of_vectors else ""
        lines.append(f"| `{key}` | {_default(field)}{other} | {_escaped(field._doc)}{kind} |")
    return "\n".join(lines)


def _default(field: Any) -> str:
    value = field._default
    if isinstance(value, Schedule):
        return f"`{value}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{','.join(map(str, value))}]`"
    if isinstance(value, int | float | str) and value != "":
        return f"`{'auto' if isinstance(value, int) and value == AUTO else value}`"
    return ""


def _escaped(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|")


def metrics(names: str) -> str:
    """A table of some metrics, named without their group `algo/`."""
    rows = [f"| `algo/{name}` | {METRICS[f'algo/{name}']} |" for name in names.split(", ")]
    return "\n".join(["| metric | meaning |", "|---|---|", *rows])


def examples(_: str) -> str:
    """Every example: what its docstring says, and its code."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("examples/*.py"), key=_number)]
    return "\n\n".join(map(_example, range(1, len(texts) + 1), texts))


def _number(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _example(number: int, text: str) -> str:
    docstring = ast.get_docstring(ast.parse(text)) or ""
    code = text.split('"""', 2)[2].strip()
    return f"## example_{number}.py\n\n{docstring}\n\n```python\n{code}\n```"


def include(path: str) -> str:
    """A file of the repository's root, with links to the docs as a page of the docs has them."""
    return (ROOT / path).read_text(encoding="utf-8").replace("](docs/", "](")


FILLERS: dict[str, Callable[[str], str]] = {
    "keys": keys,
    "defaults": defaults,
    "experiment_keys": experiment_keys,
    "metrics": metrics,
    "metrics_table": lambda _: metrics_table(),
    "examples": examples,
    "include": include,
}
