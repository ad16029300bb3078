"""TorchRL's side of `benchmarks.compare`: its collector, replay, losses and optimizers in the loop its users write."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Composite, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import DoubleToFloat, GymEnv, GymWrapper, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import (
    MLP,
    ActorValueOperator,
    AdditiveGaussianModule,
    EGreedyModule,
    ProbabilisticActor,
    QValueActor,
    TanhModule,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss, DQNLoss, HardUpdate, SACLoss, SoftUpdate, TD3Loss
from torchrl.objectives.value.advantages import GAE

from benchmarks.parts.gate import Gate
from benchmarks.parts.rows import PONG, PPO, OffPolicy, Row

Update = Callable[[Any], None]  # learns from one batch
ENDLESS = 10**9  # env steps


def environment(row: Row, n: int) -> TransformedEnv:
    """Python environments in one process."""
    make = partial(_pong, row.env) if row.env == PONG else partial(GymEnv, row.env, categorical_action_encoding=True)
    env = TransformedEnv(SerialEnv(n, make) if n > 1 else make())
    for transform in (RewardSum(), StepCounter(), DoubleToFloat()):
        env.append_transform(transform)
    return env


def _pong(env: str) -> GymWrapper:
    from benchmarks.parts.python_atari import python_atari

    return GymWrapper(python_atari(env), categorical_action_encoding=True)


def train(row: Row, gate: Gate) -> None:
    """Collect and learn; calls the gate before each batch."""
    warnings.simplefilter("ignore")
    work = row.work
    (_on_policy if isinstance(work, PPO) else _off_policy)(work, row, gate)  # type: ignore[operator]


def _on_policy(work: PPO, row: Row, gate: Gate) -> None:
    size, env = work.n_envs * work.T, environment(row, work.n_envs)
    policy, value = _actor_critic(work, row, env)
    collector = Collector(env, policy, frames_per_batch=size, total_frames=ENDLESS, device="cpu")
    advantage = GAE(gamma=work.discount, lmbda=work.gae_lambda, value_network=value)
    loss = ClipPPOLoss(
        policy,
        value,
        clip_epsilon=work.clip,
        entropy_coeff=work.entropy_coef,
        critic_coeff=work.value_coef,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=work.learning_rate, eps=1e-5)
    rows = TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=SamplerWithoutReplacement(), batch_size=work.minibatch()
    )
    update, steps, batches = _updating(loss, optimizer, work.max_grad_norm), 0, iter(collector)
    while True:
        gate(steps)
        for group in optimizer.param_groups:
            group["lr"] = work.learning_rate * (1 - steps / ENDLESS)
        data = next(batches)
        with torch.no_grad():
            advantage(data)
        rows.extend(data.reshape(-1))
        for _ in range(work.epochs):
            for minibatch in rows:
                update(minibatch)
        steps += size


def _updating(loss: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> Update:
    parameters = [x for group in optimizer.param_groups for x in group["params"]]

    def update(batch: Any) -> None:
        found = loss(batch)
        optimizer.zero_grad(set_to_none=True)
        sum(value for name, value in found.items() if name.startswith("loss")).backward()
        nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()

    return update


def _off_policy(work: OffPolicy, row: Row, gate: Gate) -> None:
    env = environment(row, 1)
    explorer, update = {"sac": _sac, "td3": _td3, "dqn": _dqn}[work.algo](work, row, env)
    collector = Collector(
        env,
        explorer,
        frames_per_batch=work.every,
        total_frames=ENDLESS,
        init_random_frames=work.learning_starts,
        device="cpu",
    )
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(work.replay_rows), batch_size=work.batch_size)
    steps = 0
    for data in collector:
        replay.extend(data.reshape(-1))
        steps += work.every
        if steps >= work.learning_starts:
            update(replay.sample())
        gate(steps)


def _layers(n_in: int, hidden: tuple[int, ...], n_out: int, activation: type[nn.Module] = nn.ReLU) -> MLP:
    return MLP(in_features=n_in, out_features=n_out, num_cells=list(hidden), activation_class=activation)


class Nature(nn.Module):
    """From bytes [..., 4, 84, 84] to 512 features, and to n_out numbers if it is not 0."""

    def __init__(self, n_out: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()),
            *([nn.Linear(512, n_out)] if n_out else []),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lead = x.shape[:-3]
        return self.layers(x.reshape(-1, *x.shape[-3:]).float() / 255).reshape(*lead, -1)


def _actor_critic(work: PPO, row: Row, env: TransformedEnv) -> tuple[Any, Any]:
    observation, spec = env.observation_spec_unbatched["observation"], env.full_action_spec_unbatched
    n_actions = spec["action"].space.n
    images = row.env == PONG
    n_in = 512 if images else observation.shape[-1]
    hidden = () if images else work.hidden
    features = ["features"] if images else ["observation"]
    logits = TensorDictModule(_layers(n_in, hidden, n_actions, nn.Tanh), features, ["logits"])
    policy = ProbabilisticActor(
        logits,
        in_keys=["logits"],
        spec=spec,
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    value = ValueOperator(_layers(n_in, hidden, 1, nn.Tanh), in_keys=features)
    for layer in [*policy.modules(), *value.modules()]:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, 2**0.5)
            nn.init.zeros_(layer.bias)
    if not images:
        return policy, value
    both = ActorValueOperator(TensorDictModule(Nature(), ["observation"], ["features"]), policy, value)
    return both.get_policy_operator(), both.get_value_operator()


def _sac(work: OffPolicy, row: Row, env: TransformedEnv) -> tuple[Any, Update]:
    spec, n_in = env.action_spec_unbatched, env.observation_spec_unbatched["observation"].shape[-1]
    n_actions = spec.shape[-1]
    body = nn.Sequential(_layers(n_in, work.hidden, 2 * n_actions), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(body, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
    )
    critic = ValueOperator(_layers(n_in + n_actions, work.hidden, 1), in_keys=["action", "observation"])
    loss = SACLoss(actor, critic, num_qvalue_nets=2, loss_function="l2")
    loss.make_value_estimator(gamma=work.discount)
    targets = SoftUpdate(loss, tau=work.tau)
    learned = [*_values(loss.actor_network_params), *_values(loss.qvalue_network_params), loss.log_alpha]
    optimizer = torch.optim.Adam(learned, lr=work.learning_rate)

    def update(batch: Any) -> None:
        found = loss(batch)
        optimizer.zero_grad(set_to_none=True)
        (found["loss_actor"] + found["loss_qvalue"] + found["loss_alpha"]).backward()
        optimizer.step()
        targets.step()

    return actor, update


def _td3(work: OffPolicy, row: Row, env: TransformedEnv) -> tuple[Any, Update]:
    spec, n_in = env.action_spec_unbatched, env.observation_spec_unbatched["observation"].shape[-1]
    n_actions = spec.shape[-1]
    body = TensorDictModule(_layers(n_in, work.hidden, n_actions), ["observation"], ["param"])
    actor = TensorDictSequential(body, TanhModule(in_keys=["param"], out_keys=["action"], spec=spec))
    explorer = TensorDictSequential(
        actor, AdditiveGaussianModule(spec=spec, sigma_init=1.0, sigma_end=1.0, mean=0.0, std=work.noise)
    )
    critic = ValueOperator(_layers(n_in + n_actions, work.hidden, 1), in_keys=["action", "observation"])
    loss = TD3Loss(actor, critic, action_spec=spec, num_qvalue_nets=2, loss_function="l2")
    loss.make_value_estimator(gamma=work.discount)
    targets = SoftUpdate(loss, tau=work.tau)
    of_actor = torch.optim.Adam(_values(loss.actor_network_params), lr=work.learning_rate)
    of_critics = torch.optim.Adam(_values(loss.qvalue_network_params), lr=work.learning_rate)
    updates = 0

    def update(batch: Any) -> None:
        nonlocal updates
        updates += 1
        of_critics.zero_grad(set_to_none=True)
        loss.value_loss(batch)[0].backward()
        of_critics.step()
        if updates % 2 == 0:
            of_actor.zero_grad(set_to_none=True)
            loss.actor_loss(batch)[0].backward()
            of_actor.step()
            targets.step()

    return explorer, update


def _dqn(work: OffPolicy, row: Row, env: TransformedEnv) -> tuple[Any, Update]:
    spec, observation = env.action_spec_unbatched, env.observation_spec_unbatched["observation"]
    n_actions = spec.space.n
    body = Nature(n_actions) if row.env == PONG else _layers(observation.shape[-1], work.hidden, n_actions)
    q = QValueActor(body, spec=Composite(action=spec), in_keys=["observation"])
    greedy = EGreedyModule(spec=q.spec, eps_init=work.epsilon, eps_end=work.epsilon)
    loss = DQNLoss(q, loss_function="l2", delay_value=True)
    loss.make_value_estimator(gamma=work.discount)
    targets = HardUpdate(loss, value_network_update_interval=work.target_every // work.every)
    step = _updating(loss, torch.optim.Adam(loss.parameters(), lr=work.learning_rate), work.max_grad_norm)

    def update(batch: Any) -> None:
        step(batch)
        targets.step()

    return TensorDictSequential(q, greedy), update


def _values(parameters: Any) -> list[torch.Tensor]:
    return list(parameters.flatten_keys().values())
