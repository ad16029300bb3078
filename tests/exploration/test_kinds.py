"""Every kind of exploration: greedy without noise, the same in NumPy as in torch, and its distribution by hand."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.agents import make_q_agent
from rlframe.core.errors import ConfigError
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs
from rlframe.critics import ExpectedValue
from rlframe.exploration import (
    ActionNoise,
    BoltzmannConfig,
    EpsilonConfig,
    Exploration,
    ExplorationSchedule,
    ExploreConfig,
    GaussianConfig,
    NoiseHoldConfig,
    NoisyConfig,
    NoneConfig,
    OrnsteinUhlenbeckConfig,
    OwnExplorationConfig,
    QExploration,
    StochasticConfig,
)
from rlframe.exploration.actions import HeldNoise, HeldNormal, WalkNoise
from rlframe.exploration.q import Boltzmann, Durations, HeldAction, HeldActionNoise
from rlframe.models import ModelConfig

SECOND, PUSH = ("tests.exploration.own:SecondBest", "tests.exploration.own:Push")
CHOOSE: dict[str, ExploreConfig] = {
    "epsilon": EpsilonConfig(epsilon=0.5, epsilon_last=0.9),
    "boltzmann": BoltzmannConfig(temperature=0.5, temperature_last=2.0),
    "noise_hold": NoiseHoldConfig(epsilon=0.3, epsilon_last=0.9, longest=5),
    "noisy": NoisyConfig(epsilon=0.3),
    "none": NoneConfig(),
    "own": OwnExplorationConfig(name=SECOND, level=0.5, level_last=0.9),
}
PERTURB: dict[str, ExploreConfig] = {
    "gaussian": GaussianConfig(std=0.3, std_last=0.1, clip=0.2),
    "ornstein_uhlenbeck": OrnsteinUhlenbeckConfig(sigma=0.2, sigma_last=0.4, clip=0.3),
    "noise_hold": NoiseHoldConfig(std=0.2, std_last=0.4, longest=5),
    "none": NoneConfig(),
    "stochastic": StochasticConfig(),
    "own": OwnExplorationConfig(name=PUSH, level=0.2, level_last=0.4),
}
N, A, D = 6, 4, 2
MASK = np.array([[1, 0, 1, 1], [0, 1, 1, 0]] * 3, np.int8)


def made(of: str, kind: str, masked: bool = False) -> Any:
    config = CHOOSE[kind] if of == "choose" else PERTURB[kind]
    made: Exploration = config.make_q(A, masked) if of == "choose" else config.make_noise(D)
    ExplorationSchedule(config, 100, N).apply(made, 50)
    return made


def act(part: Any, values: np.ndarray, first: Sequence[int], noise: Tree, state: Tree, xp: Any, masked: bool) -> Any:
    """One step with arrays of `xp`: actions and state as NumPy."""
    observation = {"action_mask": MASK} if masked else ()
    inputs: Any = AgentInputs(observation, (), (), np.isin(np.arange(N), first))
    values = np.where(MASK != 0, values, -np.inf).astype(np.float32) if masked else values
    level: Any = part.level
    if xp is torch:
        values, inputs, noise, state = map_tree(torch.from_numpy, (values, inputs, noise, state))
    else:
        level = as_numpy(level)
    call = part.choose if isinstance(part, QExploration) else part.perturb
    action, state = call(values, inputs, noise, state, level, xp)
    return as_numpy(action), map_tree(as_numpy, state)


def start(part: Exploration) -> Tree:
    return map_tree(as_numpy, part.initial_state(range(N)))


EACH = [("choose", kind) for kind in CHOOSE] + [("perturb", kind) for kind in PERTURB]


@pytest.mark.parametrize(
    ("of", "kind", "masked"), [(*case, False) for case in EACH] + [("choose", kind, True) for kind in CHOOSE]
)
def test_numpy_acts_as_torch_and_zero_noise_greedily_in_any_state(of: str, kind: str, masked: bool) -> None:
    part, rng = made(of, kind, masked), np.random.default_rng(0)
    one = other = start(part)
    explored = False
    for t in range(30):
        values = rng.standard_normal((N, A)) if of == "choose" else rng.uniform(-1, 1, (N, D))
        values, first = values.astype(np.float32), [t % N] if t % 3 == 0 else []
        noise, before = part.noise(rng, (N,)), one
        found, one = act(part, values, first, noise, one, np, masked)
        expected, other = act(part, values, first, noise, other, torch, masked)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, atol=1e-6)
        for x, y in zip(leaves(one), leaves(other), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, atol=1e-6)
        greedy, _ = act(part, values, [], map_tree(np.zeros_like, noise), before, np, masked)
        if of == "choose":
            best = np.where(MASK != 0, values, -np.inf).argmax(-1) if masked else values.argmax(-1)
            assert MASK[np.arange(N), found].all() or not masked or kind == "own"
        else:
            best = values
        np.testing.assert_array_equal(greedy, best)
        explored = explored or not np.array_equal(found, best)
    assert explored == (kind not in ("none", "stochastic"))


def test_the_level_of_an_own_kind_is_logged() -> None:
    config = OwnExplorationConfig(name=SECOND, level=0.5)
    assert ExplorationSchedule(config, 100, 1).metrics(config.make_q(3, False), 7) == {"algo/exploration": 0.5}


GRADED = [(of, kind) for of, kind in EACH if (CHOOSE if of == "choose" else PERTURB)[kind].graded]


def test_each_kind_with_a_last_level_is_graded() -> None:
    assert {kind for _, kind in EACH} - {kind for _, kind in GRADED} == {"noisy", "none", "stochastic"}


@pytest.mark.parametrize(("of", "kind"), GRADED)
def test_each_environment_explores_at_its_own_of_levels_that_are_spaced_logarithmically(of: str, kind: str) -> None:
    config = CHOOSE[kind] if of == "choose" else PERTURB[kind]
    part, (first, last), rng = made(of, kind), config.levels(), np.random.default_rng(0)
    levels = np.geomspace(float(first), float(last), N)  # type: ignore[arg-type]
    np.testing.assert_allclose(part.level_of(part.level, part.initial_state(range(N)), torch), levels, rtol=1e-5)
    assert part.initial_state(range(2, 4)).env.tolist() == [2, 3]
    same = chz.replace(config, **{f"{part.scale}_last": 0.0})
    alone = [same.make_q(A, False) if of == "choose" else same.make_noise(D) for _ in levels]  # one for each level
    state, states = start(part), [start(each) for each in alone]
    for each, level in zip(alone, levels, strict=True):
        each.set_level(level, level, 1)
    for _ in range(30):
        values = (rng.standard_normal((N, A)) if of == "choose" else 0.1 * np.ones((N, D))).astype(np.float32)
        noise = part.noise(rng, (N,))
        found, state = act(part, values, [], noise, state, np, False)
        for i, each in enumerate(alone):
            expected, states[i] = act(each, values, [], noise, states[i], np, False)
            np.testing.assert_allclose(found[i], expected[i], rtol=1e-4, atol=1e-6)


def test_the_kinds_of_the_guide_explore_at_the_level_of_each_environment_and_within_masks() -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/exploration.md").read_text(encoding="utf-8")
    kinds: dict[str, Any] = {}
    for code in re.findall(r"^```python\n# \w+\.py\n(.*?)^```", guide, re.DOTALL | re.MULTILINE):
        exec(code, kinds)
    second, uniform = kinds["SecondBest"](3, True, graded=True), kinds["Uniform"](3, graded=True)
    second.set_level(1.0, 0.5, 2)
    uniform.set_level(0.5, 0.25, 2)
    inputs, state = AgentInputs((), (), (), torch.tensor([True, True])), second.initial_state(range(2))
    q = torch.tensor([[1.0, -torch.inf, -torch.inf], [1.0, 3.0, 2.0]])
    for noise, expected in ((1.0, [0, 2]), (0.4, [0, 1])):
        assert second.choose(q, inputs, torch.full((2,), noise), state, second.level, torch)[0].tolist() == expected
    found, _ = uniform.perturb(torch.zeros(2, 3), inputs, torch.ones(2, 3), state, uniform.level, torch)
    np.testing.assert_allclose(found, [[0.5] * 3, [0.25] * 3])


def test_boltzmann_takes_actions_in_proportion_to_exp_of_their_values() -> None:
    part, n = Boltzmann(3, False), 20_000
    part.set_level(0.5, 0.5, 1)
    q = np.tile(np.array([0.0, 0.5, -0.2], np.float32), (n, 1))
    noise, state = part.noise(np.random.default_rng(0), (n,)), part.initial_state(range(n))
    action, _ = part.choose(q, AgentInputs((), (), (), ()), noise, state, as_numpy(part.level), np)
    expected = np.exp(q[0] / 0.5) / np.exp(q[0] / 0.5).sum()
    np.testing.assert_allclose(np.bincount(action) / n, expected, atol=0.015)


@pytest.mark.parametrize(
    ("clip", "expected"), [(math.inf, [0.1, 0.15, -0.025, 0.2]), (0.12, [0.1, 0.12, -0.025, 0.12])]
)
def test_ornstein_uhlenbeck_noise_by_hand_and_a_new_episode_starts_at_zero(clip: float, expected: list[float]) -> None:
    part = OrnsteinUhlenbeckConfig(theta=0.5, clip=clip).make_noise(1)
    part.set_level(0.1, 0.1, 1)
    state, found = part.initial_state([0]), []
    steps = [1.0, 1.0, -1.0, 2.0]
    for step, first in zip(steps, [True, False, False, True], strict=True):
        noise = WalkNoise(torch.tensor([[step]]), torch.ones(1, 1))
        inputs = AgentInputs((), (), (), torch.tensor([first]))
        action, state = part.perturb(torch.zeros(1, 1), inputs, noise, state, part.level, torch)
        found.append(round(action.item(), 6))
    assert found == expected  # the walk itself is not clipped


def test_gaussian_noise_is_clipped_before_it_is_added() -> None:
    part = GaussianConfig(std=0.5, clip=0.2).make_noise(1)
    part.set_level(0.5, 0.5, 1)
    noise, action = torch.tensor([[0.3], [-2.0], [1.0]]), torch.tensor([[0.5], [0.5], [0.9]])
    found, _ = part.perturb(action, AgentInputs((), (), (), ()), noise, part.initial_state([0]), part.level, torch)
    np.testing.assert_allclose(found.numpy(), [[0.65], [0.3], [1.0]], rtol=1e-6)


@pytest.mark.parametrize(("mu", "longest"), [(2.0, 4), (0.0, 3), (2.0, 1), (50.0, 10_000)])
def test_holds_last_as_long_as_the_truncated_zeta_distribution_says(mu: float, longest: int) -> None:
    n, support = 20_000, np.arange(1, longest + 1, dtype=float)
    drawn = Durations(mu, longest).draw(np.random.default_rng(0), (n,))
    expected = support**-mu / (support**-mu).sum()
    found = np.bincount(drawn, minlength=longest + 1)[1:] / n
    assert drawn.min() >= 1
    assert drawn.max() <= longest
    np.testing.assert_allclose(found, expected, atol=0.015)


def held(part: Any, noises: Sequence[Any], firsts: Sequence[bool], values: Any, observation: Any = ()) -> list[float]:
    """The actions of one environment."""
    part.set_level(0.5, 0.5, 1)
    state, found = part.initial_state([0]), []
    call = part.choose if isinstance(part, QExploration) else part.perturb
    for noise, first in zip(noises, firsts, strict=True):
        inputs = AgentInputs(observation, (), (), torch.tensor([first]))
        action, state = call(values, inputs, noise, state, part.level, torch)
        found.append(round(float(action.reshape(())), 6))
    return found


def test_an_action_is_held_for_its_duration_but_not_into_the_next_episode() -> None:
    def noise(uniform: float, action: int, duration: int) -> Any:
        numbers = torch.tensor([uniform]), torch.tensor([action]), torch.tensor([duration])
        return HeldActionNoise(*numbers)

    part = HeldAction(3, False, Durations(2.0, 5))
    quiet = noise(0.1, 1, 9)  # below 1 - epsilon: begins nothing
    noises = [noise(0.9, 2, 3), noise(0.9, 1, 4), quiet, quiet, noise(0.9, 1, 5), quiet, quiet]
    firsts = [True, False, False, False, False, False, True]
    assert held(part, noises, firsts, torch.tensor([[1.0, 0.0, 0.0]])) == [2, 2, 2, 0, 1, 1, 0]


def test_a_held_action_that_becomes_forbidden_is_let_go() -> None:
    part = HeldAction(3, True, Durations(2.0, 5))
    part.set_level(0.5, 0.5, 1)
    state = part.initial_state([0])
    state.own.held[0], state.own.left[0] = 2, 4
    quiet = HeldActionNoise(torch.tensor([0.1]), torch.tensor([7]), torch.tensor([3]))
    for mask, expected in (([1, 0, 1], 2), ([1, 1, 0], 1), ([1, 1, 1], 1)):
        inputs = AgentInputs({"action_mask": torch.tensor([mask])}, (), (), torch.tensor([False]))
        q = torch.where(torch.tensor([mask]) != 0, torch.tensor([[0.0, 1.0, 0.5]]), -torch.inf)
        action, state = part.choose(q, inputs, quiet, state, part.level, torch)
        assert action.tolist() == [expected]


def test_noise_on_actions_is_held_for_its_duration() -> None:
    def noise(normal: float, duration: int) -> Any:
        return HeldNormal(torch.tensor([[normal]]), torch.tensor([duration]))

    part = HeldNoise(1, Durations(2.0, 5))
    noises = [noise(1.0, 2), noise(0.2, 1), noise(-0.4, 9), noise(0.6, 1), noise(0.8, 1)]
    firsts = [True, False, False, False, True]
    assert held(part, noises, firsts, torch.zeros(1, 1)) == [0.5, 0.5, -0.2, -0.2, 0.4]


@pytest.mark.parametrize(
    ("config", "explores"),
    [
        (EpsilonConfig(epsilon=0.0), 0.0),
        (EpsilonConfig(epsilon=1.0), 1 - 1 / A),
        (BoltzmannConfig(temperature=0.0), 0.0),
        (BoltzmannConfig(temperature=1e30), 1 - 1 / A),
        (NoiseHoldConfig(epsilon=0.0), 0.0),
        (NoiseHoldConfig(epsilon=1.0, longest=1), 1 - 1 / A),
    ],
)
def test_extreme_levels_are_greedy_or_uniform(config: ExploreConfig, explores: float) -> None:
    part, n = config.make_q(A, False), 4_000
    ExplorationSchedule(config, 100, 1).apply(part, 0)
    q = np.tile(np.array([1.0, 2.0, 3.0, -4.0], np.float32), (n, 1))
    inputs, noise = AgentInputs((), (), (), np.zeros(n, bool)), part.noise(np.random.default_rng(0), (n,))
    state = map_tree(as_numpy, part.initial_state(range(n)))
    action, _ = part.choose(q, inputs, noise, state, as_numpy(part.level), np)
    assert np.mean(action != 2) == pytest.approx(explores, abs=0.03 * bool(explores))


@pytest.mark.parametrize(
    ("make", "name"), [(GaussianConfig, "std"), (NoiseHoldConfig, "std"), (OrnsteinUhlenbeckConfig, "sigma")]
)
def test_deviations_whose_noise_would_overflow_are_refused(make: Any, name: str) -> None:
    for key in (name, f"{name}_last"):
        with pytest.raises(ConfigError, match=f"algo.explore.{key}=1e.31 must be from 0 to 1e.30"):
            make(**{key: 1e31})


def test_an_unused_exploration_carries_no_state() -> None:
    for config in (EpsilonConfig(epsilon=0.1), BoltzmannConfig(), NoneConfig()):
        assert not leaves(config.make_q(3, False).initial_state(range(4)))
    parts: list[ActionNoise] = [c.make_noise(2) for c in (GaussianConfig(std=0.1), StochasticConfig(), NoneConfig())]
    assert not any(leaves(part.initial_state(range(4))) for part in parts)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("kind", ["epsilon", "boltzmann", "none"])
def test_how_probable_an_action_was_is_how_often_it_is_chosen(kind: str, masked: bool) -> None:
    part, rng, n = made("choose", kind, masked), np.random.default_rng(0), 4_000
    q = rng.standard_normal((N, A)).astype(np.float32)
    state = map_tree(as_numpy, part.initial_state(range(N)))
    known = np.where(MASK != 0, q, -np.inf) if masked else q
    chosen = np.stack([act(part, q, (), part.noise(rng, (N,)), state, np, masked)[0] for _ in range(n)])
    level = np.broadcast_to(part.level_of(as_numpy(part.level), state, np), N)
    p = np.exp(part.log_probabilities(known.astype(np.float64), level, np))
    assert np.allclose(p, (chosen[..., None] == np.arange(A)).mean(0), atol=4 * math.sqrt(0.25 / n))
    assert not masked or (p[MASK == 0] == 0).all()
    in_torch = part.log_probabilities(torch.from_numpy(known), torch.from_numpy(level.copy()), torch)
    assert np.allclose(in_torch.exp().numpy(), p, atol=1e-6)


def test_how_probable_actions_of_held_or_drawn_weights_were_is_not_known() -> None:
    q, level = np.zeros((N, A)), np.full(N, 0.3)
    space, model = spaces.Box(-1, 1, (3,)), ModelConfig(hidden=(4,))
    agent = make_q_agent(space, spaces.Discrete(A), model, ExpectedValue(), NoisyConfig(epsilon=0.3))
    assert agent.exploration.log_probabilities(q, level, np) is None
    assert made("choose", "noise_hold").log_probabilities(q, level, np) is None
    assert made("choose", "own").log_probabilities(q, level, np) is None
