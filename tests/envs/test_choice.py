"""`make_envs`: the backend chosen for each id, error messages, and imports."""

import importlib.util
import pickle
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import gymnasium
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from rlframe.core.errors import ConfigError
from rlframe.envs import EnvConfig, debug_envs, make, make_envs
from rlframe.envs.make import fixed_backend, resolve
from tests.envs.rows import made, walk


def refused(id_: object, n: int = 1, backend: str = "auto", **kwargs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        made(id_, n, backend=backend, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("n", "kwargs", "backend"),
    [
        (1, {}, "python, 1 environment"),
        (4, {}, "python, 4 environments one by one"),
        (8, {}, "native CartPoleVectorEnv"),
        (8, {"sutton_barto_reward": True}, "native CartPoleVectorEnv"),
        (8, {"render_mode": "rgb_array"}, "python, 8 environments one by one"),
    ],
)
def test_cartpole_is_native_from_eight_environments(n: int, kwargs: dict[str, object], backend: str) -> None:
    assert made("CartPole-v1", n, **kwargs).backend == backend


@pytest.mark.parametrize("n", [4, 8])
def test_a_time_limit_of_0_is_none_and_a_negative_one_an_error_on_every_backend(n: int) -> None:
    with closing(made("CartPole-v1", n, max_episode_steps=0)) as envs:
        assert not walk(envs, 1).truncated.any()
    assert "max_episode_steps=-1 must be a whole number of steps" in refused("CartPole-v1", n, max_episode_steps=-1)


def test_a_vector_form_whose_class_names_another_autoreset_mode_is_left_for_single_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP
    forms = [type("Vector", (CartPoleVectorEnv,), {"metadata": {"autoreset_mode": mode}}) for mode in modes]
    specs = [EnvSpec(f"Reset{i}-v0", CartPoleEnv, vector_entry_point=form) for i, form in enumerate(forms)]
    monkeypatch.setattr(gymnasium, "registry", {spec.id: spec for spec in specs})
    assert [fixed_backend(EnvConfig(spec.id), 8) for spec in specs] == ["python", "native"]
    given = EnvConfig("Reset0-v0", {"autoreset_mode": "NextStep"})
    assert fixed_backend(given, 8) == "python"  # not an argument of it


def test_a_backend_can_be_chosen() -> None:
    assert made("CartPole-v1", 8, backend="python").backend == "python, 8 environments one by one"
    assert made("CartPole-v1", 2, backend="native").backend == "native CartPoleVectorEnv"


def test_envpool_is_chosen_where_it_is_faster() -> None:
    pytest.importorskip("envpool")
    assert made("Acrobot-v1", 8).backend.startswith("envpool")
    assert made("Acrobot-v1", 2).backend.startswith("python")
    assert made("Pendulum-v1", 8).backend.startswith("python")
    assert made("Pendulum-v1", 2, backend="envpool", num_threads=1).backend == "envpool, 1 thread"


def test_without_envpool_python_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    assert made("Acrobot-v1", 8).backend.startswith("python")
    message = refused("Acrobot-v1", backend="envpool")
    assert "available: python" in message
    assert 'pip install "rlframe[envpool]"' in message


def test_an_unavailable_backend_is_an_error_that_lists_the_available_ones() -> None:
    assert refused("Taxi-v4", backend="native").endswith("; available: python")
    assert "; available: python" in refused("rlframe.envs.debug_envs:identity", backend="envpool")


def test_an_unknown_backend_is_an_error() -> None:
    assert "did you mean native" in refused("CartPole-v1", backend="natve")


@pytest.mark.parametrize(
    ("id_", "module", "extra"),
    [("ALE/Pong-v5", "ale_py", "atari"), ("MinAtar/Breakout-v1", "minatar", "minatar")],
)
def test_an_id_of_a_missing_package_is_an_error_with_what_to_install(
    id_: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    message = refused(id_)
    assert message == f'env={id_} needs a package that is not installed: pip install "rlframe[{extra}]"'


@pytest.mark.parametrize("name", ["AtariEnv", "ALE/Pong-v5"])
def test_a_module_of_a_missing_package_is_an_error_with_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert refused(f"ale_py:{name}").endswith('needs a package that is not installed: pip install "rlframe[atari]"')


@pytest.mark.parametrize("id_", ["CartPol-v1", "CartPole-v7", "CartPole"])
def test_an_unknown_id_is_an_error_with_the_nearest_id(id_: str) -> None:
    message = refused(id_)
    assert f"env={id_} is not registered" in message
    assert "CartPole-v1" in message


@pytest.mark.parametrize(
    ("id_", "nearest"),
    [("Humanoid-v9", "Humanoid-v5"), ("Pong", "ALE/Pong-v5"), ("simple_spread_v3", "mpe2/simple_spread_v3")],
)
def test_the_nearest_id_is_the_newest_version_with_its_namespace(id_: str, nearest: str) -> None:
    message = refused(id_)
    assert nearest in message
    assert "Humanoid-v2" not in message
    assert "NoFrameskip" not in message


@pytest.mark.parametrize(
    ("id_", "what"),
    [
        ("tests.envs.custom:scriptd", "no scriptd; did you mean scripted"),
        ("tests.envs.custom:CONSTANT", "'CONSTANT' is 3, which is not callable"),
        ("tests.envs.nowhere:env", "No module named 'tests.envs.nowhere'"),
        ("tests.envs.custom:nothing", "returned a value of type int, not a gymnasium.Env"),
        ("tests.envs.custom:Several", "Several is not a subclass of pettingzoo.ParallelEnv or pettingzoo.AECEnv"),
        ("tests.envs.custom:several", "a value of type Several, not a pettingzoo.ParallelEnv or pettingzoo.AECEnv"),
        ("tests.envs.custom:Spaceless", "has no observation_space; set it in the environment's constructor"),
        (3, "is not a Gymnasium id"),
    ],
)
def test_a_wrong_callable_is_an_error(id_: object, what: str) -> None:
    assert what in refused(id_)


@pytest.mark.parametrize("backend", ["python", "native"])
def test_an_unknown_argument_is_named(backend: str) -> None:
    assert "sutton_barto_rewrd" in refused("CartPole-v1", backend=backend, sutton_barto_rewrd=True)


def test_an_unknown_argument_is_an_error_with_the_nearest_name() -> None:
    assert "has no argument env_kwargs.dely" in refused("rlframe.envs.debug_envs:memory", dely=3)
    assert "did you mean delay" in refused("rlframe.envs.debug_envs:memory", dely=3)
    assert "films need it" in refused("rlframe.envs.debug_envs:memory", render_mode="rgb_array")


@pytest.mark.parametrize(
    ("id_", "package", "extra"),
    [("Hopper-v5", "mujoco", "mujoco"), ("LunarLander-v3", "Box2D", "box2d")],
)
def test_a_missing_package_is_an_error_that_says_what_to_install(
    id_: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for loaded in [name for name in sys.modules if name.startswith(("gymnasium.envs.mujoco", "gymnasium.envs.box2d"))]:
        monkeypatch.delitem(sys.modules, loaded)
    message = refused(id_, backend="python")
    assert message.endswith(f'pip install "rlframe[{extra}]"')
    assert "\n" not in message


def test_each_environment_needs_a_seed() -> None:
    with pytest.raises(ValueError, match="n=2 environments"):
        make_envs(EnvConfig("CartPole-v1"), 2, [1])


def test_atari_serves_three_backends_at_most() -> None:
    pytest.importorskip("ale_py")
    assert make.backends(resolve("ALE/Pong-v5")) == ["native", "python"]


CONFIGS = [
    EnvConfig("CartPole-v1", {"max_episode_steps": 5}),
    EnvConfig("rlframe.envs.debug_envs:memory", {"delay": 2}),
    EnvConfig(debug_envs.masked_cartpole),
]


def test_configs_are_picklable() -> None:
    for config in CONFIGS:
        copy = pickle.loads(pickle.dumps(config))
        assert make_envs(copy, 1, [0]).observation_space == make_envs(config, 1, [0]).observation_space


def test_environments_need_no_torch() -> None:
    code = (
        "import sys; from rlframe.envs import EnvConfig, make_envs;"
        "make_envs(EnvConfig('CartPole-v1'), 8, range(8)); make_envs(EnvConfig('CartPole-v1'), 1, [0]);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


PLUGIN = """
import gymnasium
def register_envs():
    gymnasium.register("Boards/Row-v0", entry_point="rlframe.envs.debug_envs:identity")
"""


def test_ids_of_installed_packages_that_declare_them_need_no_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = tmp_path / "boards-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: boards\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[gymnasium.envs]\nBoards = boards_envs:register_envs\n")
    (tmp_path / "boards_envs.py").write_text(PLUGIN)
    assert "not registered" in refused("Boards/Row-v0")
    monkeypatch.syspath_prepend(tmp_path)
    assert made("Boards/Row-v0", 1).backend.startswith("python")
    del gymnasium.registry["Boards/Row-v0"]
