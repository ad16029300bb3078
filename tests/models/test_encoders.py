"""Encoders: every observation space becomes features, whatever the leading dimensions and the layout of pixels."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces import Space
from torch import Tensor, nn

from rlframe.algos import dqn, maddpg, qmix
from rlframe.core.errors import ConfigError, warn_once
from rlframe.core.spaces import zeros
from rlframe.core.struct import map_tree
from rlframe.kernels.device import learning_in
from rlframe.models import ModelConfig
from rlframe.models.encoders import Encoder, Image, is_image, make_encoder
from rlframe.models.network import Linear
from tests.fork_server import run_python


def pixels(*shape: int, dtype: Any = np.uint8, high: float = 255) -> spaces.Box:
    return spaces.Box(0, high, shape, dtype)


SPACES: dict[str, Space] = {
    "vector": spaces.Box(-1, 1, (3,)),
    "number": spaces.Box(-1, 1, ()),
    "matrix": spaces.Box(-1, 1, (2, 3)),
    "float64": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "integers": spaces.Box(-5, 5, (3,), np.int64),
    "bytes": pixels(128),
    "discrete": spaces.Discrete(4, start=2),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_discrete_2": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multi_binary": spaces.MultiBinary(3),
    "small_grid": pixels(5, 5, 3),
    "grey": pixels(40, 40),
    "image_hwc": pixels(40, 40, 3),
    "image_chw": pixels(3, 40, 40),
    "small_image": pixels(10, 12, 3),
    "stack_hwc": pixels(4, 40, 40, 3),
    "stack_chw": pixels(4, 3, 40, 40),
    "float_image": pixels(16, 16, 3, dtype=np.float32, high=1),
    "dict": spaces.Dict({"camera": pixels(40, 40, 3), "speed": spaces.Box(-1, 1, (2,)), "gear": spaces.Discrete(3)}),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Dict({"x": spaces.Box(-1, 1, (2,))}))),
}


def sample(space: Space, *lead: int) -> Any:
    """Canonical observations with leading dimensions."""
    rng = np.random.default_rng(0)

    def fill(x: np.ndarray) -> Tensor:
        if x.dtype.kind == "f":
            return torch.from_numpy(rng.random(x.shape).astype(x.dtype))
        return torch.from_numpy(rng.integers(0, 200 if x.dtype == np.uint8 else 2, x.shape).astype(x.dtype))

    return map_tree(fill, zeros(space, lead))


@pytest.mark.parametrize("name", SPACES)
def test_rows_and_sequences_have_the_same_features(name: str) -> None:
    torch.manual_seed(0)
    encoder = make_encoder(SPACES[name], ModelConfig(hidden=(8,), image_hidden=(8,)))
    observation = sample(SPACES[name], 3, 2)
    sequence = encoder(observation)
    assert sequence.shape == (3, 2, encoder.size)
    assert sequence.dtype == torch.float32
    rows = [encoder(map_tree(lambda x, t=t: x[t], observation)) for t in range(3)]
    torch.testing.assert_close(torch.stack(rows), sequence, rtol=1e-5, atol=1e-6)
    assert not torch.equal(sequence[0], sequence[1]), "the features do not depend on the observation"


@pytest.mark.parametrize("name", ["image", "stack"])
def test_one_picture_has_the_same_features_in_both_layouts(name: str) -> None:
    config = ModelConfig(image_hidden=(8,))
    torch.manual_seed(0)
    hwc = make_encoder(SPACES[f"{name}_hwc"], config)
    torch.manual_seed(0)
    chw = make_encoder(SPACES[f"{name}_chw"], config)
    picture = sample(SPACES[f"{name}_hwc"], 2)
    torch.testing.assert_close(hwc(picture), chw(picture.movedim(-1, -3)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "channels_height_width"),
    [
        ((84, 84, 3), (3, 84, 84)),
        ((4, 84, 84), (4, 84, 84)),
        ((84, 84, 12), (12, 84, 84)),  # four colour frames side by side
        ((84, 84, 2), (2, 84, 84)),
        ((12, 84, 84), (12, 84, 84)),
        ((210, 160, 3), (3, 210, 160)),
        ((3, 210, 160), (3, 210, 160)),
        ((4, 84, 84, 1), (4, 84, 84)),
        ((4, 1, 84, 84), (4, 84, 84)),
        ((8, 8, 17), (17, 8, 8)),  # planes of a board
        ((84, 84), (1, 84, 84)),
    ],
)
def test_the_layout_of_an_image_is_found(shape: tuple[int, ...], channels_height_width: tuple[int, ...]) -> None:
    assert is_image(pixels(*shape))
    image = Image(pixels(*shape))
    assert image.shape == channels_height_width
    assert image(torch.zeros(2, 5, *shape)).shape == (2, 5, *channels_height_width)


@pytest.mark.parametrize(
    "space", [pixels(7, 7, 3), pixels(128), spaces.Box(-1, 1, (20, 30)), spaces.Discrete(3), spaces.MultiBinary(3)]
)
def test_vectors_and_small_grids_are_no_images(space: Space) -> None:
    assert not is_image(space)


@pytest.mark.parametrize("kind", ["nature", "impala", "mlp"])
def test_bytes_are_seen_as_their_share_of_the_brightest(kind: str) -> None:
    space, of_floats = pixels(40, 40, 3), pixels(40, 40, 3, dtype=np.float32, high=1)
    encoders = []
    for each in (space, of_floats):
        torch.manual_seed(0)
        encoders.append(make_encoder(each, ModelConfig(encoder=kind, image_hidden=(8,), hidden=(8,))))
    x = torch.randint(0, 256, (2, 40, 40, 3), dtype=torch.uint8)
    torch.testing.assert_close(encoders[0](x), encoders[1](x / 255), rtol=1e-4, atol=1e-5)


def test_convolutions_in_bf16_are_near_those_in_fp32_and_parameters_keep_their_type() -> None:
    encoder = make_encoder(pixels(40, 40, 3), ModelConfig(image_hidden=(8,)))
    x, found = torch.randint(0, 256, (6, 40, 40, 3), dtype=torch.uint8), {}
    for precision in ("fp32", "bf16"):
        encoder.zero_grad()
        with learning_in(precision):
            features = encoder(x)
            features.square().sum().backward()
        gradients = [p.grad for p in encoder.parameters()]
        assert features.dtype == torch.float32
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        found[precision] = torch.cat([features.flatten(), *[gradient.flatten() for gradient in gradients]]).detach()
    difference = (found["bf16"] - found["fp32"]).norm() / found["fp32"].norm()
    assert 1e-5 < difference < 0.05
    with learning_in("bf16"), torch.inference_mode():
        acting = encoder(x)
    with torch.inference_mode():
        assert torch.equal(acting, encoder(x)), "acting is in float32"


@pytest.mark.parametrize(("high", "dtype", "scale"), [(255, np.float32, 1 / 255), (1, np.float32, 1), (1, np.uint8, 1)])
def test_pixels_are_scaled_by_the_brightness_that_the_space_declares(high: float, dtype: Any, scale: float) -> None:
    assert Image(pixels(8, 8, 3, dtype=dtype, high=high)).scale == pytest.approx(scale)


def test_an_mlp_on_an_image_sees_the_same_scale() -> None:
    encoder = make_encoder(pixels(40, 40, 3), ModelConfig(encoder="mlp", hidden=()))
    assert encoder(torch.full((1, 40, 40, 3), 255, dtype=torch.uint8)).max().item() == pytest.approx(1.0)


def test_classes_become_one_hot_side_by_side() -> None:
    encoder = make_encoder(spaces.MultiDiscrete([2, 3]), ModelConfig(hidden=()))
    torch.testing.assert_close(encoder(torch.tensor([[1, 2]])), torch.tensor([[0.0, 1, 0, 0, 1]]))


def test_a_dict_puts_every_part_into_the_features() -> None:
    space = SPACES["dict"]
    torch.manual_seed(0)
    encoder = make_encoder(space, ModelConfig(image_hidden=(8,)))
    before = encoder(map_tree(torch.from_numpy, zeros(space, (1,))))
    for key in ("camera", "speed", "gear"):
        changed = map_tree(torch.from_numpy, zeros(space, (1,)))
        changed[key] = changed[key] + 1
        assert not torch.allclose(encoder(changed), before), key


@pytest.mark.parametrize("space", [spaces.Dict(a=spaces.Box(-1, 1, (3,))), spaces.Tuple([spaces.Box(-1, 1, (3,))])])
def test_a_dict_or_tuple_of_one_vector_has_that_vectors_features(space: Space) -> None:
    encoder, x = Encoder(space, ModelConfig(hidden=(4,))), torch.rand(2, 3)
    observation = {"a": x} if isinstance(space, spaces.Dict) else (x,)
    torch.testing.assert_close(encoder(observation), encoder.mlp(x))


def test_a_small_image_gets_a_network_that_fits() -> None:
    encoder = make_encoder(pixels(10, 12, 3), ModelConfig())
    assert isinstance(encoder, Encoder)
    assert encoder.size == 512
    with pytest.raises(ConfigError, match=r"nature needs images of 36 pixels per side, got 10x12; use impala"):
        make_encoder(pixels(10, 12, 3), ModelConfig(encoder="nature"))
    make_encoder(pixels(36, 36, 1), ModelConfig(encoder="nature"))


def test_layers_are_orthogonal_with_gain_root_two_and_no_bias() -> None:
    encoder = make_encoder(spaces.Box(-1, 1, (3,)), ModelConfig(hidden=(16, 8)))
    linear = [module for module in encoder.modules() if isinstance(module, Linear)]
    assert [tuple(layer.weight.shape) for layer in linear] == [(16, 3), (8, 16)]
    for layer in linear:
        assert not layer.bias.any()
        torch.testing.assert_close(
            torch.linalg.svdvals(layer.weight), torch.full((min(layer.weight.shape),), math.sqrt(2))
        )


class Mine(nn.Module):
    """A user's encoder: observation [N, ...] to [N, 2]."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.linear = nn.Linear(math.prod(space.shape or ()), 2)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 3, "exactly one leading dimension"
        return self.linear(x.flatten(1))


class OfDict(nn.Module):
    def __init__(self, space: Space) -> None:
        super().__init__()

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        return torch.cat([observation["a"], observation["b"]], -1)


class Wrong(Mine):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:1]


class Paired(Mine):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Doubled(Mine):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


HERE = "tests.models.test_encoders"


def test_a_users_module_is_named_by_module_and_class() -> None:
    encoder = make_encoder(spaces.Box(-1, 1, (2, 3)), ModelConfig(encoder=f"{HERE}:Mine"))
    assert encoder.size == 2
    x = torch.rand(3, 4, 2, 3)
    torch.testing.assert_close(encoder(x), torch.stack([encoder(row) for row in x]))


def test_a_users_module_takes_dict_observations() -> None:
    space = spaces.Dict({"a": spaces.Box(-1, 1, (1,)), "b": spaces.Box(-1, 1, (2,))})
    encoder = make_encoder(space, ModelConfig(encoder=f"{HERE}:OfDict"))
    assert encoder(sample(space, 4, 5)).shape == (4, 5, 3)


def test_networks_that_see_a_whole_team_have_encoders_of_their_own() -> None:
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Box(-1, 1, (3,))})
    model, action = ModelConfig(encoder=f"{HERE}:OfDict"), spaces.Box(-1, 1, (1,))
    mixed = qmix.Config().make_agent(space, spaces.Discrete(2), model, 0)
    assert isinstance(qmix.Config().make_mixer(mixed, 2), qmix.Monotonic)
    maddpg.Config().make_joint_critic(maddpg.Config().make_agent(space, action, model, 0), 2)


def test_a_users_file_is_named_by_path_and_class(tmp_path: Path) -> None:
    (tmp_path / "my_encoder.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, space):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(3, 7)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
    )
    script = (
        "from gymnasium import spaces; from rlframe.models import ModelConfig; "
        "from rlframe.models.encoders import make_encoder; "
        "print(make_encoder(spaces.Box(-1, 1, (3,)), ModelConfig(encoder='./my_encoder.py:Net')).size)"
    )
    done = run_python([sys.executable, "-c", script], cwd=tmp_path, timeout=60)
    assert done.stdout.strip() == "7", done.stderr


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ("natur", r"model.encoder='natur' is not one of auto, mlp, nature, impala.*module:Class"),
        (f"{HERE}:Mina", r"has no Mina; did you mean Mine"),
        ("no.such_module:Net", r"No module named 'no'; write package.module:name"),
        ("./no_such_file.py:Net", r"no_such_file.py does not exist"),
        (f"{HERE}:Wrong", r"Wrong maps two observations to \(1, 2\); it must map \[N, ...\] to features \[N, F\]"),
        (f"{HERE}:Paired", r"Paired maps two observations to a tuple; it must map \[N, ...\] to features \[N, F\]"),
        (f"{HERE}:Doubled", r"Doubled returns features of torch.float64; make them torch.float32"),
    ],
)
def test_an_encoder_that_cannot_be_had_is_refused_readably(encoder: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_encoder(spaces.Box(-1, 1, (2, 3)), ModelConfig(encoder=encoder))


class Unregistered(Mine):
    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self.hidden = [nn.Linear(2, 2)]
        self.again = [self.linear]  # learned and saved by another name
        self.activations = {"relu": nn.ReLU()}
        self.teacher = [nn.Linear(2, 2).requires_grad_(False)]


def test_layers_in_a_plain_list_are_named_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    make_encoder(spaces.Box(-1, 1, (2, 3)), ModelConfig(encoder=f"{HERE}:Unregistered"))
    assert [record.getMessage() for record in caplog.records] == [
        "what Unregistered.hidden holds is neither learned nor saved; make it an nn.ModuleList"
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_is_not_a_number_stays_so_through_convolutions(precision: str, learns: bool, sign: float) -> None:
    x = torch.randint(0, 256, (6, 40, 40, 4), dtype=torch.uint8)
    for name in ("0.1.0.weight", "0.1.2.weight", "0.1.4.bias"):
        encoder = make_encoder(pixels(40, 40, 4), ModelConfig(image_hidden=(64,)))
        with torch.no_grad():
            encoder.get_parameter(f"image_leaves.{name}").view(-1)[0] = sign * torch.nan
        with learning_in(precision), torch.set_grad_enabled(learns):
            assert encoder(x).isnan().any(), name


def test_a_board_is_seen_by_convolutions_only_if_kernels_say_so() -> None:
    """6 x 7 places of two kinds: windows of 4 x 4 give 3 x 4 places, of 2 x 2 over these 2 x 3."""
    board = spaces.Box(0, 1, (6, 7, 2), np.int8)
    asked = ModelConfig(encoder="nature", channels=(8, 5), kernels=(4, 2), strides=(1, 1), image_hidden=(3,))
    encoder = make_encoder(board, asked)
    assert [tuple(x.shape) for x in encoder.parameters() if x.dim() == 4] == [(8, 2, 4, 4), (5, 8, 2, 2)]
    assert encoder(sample(board, 2)).shape == (2, 3)
    assert not make_encoder(board, ModelConfig()).image_leaves
    dueling = dqn.Config(dueling=True).make_agent(board, spaces.Discrete(2), asked).model
    assert dueling.trunk.size == 30, "image_hidden is that of the streams"
    assert [tuple(x.shape) for x in dueling.advantage.parameters() if x.dim() == 2] == [(3, 30), (2, 3)]
    with pytest.raises(ConfigError, match="needs images"):
        make_encoder(board, ModelConfig(encoder="nature"))


class Observing(nn.Module):
    """An encoder that waits for a call which only whole models get."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, observation: Tensor) -> Tensor:
        return self.layer(observation)

    def observe(self, observation: Tensor) -> None:
        raise AssertionError("called")


def test_observe_of_an_encoder_is_refused_as_it_would_never_be_called() -> None:
    config = ModelConfig(encoder=f"{__name__}:Observing")
    with pytest.raises(ConfigError, match=r"Observing\.observe is called only of a PolicyModel; .*if self\.training"):
        make_encoder(spaces.Box(-1, 1, (3,)), config)
