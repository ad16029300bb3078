"""The layers of the house, read from the imports with ast; what may be loaded without torch; and every file's form."""

import ast
import functools
import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rlframe"

# Who may import whom: a part sees itself and everything in the layers before its own. Parts of one layer do not see
# each other, and so algos and samplers never meet.
LAYERS: list[set[str]] = [
    {"core"},
    {"ops", "kernels", "distributions", "optimizers", "system", "record"},
    {"data"},
    {"envs", "models", "replay", "integrations"},
    {"critics", "exploration"},
    {"agents"},
    {"rollout"},
    {"updates"},
    {"algos", "samplers"},
    {"rewards", "evaluation"},
    {"runners"},
    {"experiment"},
    {"study", "deploy"},
    {"launch", "evaluate", "export"},
]
ALLOWED: dict[str, set[str]] = {
    part: {part}.union(*LAYERS[:depth]) for depth, layer in enumerate(LAYERS) for part in layer
}
ALLOWED["kernels"] = {"kernels", "core"}
ALLOWED["optimizers"] = {"optimizers", "kernels", "core"}
ALLOWED["ops"] = {"ops", "kernels", "core"}
ALLOWED["distributions"] = {"distributions", "ops", "core"}
ALLOWED["rewards"] -= {"rollout", "replay", "system"}
ALLOWED["integrations"] = {"integrations", "record", "core"}
ALLOWED["analysis"] = {"analysis", "core"}
ALLOWED["data"] = {"data", "core", "ops", "record", "analysis"}
ALLOWED["study"] |= {"analysis"}  # for the interval over seeds
ALLOWED["plot"] = {"plot", "analysis", "core"}
ALLOWED["results"] = {"results", "analysis", "core"}
ALLOWED["__main__"] = {"core"}  # it runs the commands by their names
ALLOWED["__init__"] = {"core", "deploy", "evaluation", "experiment", "record", "study", "system"}  # inside functions

OF_LEARNERS = {
    f"rlframe.system.{name}" for name in ("cuda_graph", "distributed", "collectives", "shared_ranks")
}  # of system, what stands on torch: no environment's process loads it
STEPPING = {
    f"rlframe.rollout.{name}" for name in ("worker_pool", "stepper", "buffer")
}  # loaded by workers that only step

# Packages of parts, whose classes no other package asks for: it calls a method that each of them has.
PARTS = {
    "agents",
    "algos",
    "critics",
    "distributions",
    "evaluation",
    "exploration",
    "optimizers",
    "replay",
    "rewards",
    "rollout",
    "runners",
    "samplers",
}

HEAVY = {  # simulators, drawing, logging backends: loaded by who uses them, when they are used
    "ale_py",
    "Box2D",
    "cv2",
    "envpool",
    "imageio",
    "matplotlib",
    "mlflow",
    "mujoco",
    "pygame",
    "tensorboard",
    "trackio",
    "wandb",
}


@functools.cache
def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(tree_of(path))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(path: Path) -> str:
    """The first-level package or module of rlframe that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_parts(path: Path) -> dict[str, int]:
    """Parts of rlframe that a file imports, at the top or inside functions, each with a line that does."""
    found: dict[str, int] = {}
    for node in nodes_of(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively; spell out rlframe.<part>"
            module = node.module or ""
            names = [f"rlframe.{alias.name}" for alias in node.names] if module == "rlframe" else [module]
        for name in names:
            if name.startswith("rlframe."):
                found[name.split(".")[1]] = node.lineno
    return found


def modules_of(part: str) -> list[str]:
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in python_files(PACKAGE / part)
    ]


def loaded_after(*codes: str) -> list[set[str]]:
    """Modules loaded in a fresh Python after each code, which run in turn; their output and exits are ignored."""
    stages = "".join(
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        + "".join(f"    {line}\n" for line in code.splitlines())
        + "print(json.dumps(sorted(sys.modules)))\n"
        for code in codes
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import contextlib, io, json, sys\n{stages}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def test_imports_go_leftward_only() -> None:
    wrong = []
    for path in python_files(PACKAGE):
        part = part_of(path)
        assert part in ALLOWED, f"rlframe/{part} has no layer: add it to LAYERS"
        for other, line in imported_parts(path).items():
            if other not in ALLOWED[part]:
                wrong.append(f"{name_of(path)}:{line} imports rlframe.{other}; {part} may not see it")
    assert not wrong, "\n".join(wrong)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Modules of rlframe that a file imports, for types alone too, but not inside functions."""
    found: set[str] = set()
    body = tree_of(path).body
    for node in [*body, *(inner for outer in body if isinstance(outer, ast.If) for inner in outer.body)]:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= names or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def test_files_import_each_other_in_no_circle() -> None:
    modules = {module_of(path): path for path in python_files(PACKAGE)}
    graph = {module: imports_of(path, {*modules}) for module, path in modules.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def classes_asked_for(path: Path) -> set[tuple[int, str]]:
    """Lines with isinstance, issubclass or `case Class()`, and the imported class; but not a check that raises."""
    nodes, found = nodes_of(path), set()
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {each.asname or each.name: f"{node.module}.{each.name}" for node in imports for each in node.names}
    raising = [node.test for node in nodes if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)]
    checks = {inner for test in raising for inner in ast.walk(test)}
    for node in nodes:
        asked: list[ast.expr] = []
        if isinstance(node, ast.MatchClass):
            asked = [node.cls]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = [] if node in checks else [node.args[1]]
        names = [x for each in asked for x in ast.walk(each) if isinstance(x, ast.Name)]
        found |= {(names[0].lineno, imported[name.id]) for name in names if name.id in imported}
    return found


def test_no_other_package_asks_for_the_class_of_a_part() -> None:
    """Checks of what a user gave may, which raise."""
    wrong = [
        f"{name_of(path)}:{line} asks for {name}; call a method that every class of {name.split('.')[1]} has"
        for path in python_files(PACKAGE)
        for line, name in sorted(classes_asked_for(path))
        if name.startswith("rlframe.") and name.split(".")[1] in PARTS - {part_of(path)}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("part", "other"), [("algos", "samplers"), ("samplers", "algos")])
def test_algos_and_samplers_do_not_see_each_other(part: str, other: str) -> None:
    files = python_files(PACKAGE / part)
    assert files
    assert [name_of(path) for path in files if other in imported_parts(path)] == []


HELP = "import runpy\nsys.argv = ['rlframe.launch', '--help']\nrunpy.run_module('rlframe.launch', run_name='__main__')"


def test_nothing_is_loaded_before_it_is_used(tmp_path: Path) -> None:
    """Each step comes after those that load less, in one Python: what none of them may load, none of them did."""
    words = ["env=CartPole-v1", "sampler=serial", "eval.n_episodes=1", "algo.epochs=1", f"log_dir={tmp_path}"]
    first, second = [*words, "algo=ppo", "runner.n_steps=128"], [f"resume={tmp_path / 'run_0'}", "runner.n_steps=256"]
    first += ["runner.log_interval_steps=128", "sampler.batch_T=32", "sampler.batch_B=4", "affinity=none"]
    stepping = [{*modules_of("system")} - OF_LEARNERS, {*modules_of("envs")}, STEPPING]
    steps = {
        "rlframe": ("import rlframe", HEAVY | {"torch", "gymnasium", "numpy"}),
        "structs": ("import rlframe.core.struct, rlframe.core.types", {"torch"}),
        **{
            f"processes that only step: {min(modules)}, ...": (f"import {', '.join(sorted(modules))}", {"torch"})
            for modules in stepping
        },
        "records": (
            "import rlframe.record.context, rlframe.record.metrics, rlframe.record.snapshot",
            {"tensorboard", "matplotlib", "rich.live"},
        ),
        "help": (HELP, HEAVY),
        "training and resuming": (
            f"from rlframe.launch import main\nassert main({first}) == main({second}) == 0",
            {"torch._dynamo"},
        ),
    }
    loaded = loaded_after(*(code for code, _ in steps.values()))
    wrong = {step: found & never for (step, (_, never)), found in zip(steps.items(), loaded, strict=True)}
    assert not any(wrong.values()), wrong
    assert "torch" in loaded[-1]
    assert (tmp_path / "run_0" / "snapshot").exists()


def test_first_line_says_what_the_file_holds() -> None:
    for path in [*python_files(PACKAGE), *python_files(ROOT / "tests")]:
        text = path.read_text(encoding="utf-8")
        assert text.startswith(('"""', 'r"""')), f"{name_of(path)} does not begin with a docstring"
        assert text.splitlines()[0].strip('r"'), f"the first line of {name_of(path)} is empty"


def test_a_file_has_at_most_400_lines() -> None:
    for path in [*python_files(PACKAGE), *python_files(ROOT / "tests")]:
        n_lines = len(path.read_text(encoding="utf-8").splitlines())
        assert n_lines <= 400, f"{name_of(path)} has {n_lines} lines; one file, one subject"


def test_a_function_has_at_most_50_lines() -> None:
    for path in python_files(PACKAGE):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef) and node.end_lineno:
                n_lines = node.end_lineno - node.lineno + 1
                assert n_lines <= 50, f"{name_of(path)}:{node.lineno} {node.name} has {n_lines} lines"


def test_no_class_name_stands_twice() -> None:
    """But Config, which the module of each algorithm has."""
    where: dict[str, list[str]] = {}
    for path in python_files(PACKAGE):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and node.name != "Config":
                where.setdefault(node.name, []).append(f"{name_of(path)}:{node.lineno}")
    assert {name: found for name, found in where.items() if len(found) > 1} == {}
