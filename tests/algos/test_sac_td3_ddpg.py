"""What DDPG, TD3 and SAC share: replay, warm-up, the debt of updates, seeds, exact resumption, every observation."""

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import Space, spaces

from rlframe.algos import ddpg, sac, td3
from rlframe.core.struct import leaves, map_tree
from rlframe.envs import debug_envs
from rlframe.kernels.device import has_bf16_units, learning_in
from rlframe.record.codec import ChunkedArray, decode, encode
from tests.algos.learners import LEVEL, collected, learn, learner
from tests.runners.resumed import count_equal

MODULES = {"ddpg": ddpg, "td3": td3, "sac": sac}
every = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
KINDS = [(ddpg, LEVEL), (td3, LEVEL), (sac, LEVEL), (sac, spaces.Discrete(3))]
every_kind = pytest.mark.parametrize(("module", "action"), KINDS, ids=["ddpg", "td3", "sac", "discrete_sac"])
SEEN = spaces.Box(-2.0, 4.0, (1,), np.float32)  # by debug_envs.identity(action="box")
IMAGE = spaces.Box(0, 255, (12, 12, 3), np.uint8)
CONVOLUTIONS = {"channels": (4,), "kernels": (3,), "strides": (2,), "image_hidden": (8,)}
MIXED = spaces.Dict({"image": IMAGE, "place": SEEN, "which": spaces.Discrete(3)})


class Sees(gymnasium.Env):
    """Random observations of a space, episodes of 5 steps that terminate or, every other time, are cut."""

    def __init__(self, observation: Space, action: Space) -> None:
        self.observation_space, self.action_space = observation, action
        self.time = self.episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.time, self.episode = 0, self.episode + 1
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        over, cut = self.time == 5, self.episode % 2 == 0
        return self.observation_space.sample(), float(np.sum(action)), over and not cut, over and cut, {}


def identity_learner(module: Any, **settings: Any) -> Any:
    return learner(module, SEEN, debug_envs.identity("box").action_space, **{"model": {"hidden": (8,)}} | settings)


def identity_batches(algo: Any, n: int, **kwargs: Any) -> Any:
    return collected(debug_envs.identity, algo.agent, n, (4, 2), action="box", length=6, **kwargs)


@every
def test_the_warm_up_counts_the_steps_of_all_environments_and_then_updates_are_due_exactly(module: Any) -> None:
    algo = identity_learner(module, learning_starts=30, batch_size=6, replay_ratio=10.0)
    owed, made = 0.0, 0
    for samples in identity_batches(algo, 12):  # 8 rows of 2 environments each, some of them not valid
        assert algo.agent.random.item() == (algo.progress.env_steps < 30)
        before = algo.progress.env_steps
        algo.receive(samples)
        owed += 10 / 6 * max(0, algo.progress.env_steps - max(before, 30))
        assert algo.updates_due() == math.floor(owed - made + 1e-9)
        while algo.updates_due():
            algo.update()
            made += 1
    assert algo.progress.env_steps < 12 * 8
    assert algo.progress.updates == made == math.floor((algo.progress.env_steps - 30) * 10 / 6)
    assert algo.counters()["replay/ratio"] == pytest.approx(10.0, rel=0.05)


@every
def test_a_cut_episode_bootstraps_from_its_last_observation_and_a_terminated_one_does_not(module: Any) -> None:
    algo = learner(module, SEEN, LEVEL, discount=0.9, n_step=2)
    batches = collected(Sees, algo.agent, 8, (4, 2), observation=SEEN, action=LEVEL)
    for samples in batches:
        algo.receive(samples)
    rows = map_tree(lambda *x: torch.cat(x), *[samples.map(lambda x: x[:4]) for samples in batches])
    found = algo.replay.sample(500)
    time, env = np.divmod(found.index, 2)
    ends = {0.0: 0, 0.9: 0, 0.81: 0}
    for i, (t, b) in enumerate(zip(time, env, strict=True)):
        k = 1 if rows.terminated[t, b] or rows.truncated[t, b] else 2
        last = t + k - 1
        bootstrap = 0.0 if rows.terminated[last, b] else round(0.9**k, 3)
        assert found.bootstrap[i].item() == pytest.approx(bootstrap)
        assert found.return_[i].item() == pytest.approx(
            sum(0.9**j * rows.reward[t + j, b].item() for j in range(k)), abs=1e-5
        )
        if bootstrap and t + k < len(rows.reward):
            assert torch.equal(found.next_inputs.observation[i], rows.inputs.observation[t + k, b])
        ends[bootstrap] += 1
    assert min(ends.values()) > 10, "every way to end was drawn"


@every_kind
@pytest.mark.parametrize(
    ("space", "normalize"),
    [(IMAGE, False), (MIXED, True), (spaces.Discrete(4), True)],
    ids=["image", "dict", "discrete"],
)
def test_every_observation_is_learned_from(module: Any, action: Space, space: Space, normalize: bool) -> None:
    model = {"hidden": (8,), "normalize_observation": normalize, **({} if space.shape == () else CONVOLUTIONS)}
    algo = learner(module, space, action, model=model, replay_ratio=2.0)
    before = [parameter.clone() for parameter in [*algo.agent.parameters(), *algo.online]]
    metrics = learn(algo, collected(Sees, algo.agent, 3, (4, 2), observation=space, action=action))
    assert metrics
    assert all(math.isfinite(value) for each in metrics for value in each.values())
    after = [*algo.agent.parameters(), *algo.online]
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True)), "all of it learns"


@every
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_actions_of_every_shape_are_learned(module: Any, shape: tuple[int, ...]) -> None:
    box = spaces.Box(-2.0, 1.0, shape, np.float32)
    algo = learner(module, SEEN, box, model={"hidden": (8,)})
    metrics = learn(algo, collected(Sees, algo.agent, 3, (4, 2), observation=SEEN, action=box))
    assert all(math.isfinite(value) for each in metrics for value in each.values())
    assert algo.replay.sample(3).action.shape == (3, *shape)


@every
def test_the_normaliser_is_the_agents_and_sees_every_row_once(module: Any) -> None:
    algo = identity_learner(module, model={"hidden": (8,), "normalize_observation": True})
    batches = identity_batches(algo, 3)
    learn(algo, batches)
    norm = algo.agent.model.observation_norm.parts[0]
    assert norm.count.item() == 3 * 8
    seen = torch.cat([samples.inputs.observation[:-1].flatten() for samples in batches])
    assert norm.mean.item() == pytest.approx(seen.mean().item(), rel=1e-5)


def everything(algo: Any) -> Any:
    return {"agent": algo.agent.state_dict(), "algo": algo.state_dict()}


def assert_same(one: Any, other: Any) -> None:
    """Two states, exactly."""
    assert count_equal(one, other, "state") > 4


def kept(state: Any) -> tuple[Any, dict[str, Any]]:
    """What a snapshot keeps of a state: a tree, and arrays that do not change any more."""
    arrays: dict[str, Any] = {}
    tree = encode(state, arrays)
    return tree, {
        name: (each.to_numpy() if isinstance(each, ChunkedArray) else each).copy() for name, each in arrays.items()
    }


MODEL = {"hidden": (8,), "normalize_observation": True}


SLOW = pytest.mark.slow
OTHERS = [KINDS[0], KINDS[1], KINDS[3]]


@every_kind
def test_training_goes_on_exactly_in_new_objects_and_follows_from_its_seed_alone(module: Any, action: Space) -> None:
    check_goes_on(module, action, 7, MODEL)


@pytest.mark.parametrize(("module", "action"), [KINDS[2], *(pytest.param(*each, marks=SLOW) for each in OTHERS)])
@pytest.mark.skipif(not has_bf16_units(), reason="a CPU without units for bfloat16")
def test_training_in_bfloat16_goes_on_exactly_too(module: Any, action: Space) -> None:
    with learning_in("bf16"):  # products are large enough to take it
        check_goes_on(module, action, 200, MODEL | {"hidden": (64, 64)})


def check_goes_on(module: Any, action: Space, batch_size: int, model: dict[str, Any]) -> None:
    def made(seed: int = 3) -> Any:
        settings = {"n_step": 2, "learning_rate": "linear(3e-4,0)", "learning_starts": 5}
        settings |= {"batch_size": batch_size, "replay_ratio": batch_size / 2}
        return learner(module, SEEN, action, model=model, n_steps=100, size=40, seed=seed, **settings)

    whole, half, resumed, other = made(), made(), made(), made(4)
    batches = collected(Sees, whole.agent, 8, (4, 2), observation=SEEN, action=action)
    first = learn(whole, batches[:4])
    torch.rand(1)  # what others draw from torch's own generator changes nothing
    assert learn(half, batches[:4]) == first != learn(other, batches[:4])
    state = decode(*kept(everything(half)))
    learn(half, batches[4:])  # what was saved does not change any more
    resumed.agent.load_state_dict(state["agent"])
    resumed.load_state_dict(state["algo"])
    assert_same(everything(resumed), state)
    assert learn(whole, batches[4:]) == learn(resumed, batches[4:])
    assert_same(everything(whole), everything(resumed))
    assert len(leaves(whole.agent.state_dict())) > 4


@every
def test_a_replay_without_room_is_refused_by_name(module: Any) -> None:
    with pytest.raises(ValueError, match=r"algo.replay.size=3"):
        learner(module, size=3)


@every
def test_a_policy_that_learned_from_data_acts_itself_when_a_sampler_follows(module: Any) -> None:
    algo = identity_learner(module, learning_starts=30, batch_size=6, replay_ratio=10.0)
    batches = identity_batches(algo, 8)
    for samples in batches[:4]:
        algo.replay.append(samples)
    algo.update()
    for samples in batches[4:]:
        algo.receive(samples)
        assert not algo.agent.random
