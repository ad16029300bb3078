"""Exported policies and load_policy act like the agent on observations of environments."""

import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rlframe
from rlframe import export, launch
from rlframe.algos import dqn, td3
from rlframe.core.struct import leaves
from rlframe.deploy.export import FlatGreedy, _difference, trace
from rlframe.envs import EnvConfig, EnvOptions, debug_envs
from rlframe.evaluation.policy import Policy
from rlframe.evaluation.team_policy import policy_of
from rlframe.models import ModelConfig
from tests.agents import test_own_actor as own_actors
from tests.agents import test_own_q_network as own_q_networks
from tests.samplers.made import agent_for

SLOW = pytest.mark.slow
SMALL = ["runner=minibatch_rl", "runner.n_steps=64", "runner.log_interval_steps=64", "sampler=serial"]
SMALL += ["sampler.batch_T=8", "sampler.batch_B=4", "model.hidden=[8]"]
PPO = ["algo=ppo", "algo.minibatches=1", "algo.epochs=1"]
REPLAY = ["algo.learning_starts=16", "algo.batch_size=8", "algo.replay.size=128", "algo.replay_ratio=1"]
PROBE = "env=rlframe.envs.debug_envs:identity"
MASKED = "env=rlframe.envs.debug_envs:masked"
PARAMETRIC = ["env=rlframe.envs.debug_envs:hidden_cartpole", "env_kwargs.n=5", "model.action_embedding=4"]
SEQUENCES = ["algo.learning_starts=16", "algo.batch_size=2", "algo.burn_in=2", "algo.learn_T=4", "algo.replay.size=128"]
TRUSTED = ["env=tests.envs.resumable:Pictures", "model.image_hidden=[8]"]
TRANSFORMER = ["model.memory=transformer", "model.memory_size=8", "model.memory_window=5"]
RUNS = {
    "ppo": [*PPO, "env=CartPole-v1"],
    "normalised": [*PPO, "env=Pendulum-v1", "model.normalize_observation=true"],
    "squashed": [*PPO, "env=Pendulum-v1", "model.distribution=squashed_gaussian"],
    "beta": [*PPO, "env=Pendulum-v1", "model.distribution=beta"],
    "lstm": [*PPO, "env=CartPole-v1", "model.memory=lstm", "model.memory_size=8", "model.feed_back=true"],
    "transformer": [*PPO, "env=CartPole-v1", *TRANSFORMER, "model.memory_layers=2", "model.feed_back=true"],
    "r2d1_transformer": ["algo=r2d1", *SEQUENCES, "env=CartPole-v1", *TRANSFORMER],
    "layer_norm": [*PPO, "env=Pendulum-v1", "model.norm=layer", "model.state_dependent_std=true"],
    "sac_layer_norm": ["algo=sac", *REPLAY, "env=Pendulum-v1", "model.norm=layer"],
    "dict": [*PPO, PROBE, "env_kwargs.action=dict", "env_kwargs.length=5", "model.feed_back=true"],
    "shifted": [*PPO, PROBE, "env_kwargs.action=discrete_start", "env_kwargs.length=5"],
    "bits": [*PPO, PROBE, "env_kwargs.action=tuple", "env_kwargs.length=5"],
    "dqn": ["algo=dqn", *REPLAY, "env=CartPole-v1", "algo.dueling=true", "explore=noisy", "algo.value=quantile"],
    "implicit": ["algo=dqn", *REPLAY, MASKED, "algo.dueling=true", "explore=noisy", "algo.value=implicit"],
    "sac": ["algo=sac", *REPLAY, "env=Pendulum-v1", "model.normalize_observation=true"],
    "masked": [*PPO, MASKED],
    "masked_dqn": ["algo=dqn", *REPLAY, MASKED],
    "parametric": [*PPO, *PARAMETRIC, "env_kwargs.masked=true", "model.memory=lstm", "model.memory_size=8"],
    "parametric_dqn": ["algo=dqn", *REPLAY, *PARAMETRIC, "explore=noisy", "algo.value=categorical"],
    "masked_sac": ["algo=sac", *REPLAY, MASKED],
    "td3": ["algo=td3", *REPLAY, "env=Pendulum-v1"],
    "ppo_gsde": [*PPO, "env=Pendulum-v1", "explore=gsde", "model.memory=gru", "model.memory_size=8"],
    "sac_gsde": ["algo=sac", *REPLAY, "env=Pendulum-v1", "explore=gsde"],
    "ddpg_parameter_noise": ["algo=ddpg", *REPLAY, "env=Pendulum-v1", "explore=parameter_noise"],
    "r2d1": ["algo=r2d1", *SEQUENCES, "env=CartPole-v1", "model.memory=gru", "model.memory_size=8"],
}
FAST = ("dqn", "shifted")
IMAGES = {  # slow to trace
    "pictures": [*PPO, *TRUSTED, "model.memory=gru", "model.memory_size=8"],
    "dqn_pictures": ["algo=dqn", *REPLAY, *TRUSTED],
    "btr_pictures": [
        "algo=dqn",
        *REPLAY,
        *TRUSTED,
        "model.encoder=impala",
        "model.spectral_norm=true",
        "model.image_pool=2",
    ],
    "ppo_atari": [*PPO, "env=ALE/Pong-v5"],
    "dqn_atari": ["algo=dqn", *REPLAY, "env=ALE/Pong-v5"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            assert launch.main([f"log_dir={folder}", *SMALL, *(RUNS | IMAGES)[name]]) == 0
            made[name] = folder / "run_0"
        return made[name]

    return run


def test_a_file_of_another_run_is_replaced_only_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.pt2").write_text("another")
    assert export.main([str(tmp_path / "run_0")]) == 2
    assert "policy.pt2 exists, perhaps of another run; replace it by out=policy.pt2" in capsys.readouterr().err
    assert (tmp_path / "policy.pt2").read_text() == "another"


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        ([2e4, -1.0], [2e4, -1.002], 1e-7),  # of 20,000
        ([0.5, -0.5], [0.5, -0.25], 0.25),
        ([0.5, 1.0], [0.5, math.nan], math.inf),
        ([math.nan], [math.nan], math.inf),
    ],
)
def test_a_difference_is_relative_to_wide_actions_and_none_hides_as_nan(
    expected: list[float], found: list[float], difference: float
) -> None:
    assert _difference(np.array(expected, np.float32), np.array(found)) == pytest.approx(difference, rel=1e-3)
    assert _difference(np.array([30_000]), np.array([30_001])) == 1, "a choice is right or wrong"


def test_a_file_that_acts_differently_is_not_kept_and_an_old_one_is(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs("shifted")
    monkeypatch.setattr("rlframe.deploy.export._difference", lambda *_: 0.5)
    (tmp_path / "policy.pt2").write_text("another")
    assert export.main([str(run), f"out={tmp_path / 'policy.pt2'}"]) == 1
    assert "the exported policy acts differently, by 0.5" in capsys.readouterr().err
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("policy.pt2", "another")]


@pytest.mark.filterwarnings("ignore")  # of the exporters
@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=SLOW) for name in RUNS])
def test_an_exported_program_acts_as_the_agent(
    runs: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "policy.pt2"
    assert export.main([str(runs(name)), f"out={out}"]) == 0, capsys.readouterr().err
    assert "1,000 observations" in capsys.readouterr().out
    program = torch.export.load(out).module()
    assert not any(x.requires_grad for x in program.parameters()), "its actions need no detach()"


def test_a_program_needs_nothing_that_only_critics_see() -> None:
    space = spaces.Dict({"seen": spaces.Box(-1, 1, (3,)), "privileged": spaces.Box(-1, 1, (2,))})
    flat = FlatGreedy(Policy(agent_for(space, spaces.Box(-1, 1, (2,))), space, spaces.Box(-1, 1, (2,))).greedy)
    assert flat.inputs == ["observation_seen"]
    actions = trace(flat).module()(torch.zeros(7, 3))
    assert [x.shape for x in actions] == [(7, 2)]


@pytest.mark.filterwarnings("ignore")  # of the exporters
@pytest.mark.parametrize("kind", ["actor", "q_network"])
def test_networks_of_your_own_are_exported_for_batches_of_any_size(kind: str) -> None:
    config = own_actors.with_net(td3)() if kind == "actor" else own_q_networks.with_net(dqn, 3)()
    observed, done = own_actors.VECTOR, own_actors.BOX if kind == "actor" else spaces.Discrete(3)
    flat = FlatGreedy(Policy(config.make_agent(observed, done, ModelConfig(), 0), observed, done).greedy)
    program = trace(flat).module()
    x = torch.linspace(-1, 1, 7).unsqueeze(-1)
    torch.testing.assert_close(program(x), list(flat(x)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["ppo", *(pytest.param(name, marks=SLOW) for name in ("normalised", "lstm", "transformer", "dqn", "sac"))]
)
def test_an_onnx_file_acts_as_the_agent(
    runs: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    out = tmp_path / "policy.onnx"
    assert export.main([str(runs(name)), "format=onnx", f"out={out}"]) == 0, capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["policy.onnx"], "it holds the weights"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IMAGES)
def test_policies_for_images_are_exported_in_both_formats_and_loaded(runs: Any, name: str, tmp_path: Path) -> None:
    if "atari" in name:
        pytest.importorskip("ale_py")
    forms = ["torch", *(["onnx"] if find_spec("onnxscript") and find_spec("onnxruntime") else [])]
    for form in forms:
        out = tmp_path / ("policy.onnx" if form == "onnx" else "policy.pt2")
        assert export.main([str(runs(name)), f"format={form}", f"out={out}", "trust=true"]) == 0
    policy = rlframe.load_policy(runs(name), trust=True)
    assert policy.action_space.contains(int(policy.act(policy.observation_space.sample())))


def test_without_the_extra_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert export.main([str(tmp_path), "format=onnx"]) == 2
    assert 'pip install "rlframe[onnx]"' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ppo", "sac", "lstm", "dqn"])
def test_a_loaded_policy_acts_on_one_observation_as_on_a_batch(runs: Any, name: str) -> None:
    policy = rlframe.load_policy(runs(name))
    env = gymnasium.make("Pendulum-v1" if name == "sac" else "CartPole-v1")
    observation, _ = env.reset(seed=0)
    for _ in range(5):
        policy.reset()
        batch = policy.act(np.stack([observation] * 3))
        policy.reset()
        action = policy.act(observation)
        assert env.action_space.contains(action if action.shape else int(action))
        np.testing.assert_allclose(batch, np.stack([action] * 3), atol=1e-5)
        observation, *_ = env.step(action)


@pytest.mark.parametrize("name", ["masked", *(pytest.param(each, marks=SLOW) for each in ("masked_dqn", "masked_sac"))])
@pytest.mark.parametrize("explore", [False, True], ids=["greedy", "explore"])
def test_a_loaded_policy_takes_no_forbidden_action(runs: Any, name: str, explore: bool) -> None:
    policy, env = rlframe.load_policy(runs(name)), debug_envs.masked()  # which raises for one
    observation, _ = env.reset(seed=0)
    for _ in range(60):
        observation, _, terminated, truncated, _ = env.step(policy.act(observation, explore=explore))
        if terminated or truncated:
            observation, _ = env.reset()


def test_memory_is_kept_between_calls_until_reset(runs: Any) -> None:
    policy = rlframe.load_policy(runs("lstm"))
    observation = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    policy.act(observation)
    first = policy._state["memory"]
    policy.act(observation)
    second = policy._state["memory"]
    policy.reset()
    policy.act(observation)
    again = policy._state["memory"]
    flat = [torch.cat([x.flatten() for x in torch.utils._pytree.tree_leaves(s)]) for s in (first, second, again)]
    assert torch.equal(flat[0], flat[2])
    assert not torch.equal(flat[0], flat[1])


def test_rows_of_a_batch_whose_episodes_end_begin_anew_and_no_other(runs: Any) -> None:
    policy, alone = (rlframe.load_policy(runs("lstm")) for _ in range(2))
    seen = np.random.default_rng(0).normal(size=(6, 3, 4)).astype(np.float32)
    for observation in seen[:3]:
        policy.act(observation)
    policy.reset([False, True, False])
    for observation in seen[3:]:
        policy.act(observation)
    for row, since in ((0, 0), (1, 3)):
        alone.reset()
        for observation in seen[since:, row]:
            alone.act(observation)
        for one, batch in zip(leaves(alone._state["memory"]), leaves(policy._state["memory"]), strict=True):
            torch.testing.assert_close(one[0], batch[row])
    with pytest.raises(ValueError, match=r"ended \[2\] must have the shape \[3\]"):
        policy.reset([True, False])
    with pytest.raises(ValueError, match=r"a batch of 2 rows, where the policy has the memory of 3; call reset\(\)"):
        policy.act(seen[0, :2])
    policy.reset()
    policy.act(seen[0, :2])


def test_exploring_is_random_and_greedy_is_not(runs: Any) -> None:
    policy = rlframe.load_policy(runs("sac"))
    observation = np.zeros(3, np.float32)
    assert policy.act(observation) == policy.act(observation)
    assert policy.act(observation, explore=True) != policy.act(observation, explore=True)


def test_an_observation_of_another_shape_is_refused(runs: Any) -> None:
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        rlframe.load_policy(runs("ppo")).act(np.zeros(5, np.float32))


def test_an_action_that_is_one_number_has_no_axis() -> None:
    observations, actions = spaces.Box(-1, 1, (), np.float32), spaces.Box(2, 6, (), np.float32)
    policy = Policy(agent_for(observations, actions), observations, actions)
    for explore in (False, True):
        assert actions.contains(np.asarray(policy.act(np.float32(0.5), explore=explore)))
        assert policy.act(np.zeros(3, np.float32), explore=explore).shape == (3,)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (EnvOptions(reward_scale=10.0), [20.0, -0.3]),
        (EnvOptions(reward_scale=10.0, reward_clip="[-0.1,1]"), [1.0, -0.1]),
        (EnvOptions(reward_clip="sign"), [1.0, -1.0]),
        (EnvOptions(reward_scale=0.5, normalize_reward=True), [2.0, -0.03]),
    ],
    ids=["scaled", "clipped", "sign", "normalised where it is learned"],
)
def test_a_policy_that_sees_rewards_takes_them_from_the_environment_as_they_are(
    options: EnvOptions, seen: list[float]
) -> None:
    in_spaces = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)
    agent = agent_for(*in_spaces, feed_back=True)
    scaling, plain, other = (
        Policy(agent, *in_spaces, options=options),
        Policy(agent, *in_spaces),
        Policy(agent, *in_spaces),
    )
    np.testing.assert_array_equal(scaling.act(np.zeros(3)), plain.act(np.zeros(3)))
    other.act(np.zeros(3))
    for reward, as_learned in zip([2.0, -0.03], seen, strict=True):
        found = scaling.act(np.zeros(3), reward)
        np.testing.assert_allclose(found, plain.act(np.zeros(3), as_learned), rtol=1e-6)
        assert np.allclose(found, other.act(np.zeros(3), reward), rtol=1e-4) == (reward == as_learned)


def test_observations_of_other_dtypes_become_those_that_an_own_network_learned_from() -> None:
    space = spaces.Dict({"x": spaces.Box(-1, 1, (3,), np.float32), "y": spaces.Box(-9, 9, (2,), np.float64)})
    agent, seen = agent_for(space, spaces.Discrete(2)), list[Any]()
    agent.model.actor.encoder.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    policy = Policy(agent, space, spaces.Discrete(2))
    for observation in ({"x": np.zeros(3), "y": [1, 2]}, {"x": [[0, 0, 0]], "y": np.ones((1, 2), np.float16)}):
        policy.act(observation)
    assert [x.dtype for each in seen for x in each.values()] == [torch.float32] * 4


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({}, 1.0),
        ({"kwargs": {"reward_clipping": False}}, 30.0),
        ({"options": EnvOptions(reward_scale=0.1)}, 3.0),
        ({"backend": "python"}, 30.0),
    ],
    ids=["clipped by default", "as it is", "scaled", "Gymnasium's own"],
)
def test_a_policy_of_atari_sees_the_rewards_that_ale_clips_in_training(env: dict[str, Any], seen: float) -> None:
    pytest.importorskip("ale_py")
    in_spaces = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(6)
    policy = policy_of(agent_for(*in_spaces, feed_back=True), in_spaces, EnvConfig("ALE/SpaceInvaders-v5", **env))
    assert policy.greedy._as_learned(torch.tensor([30.0])).tolist() == [seen]


def test_what_is_no_observation_is_refused() -> None:
    image, vector = spaces.Box(0, 255, (2,), np.uint8), spaces.Box(-1, 1, (2,), np.float32)
    agent = agent_for(spaces.Dict({"image": image, "vector": vector}), spaces.Discrete(2))
    act = Policy(agent, spaces.Dict({"image": image, "vector": vector}), spaces.Discrete(2)).act
    right = {"image": np.zeros(2, np.uint8), "vector": np.zeros(2, np.float32)}
    assert act(right) in (0, 1)
    assert act({**right, "image": np.array([0.0, 255.0])}) in (0, 1), "as in training"
    for wrong, message in (
        ((right, {}), r"this is \(observation, info\), as env.reset\(\) returns them"),
        ([right], "an observation is a dict with image, vector, and this one is a list"),
        ({**right, "image": np.array([0.5, 0.1])}, r"observation\['image'\] of float64 has fractions, which uint8"),
        ({**right, "image": np.array([300, 0])}, r"observation\['image'\] is outside uint8, 0 to 255: \[300"),
        ({**right, "vector": np.array([0.5, np.nan])}, r"observation\['vector'\] is not finite: \[0.5 nan\]"),
        (
            {**right, "vector": {"agent_0": 1}},
            r"\['vector'\] is a dict with agent_0, and this policy takes Box.*one of them",
        ),
        ({**right, "vector": np.array(["a", "b"])}, r"observation\['vector'\] is of dtype <U1, and Box"),
        (
            {**right, "vector": np.zeros((4, 2))},
            r"observation\['vector'\] is a batch and observation\['image'\] is not",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            act(wrong)


def test_classes_out_of_range_and_masks_that_forbid_every_action_are_refused_as_in_training() -> None:
    space = spaces.Dict({"kind": spaces.Discrete(3, start=1), "action_mask": spaces.MultiBinary(2)})
    act = Policy(agent_for(space, spaces.Discrete(2)), space, spaces.Discrete(2)).act
    assert act({"kind": 3, "action_mask": np.array([0, 1])}) == 1
    for wrong, message in (
        ({"kind": 0, "action_mask": np.ones(2)}, r"observation\['kind'\] is outside Discrete\(3, start=1\): 0"),
        ({"kind": np.array([1, 2]), "action_mask": np.array([[0, 1], [0, 0]])}, r"forbids every action: \[0 0\]"),
        ({"kind": 1, "action_mask": np.array([0, 2])}, r"observation\['action_mask'\] is outside MultiBinary"),
    ):
        with pytest.raises(ValueError, match=message):
            act(wrong)


def test_a_file_that_cannot_be_written_is_an_error_before_the_policy_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, use in (("policy", ""), ("policy.pt", ""), ("policy.onnx", "format=onnx, or ")):
        assert export.main([str(tmp_path / "no_run"), f"out={out}"]) == 2
        assert f"error: out={out} must end in .pt2; use {use}out=policy.pt2" in capsys.readouterr().err
    (tmp_path / "policy.pt2").symlink_to(tmp_path / "outside")
    for out, says in (("/proc/x.pt2", "No such file"), (f"{tmp_path}/policy.pt2", f"it is a link to {tmp_path}/")):
        assert export.main([str(tmp_path / "no_run"), f"out={out}"]) == 2
        assert f"error: out={out} cannot be written: {says}" in capsys.readouterr().err
