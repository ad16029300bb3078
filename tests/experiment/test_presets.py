"""Presets that do not exist or cannot be read."""

from pathlib import Path

import pytest

from rlframe.algos import PRESETS
from rlframe.core.errors import ConfigError
from rlframe.experiment.presets import load_preset, preset_names
from rlframe.launch import main


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"config: [1", "is not valid YAML: .* line 1, column 9"),
        (b"config: {env: CartPole-v1, [: }", "is not valid YAML: .* line 1, column 29"),
        (b"config: \xff", "is not valid YAML"),
        (b"config: " + b"[" * 1_000, "is not valid YAML"),
        (b"config: 3", "has no mapping `config:`"),
        (b"", "has no mapping `config:`"),
        (
            b"config: {}\nrepeat: 5",
            "unknown key repeat beside `config:`; settings stand below it; did you mean repeats",
        ),
        (
            b"config: {}\nsweeps: {seed: 1}",
            "unknown key sweeps beside `config:`; settings stand below it; did you mean sweep",
        ),
        (
            b"config: {}\nexpected: 1",
            "unknown key expected beside `config:`; settings stand below it; did you mean expect",
        ),
        (b"config: {}\nseed: 5", "unknown key seed beside `config:`; settings stand below it"),
        (b"config: {}\nalgo.clip: 5", "unknown key algo.clip beside `config:`; settings stand below it"),
        (b"config: {}\nnull: 5", "unknown key None beside `config:`; settings"),
        (b"config: {}\nretries: 5", "unknown key retries beside `config:`; settings"),
        (b"sweep: {seed: [1]}\njunk: 1\nconfig: {}", "unknown key junk beside `config:`"),
        (b"config: {repeats: 2}\nrepeats: 3", "repeats stands in `config:` and beside it"),
    ],
)
def test_an_invalid_preset_is_refused_with_file_and_line(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"mine.yaml:? {message}"):
        load_preset(str(path))
    assert main([f"experiment={path}"]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_preset_has_the_keys_of_the_one_that_it_is_like_and_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("like: classic/ppo_cartpole\nconfig: {env: Acrobot-v1, algo.clip: 0.1}")
    assert load_preset(str(path)) == load_preset("classic/ppo_cartpole") | {"env": "Acrobot-v1", "algo.clip": 0.1}
    (tmp_path / "other.yaml").write_text(f"like: {path}\nconfig: {{}}")
    path.write_text(f"like: {tmp_path / 'other.yaml'}\nconfig: {{}}")
    with pytest.raises(ConfigError, match=r"other\.yaml: like: .*mine\.yaml leads back to itself"):
        load_preset(str(path))


def test_presets_with_images_or_streams_have_the_relu_that_they_were_measured_with() -> None:
    seen = 0
    for name in preset_names():
        keys = load_preset(name)
        streams = keys.get("algo.dueling") or "noisy" in str(keys.get("algo.explore")) or "implicit" in keys.values()
        if str(keys["env"]).startswith(("ALE/", "MinAtar/")) or streams:
            assert keys.get("model.activation", "relu") == "relu", name
            seen += 1
    assert seen > 40


def test_a_mistyped_name_gets_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*classic/ppo_cartpole"):
        load_preset("classic/ppo_cartpol")


def test_a_run_in_place_of_a_preset_gets_the_path_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is a run, not a preset; experiment=.*/params.json trains it again"):
        load_preset(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mujoco/zzzzqqq", r"no preset 'mujoco/zzzzqqq'; there are mujoco/a2c_ant, .*, mujoco/xqc_walker2d$"),
        ("zzzz", r"no preset 'zzzz'; there are async/\.\.\., atari/\.\.\., "),
    ],
)
def test_a_name_like_no_other_gets_those_of_its_folder_or_the_folders(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_preset(name)


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_of_the_field_that_is_settings_of_an_algorithm_leads_to_a_preset(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = load_preset(PRESETS[name])
    assert f"{name}_" in PRESETS[name] or PRESETS[name].startswith(f"{name}/") or name == "apex"
    assert preset["algo"] not in PRESETS
    assert main([f"algo={name}", f"env={preset['env']}", "dry_run=true"]) == 2
    remedy = f"begin with a preset of it: experiment={PRESETS[name]}, with env=NAME for another environment"
    assert remedy in capsys.readouterr().err
