"""Keys of environments of several agents: which fit, and what is said of those that do not."""

import importlib.util
from typing import Any

import gymnasium
import numpy as np
import pytest

import rlframe
from rlframe.core.errors import ConfigError
from rlframe.core.multi_agent import JointSpace, observation_of
from rlframe.core.types import Samples, Trajectory
from rlframe.envs import pettingzoo
from rlframe.envs.make import resolve
from rlframe.evaluation.report import evaluated
from rlframe.experiment.checks import check_parts
from rlframe.experiment.resumable import can_change
from rlframe.experiment.settings import from_flat, to_flat
from rlframe.experiment.several import check_agents
from rlframe.record.console import key_metrics
from rlframe.runners import Callback
from rlframe.runners.stop_rule import StopRule

SPACE = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
AGENTS = {"blue": ("blue_0",), "red": ("red_0", "red_1")}
SEVERAL = JointSpace(
    {name: observation_of(SPACE, len(agents), False) for name, agents in AGENTS.items()},
    dict.fromkeys(AGENTS, SPACE),
    AGENTS,
)
POLICIES = {"agents.policies.red.algo": "ppo", "agents.policies.blue.algo": "dqn"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"record": "mine-v0"}, "record=mine-v0 is for environments of a single agent"),
        ({"eval.estimate": "[wis]", "eval.dataset": "mine"}, "eval.estimate is for environments of a single agent"),
        ({"algo": "ars", "runner": "evolution"}, "runner=evolution is for environments of a single agent"),
        ({"stop": "episode/green/return_mean > 5"}, "no metric episode/green/return_mean; its policies are blue, red"),
        ({"snapshot_best": "-eval/green/return_mean"}, "no metric eval/green/return_mean"),
    ],
)
def test_what_is_for_a_single_agent_is_refused_with_what_to_use(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_agents(from_flat(settings), SEVERAL)


def test_a_name_of_an_info_or_of_an_algorithms_own_may_have_a_slash() -> None:
    check_agents(from_flat({"stop": "env/goal/reached > 1 or algo/actor/temper > 2"}), SPACE)
    check_agents(from_flat({"snapshot_best": "env/goal/reached"}), SEVERAL)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (POLICIES, "agents.policies is for environments of several agents, and env=CartPole-v1"),
        ({"agents.global_state": True}, "agents.global_state is for environments of several"),
        ({"agents.map": "mine:policy_of"}, "agents.map is for environments of several"),
        ({"stop": "algo/red/loss > 5"}, "no metric algo/red/loss; it has a single agent"),
    ],
)
def test_what_is_for_several_agents_is_refused_where_there_is_one(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_agents(from_flat(settings), SPACE)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"agents.policies.red.algo": "ars"}, "agents.policies.red.algo=ars learns from whole episodes"),
        (
            {"algo": "dqn", "agents.policies.red.algo": "ppo", "learners": 2},
            "red.algo=ppo has no replay; use learners=1",
        ),
        ({"algo": "dqn", "agents.policies.red.algo.batch_size": 5, "learners": 2}, "red.algo=dqn has batch_size=5"),
        (
            {**POLICIES, "runner.n_steps": 600},
            r"with agents\.policies\.blue\.algo\.replay_ratio=.* use agents.*starts=596 or",
        ),
    ],
)
def test_algorithms_of_policies_that_cannot_learn_here_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_parts(from_flat({**settings, "runner": "minibatch_rl"}))


def test_a_policy_that_does_not_train_needs_no_updates() -> None:
    check_parts(from_flat({**POLICIES, "runner": "minibatch_rl", "runner.n_steps": 600, "agents.train": ["red"]}))


def test_a_policys_name_that_metrics_cannot_have_is_refused() -> None:
    for name in ("re.d", "re/d", "re d"):
        with pytest.raises(ConfigError, match="letters, digits and _ only"):
            from_flat({"agents.map.red_*": name})
    with pytest.raises(ConfigError, match="eval/env/ are metrics of environments; use another name"):
        from_flat({"agents.policies.env.algo": "ppo"})


def test_a_map_of_agents_on_the_command_line_names_policies_as_its_dotted_form_does() -> None:
    dotted = from_flat({"agents.map.red_*": "red", "agents.map.blue": "one", "agents.policies.one.algo": "dqn"})
    braced = from_flat({"agents.map": '{red_*: red, "blue": one}', "agents.policies.one.algo": "dqn"})
    assert to_flat(braced) == to_flat(dotted)
    with pytest.raises(ConfigError, match=r"agents.map={red_\*:red,blue:one} must be written .*, with a space after"):
        from_flat({"agents.map": "{red_*:red,blue:one}"})


def test_metrics_of_policies_are_known_to_stop_rules_evaluations_and_the_console() -> None:
    assert StopRule("episode/red/return_mean > 5")({"episode/red/return_mean": 6.0})
    assert StopRule("eval/red/return_mean > 5").needs("eval") == "eval/red/return_mean"
    with pytest.raises(ConfigError, match="there is no metric"):
        StopRule("episode/red/returns > 5")
    episodes = [
        Trajectory(3.0, 5, True, 0, {"episode/red/return": 1.0, "other": 7.0}),
        Trajectory(4.0, 5, True, 1, {"episode/red/return": 2.0, "episode/blue/return": 8.0}),
    ]
    found = evaluated(episodes)
    assert (found["eval/red/return_mean"], found["eval/blue/return_mean"]) == (1.5, 8.0)
    row = {"env_steps": 1, "episode/agent/return_mean": 1.0, "episode/red/return_mean": 2.0}
    assert key_metrics(row) == ["env_steps", "episode/red/return_mean"]


def test_numbers_of_a_policy_can_change_at_a_snapshot_as_those_of_a_run_with_one_can() -> None:
    config = from_flat(POLICIES)
    assert can_change("agents.policies.red.algo.learning_rate", config)
    assert can_change("agents.policies.red.algo.discount", config)
    assert not can_change("agents.policies.blue.algo.discount", config)  # of the returns in its stored rows
    assert not can_change("agents.policies.blue.algo.v_min", config)
    assert not can_change("algo.learning_rate", config)  # which no policy has
    assert can_change("algo.learning_rate", from_flat({"algo": "ppo"}))


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("mpe2/simple_spred_v3", "did you mean mpe2/simple_spread_v3"),
        ("mpe/simple_tag_v3", "did you mean mpe2/simple_tag_v3"),
        ("classic/connect_four_v2", "did you mean classic/connect_four_v3"),
    ],
)
def test_a_name_that_pettingzoo_lacks_is_an_error_with_the_nearest(env: str, said: str) -> None:
    pytest.importorskip("mpe2")
    with pytest.raises(ConfigError, match=said):
        resolve(env)


@pytest.mark.parametrize("missing", ["pettingzoo", "mpe2"])
def test_a_missing_pettingzoo_is_an_error_with_what_to_install(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(ConfigError, match=rf'\({missing}\): pip install "rlframe\[pettingzoo\]"'):
        pettingzoo.find_multi_agent("mpe2/simple_spread_v3")
    assert pettingzoo.find_multi_agent("MyPackage/MyEnv-v0") is None


class Named(Callback):
    """Notes the learners that its hooks are called for."""

    def __init__(self) -> None:
        self.batches: list[str] = []
        self.updates: list[str] = []

    def on_batch(self, samples: Samples) -> None:
        self.batches.append(self.learner)

    def on_update(self, metrics: Any) -> None:
        self.updates.append(self.learner)


@pytest.mark.filterwarnings("ignore")
def test_environments_of_pettingzoo_may_be_given_as_functions_classes_and_instances() -> None:
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    small = {"n_steps": 60, "sampler": "serial", "sampler.batch_B": 2, "sampler.batch_T": 10, "model.hidden": [4]}
    small |= {"runner": "minibatch_rl", "algo": {"epochs": 1, "minibatches": 1}}

    def policy_of(agent: str, episode: int) -> str:
        return "first" if agent == "agent_0" else "rest"

    for env in (spread.parallel_env, spread.env, spread.parallel_env(N=2)):
        named, settings = Named(), {"map": policy_of, "global_state": True}
        with rlframe.build("ppo", env, agents=settings, callbacks=[named], **small) as run:
            row = run.train()
            assert named.batches[:2] == named.updates[:2] == ["first", "rest"]
            policies: Any = run.policy
            assert policies.policies == ("first", "rest")
            own = policies.of("rest")
            assert "privileged" in own.observation_space.spaces  # critics see it, and actors need it not
            n = own.observation_space["observation"].shape[0]
            assert own.act(np.zeros(n, np.float32)).shape == ()
        assert {"episode/first/return_mean", "algo/rest/value_loss"} <= row.keys()
    assert pettingzoo.name_of_function(spread.parallel_env) == "mpe2/simple_spread_v3"
    assert pettingzoo.name_of_function(spread.env) == "mpe2.simple_spread_v3:env"


def test_policies_with_masks_take_them_in_observations_or_infos() -> None:
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")
    with rlframe.build("ppo", "classic/connect_four_v3", n_steps=99, sampler="serial", runner="minibatch_rl") as run:
        board, mask = np.zeros((6, 7, 2), np.int8), np.eye(7, dtype=np.int8)
        for column in range(7):
            assert run.policy.act({"observation": board, "action_mask": mask[column]}, explore=True) == column
        with pytest.raises(ValueError, match="no entry 'action_mask'"):
            run.policy.act({"observation": board})
