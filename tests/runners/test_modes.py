"""A user's network is in train mode where it learns and in eval mode elsewhere, in every algorithm and sampler."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlframe import export, launch
from rlframe.deploy import load
from rlframe.models.base import with_modes
from rlframe.record.snapshot import load_snapshot
from tests.models.moded import Moded
from tests.runners.resumed import assert_resumed_exactly, log, words
from tests.runners.resumed_cases import CARTPOLE, ON_POLICY, PENDULUM, PPO, PQN, REPLAY
from tests.variants import variants

MODED = "model.encoder=tests.models.moded:Moded"
SEQUENCES = "algo.target_interval=5 algo.burn_in=2 algo.learn_T=4"
REPLAYED = f"{REPLAY} algo.batch_size=8 algo.replay_ratio=1"
CASES = {
    "ppo": f"{PPO} {CARTPOLE} {ON_POLICY}",
    "a2c": f"algo=a2c {CARTPOLE} {ON_POLICY}",
    "pg": f"algo=pg {CARTPOLE} {ON_POLICY}",
    "impala": f"algo=impala {CARTPOLE} {ON_POLICY}",
    "appo": f"algo=appo algo.minibatches=2 {CARTPOLE} {ON_POLICY}",
    "pqn": f"{PQN} {CARTPOLE} {ON_POLICY}",
    "dqn": f"algo=dqn algo.double=true algo.target_interval=5 {CARTPOLE} {REPLAYED}",
    "r2d1": f"algo=r2d1 {CARTPOLE} {SEQUENCES} model.memory=gru algo.batch_size=4 algo.replay_ratio=1 {REPLAY}",
    "sac": f"algo=sac {PENDULUM} {REPLAYED}",
    "sac_discrete": f"algo=sac {CARTPOLE} {REPLAYED}",
    "td3": f"algo=td3 {PENDULUM} {REPLAYED}",
    "ddpg": f"algo=ddpg {PENDULUM} {REPLAYED}",
}


def running(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in state.items() if name.endswith("running_mean")}


FAST = ("ppo", "dqn", "ddpg")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a case's run, which equals one that was stopped and resumed."""

    @functools.cache
    def run(case: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            return assert_resumed_exactly(f"{CASES[case]} {MODED}", tmp_path_factory.mktemp(case), patch)

    return run


@pytest.mark.parametrize("case", variants(CASES, FAST))
def test_learning_changes_statistics_and_acting_does_not_draw(case: str, resumed: Callable[[str], Path]) -> None:
    run = resumed(case)
    state, _ = load_snapshot(run)
    online = running(state["agent"])
    assert online
    assert all(bool((x != 0).any()) for x in online.values()), "learned from batches"
    for name in ("target", "critic"):
        assert all(bool((x != 0).any()) for x in running(state["algo"].get(name, {})).values()), "and followed"

    policy = load.load_policy(run, trust=True)
    observation = np.full(policy.observation_space.shape or (), 0.3, np.float32)
    actions = np.stack([np.asarray(policy.act(observation)) for _ in range(40)])
    assert (actions == actions[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo", "dqn", "sac"])
def test_a_network_with_modes_is_exported(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words(f"{CASES[case]} {MODED}", tmp_path)) == 0
    capsys.readouterr()
    assert export.main([str(tmp_path / "run_0"), "trust=true", f"out={tmp_path / 'policy.pt2'}"]) == 0
    assert "difference" in capsys.readouterr().out


@pytest.mark.parametrize("sampler", variants(["cpu", "gpu"], ("cpu",)))
@pytest.mark.parametrize("case", ["ppo", "dqn"])
def test_workers_act_with_the_learners_statistics(
    case: str, sampler: str, resumed: Callable[[str], Path], tmp_path: Path
) -> None:
    parallel = f"{CASES[case]} {MODED}".replace("sampler=serial", f"sampler={sampler} sampler.n_workers=2")
    assert launch.main(words(f"{parallel} eval.n_workers=0", tmp_path)) == 0
    serial, other = log(resumed(case)), log(tmp_path / "run_0")
    assert {row.pop("sampler/restarts") for row in other} == {"0"}
    assert serial == other


def test_a_frozen_network_a_constant_one_and_one_without_gradient_are_in_eval_mode() -> None:
    class Box:
        shape = (3,)

    network, x = with_modes(Moded(Box())), torch.randn(5, 3)  # type: ignore[arg-type]
    assert not network.training
    network(x)
    assert network.layers[1].training
    with torch.no_grad():
        network(x)
    assert not network.layers[1].training
    network(x)
    network.requires_grad_(False)
    network(x)
    assert not network.norm.training


def test_a_part_that_is_called_alone_has_the_modes_of_the_whole() -> None:
    class Box:
        shape = (3,)

    network, x = with_modes(Moded(Box())), torch.randn(5, 3)  # type: ignore[arg-type]
    network.layers(network.norm(x))
    assert network.norm.training
    assert network.layers[1].training
    assert network.norm.num_batches_tracked == 1
    with torch.no_grad():
        network.layers(network.norm(x))
    assert not network.norm.training
    assert not network.layers[1].training
    network.norm.requires_grad_(False)
    network(x)
    assert network.layers[1].training
    assert not network.norm.training, "a part that is frozen does not learn"
