"""build(): from an Experiment and its part of the machine to the live runner, sampler, agent and algorithm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Self, TypeVar

import torch
from gymnasium import Space, spaces

from rlframe.agents import Agent
from rlframe.agents.team import Team
from rlframe.algos import Algorithm
from rlframe.algos.base import Frozen, warn_if_unused
from rlframe.algos.defaults import learns_from, learns_jointly
from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError, naming_if, pluralize, prefixed, qualified_name
from rlframe.core.multi_agent import SHARED, JointSpace, joint
from rlframe.core.objects import is_own
from rlframe.core.ranks import current_ranks
from rlframe.core.seeding import Role, seed_int
from rlframe.core.spaces import action_parts
from rlframe.data.reading import SCORE_KEYS, ReferenceScores, check_spaces, open_dataset
from rlframe.data.transform import load_transform
from rlframe.data.writing import check_can_write
from rlframe.envs import EnvConfig
from rlframe.evaluation.episode_rows import load_episodes
from rlframe.evaluation.estimate_evaluator import EstimateEvaluator
from rlframe.evaluation.evaluator import BaseEvaluator
from rlframe.evaluation.process import make_evaluator
from rlframe.experiment.compilation import ALONE, Placing, choose_compile
from rlframe.experiment.config import Experiment, kind_of
from rlframe.experiment.limits import check_batch, check_networks
from rlframe.experiment.settings import to_flat
from rlframe.experiment.several import check_agents, check_joint, evaluated_agent, make_leagues
from rlframe.experiment.weights import load_init, load_networks, load_optimizers, saved_algorithm
from rlframe.kernels.device import choose_device, choose_precision, learning_in
from rlframe.models.base import has_own
from rlframe.models.encoders import has_images
from rlframe.replay.buffer import DividedReplay
from rlframe.rewards import Rewards, rewards_for
from rlframe.rollout.inference import rows_keep_their_bits
from rlframe.runners import Learner, Runner
from rlframe.runners.callbacks import load_callbacks
from rlframe.runners.recording import Recorder, facts_of, named_for
from rlframe.runners.threads import AdaptiveThreads
from rlframe.samplers import Source
from rlframe.system.affinity import Affinity
from rlframe.system.cluster import connect
from rlframe.updates.compiled import CompileChoice, compiling

_R = TypeVar("_R")
_OTHER_BITS = (
    "this processor rounds a row differently among other rows: with another sampler, or other numbers of workers or "
    "groups, samples differ in the last bits"
)


@dataclass(frozen=True)
class Built:
    """The live objects of one experiment. A context manager: it closes samplers and environments at its end."""

    runner: Runner
    precision: str  # fp32 or bf16
    compilation: CompileChoice
    spaces: tuple[Space, Space]  # of observations and actions
    env: EnvConfig
    summary: dict[str, str]  # of what was built, for the log

    def learning_call(self, function: Callable[..., _R], *arguments: Any) -> _R:
        """Call a function with products in this precision, and updates compiled or not."""
        with learning_in(self.precision), compiling(self.compilation):
            return function(*arguments)

    def train(self) -> dict[str, float]:
        return self.learning_call(self.runner.train)

    def close(self) -> None:
        self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def torch_threads(experiment: Experiment, affinity: Affinity, observation_space: Space) -> int:
    if experiment.threads > 0:
        return experiment.threads
    return affinity.threads if experiment.threads == AUTO or has_images(observation_space) else 1


def build(experiment: Experiment, affinity: Affinity, placing: Placing = ALONE) -> Built:
    """Build what the experiment describes; `hardware.resolve` has replaced every `auto` in it.

    Raises:
        ConfigError: parts do not fit together; everything that was opened is closed.
    """
    experiment = experiment.acting_at_once()
    device = choose_device(experiment.device, affinity.gpus)
    precision = choose_precision(experiment.precision, device)
    callbacks = load_callbacks(experiment.callbacks)
    with ExitStack() as opened:
        envs = opened.enter_context(closing(_make_envs(experiment, affinity)))
        try:
            threads = torch_threads(experiment, affinity, envs.observation_space)
            torch.set_num_threads(threads)
            torch.manual_seed(seed_int(experiment.seed, Role.TORCH))  # of users' networks: dropout
            in_spaces = envs.observation_space, envs.action_space
            check_agents(experiment, in_spaces[0])
            check_networks(experiment, *in_spaces, device)
            agent = make_agent(experiment, *in_spaces, device)
            placing.place(agent)
            check_batch(experiment, agent, *in_spaces)
            sampler = _make_sampler(experiment, envs, agent, device, affinity)
            learners = make_learners(experiment, agent, sampler, in_spaces)
            algo = learners[max(learners, key=experiment.agents.learns)].algo
            size = sampler.batch_spec.size * current_ranks().n_samplers
            compilation, compiled = choose_compile(experiment, algo, size, device, threads, placing)
            evaluator = _make_evaluator(experiment, *evaluated_agent(experiment, agent, in_spaces), affinity)
            if evaluator is not None:
                opened.enter_context(closing(evaluator))
            called = [*callbacks, *_recorders(experiment, in_spaces), *make_leagues(experiment, agent, in_spaces)]
            runner = experiment.runner.make_runner(sampler, learners, evaluator, called, experiment.stop)
            runner.evaluations.reference = _reference(experiment, in_spaces)
            runner.log.env_seeds = runner.sampler.env_seeds(experiment.seed)
            if threads > 1 and experiment.threads <= 0:  # a number that was asked for is kept
                runner.adapt_threads = AdaptiveThreads(threads)
                for each in learners.values():
                    each.algo.progress.between_steps = runner.adapt_threads
        except ValueError as error:
            raise ConfigError(str(error)) from error
        opened.pop_all()
    summary = {
        **_described(experiment, agent, sampler, f"{device}, {pluralize(threads, 'torch thread')}"),
        "precision": f"{precision}, of matrix products in learning",
        "compile": compiled,
        **{key: text for each in learners.values() for key, text in each.named(_facts(each.algo)).items()},
    }
    if device.type == "cpu" and not rows_keep_their_bits(agent, *in_spaces, sampler.batch_spec.B):
        summary["samples"] = _OTHER_BITS
    return Built(runner, precision, compilation, in_spaces, experiment.env_config(), summary)


def _facts(algo: Algorithm) -> dict[str, str]:
    return {"init": algo.origin, **algo.facts()} if algo.origin else algo.facts()


def make_learners(
    experiment: Experiment, agent: Agent, sampler: Source, in_spaces: tuple[Space, Space]
) -> dict[str, Learner]:
    """The learner of the agent, or of each policy of a Team."""
    policies = agent.agents()
    if not policies:
        if learns_jointly(experiment.algo):
            name = kind_of("algo", experiment.algo)
            raise ConfigError(f"algo={name} is for environments of several agents, and env={experiment.env} has one")
        algo = _make_algorithm(experiment, partial(experiment.algo.make_algorithm, agent, sampler.batch_spec))
        return {"agent": Learner(agent, algo, _make_rewards(experiment, sampler, algo, in_spaces))}
    observations, actions = joint(in_spaces)
    found = {}
    for index, name in enumerate([SHARED] if experiment.agents.league.opponents else policies):
        own, policy, spec = experiment.of_policy(name, index), policies[name], sampler.batch_spec
        n = len(observations.agents[name])
        learns, jointly = experiment.agents.learns(name), learns_jointly(own.algo)
        if learns and jointly:
            check_joint(name, own, observations.turns)
        each = partial(own.algo.make_algorithm, policy, spec._replace(B=spec.B * n))
        make = partial(own.algo.make_joint, policy, n, spec) if jointly else each
        in_own = observations.own[name], actions.own[name]
        algo = _make_algorithm(own, make, name) if learns else Frozen(own.algo)
        rewards = _make_rewards(own, sampler, algo, in_own) if learns else rewards_for(sampler, algo)
        found[name] = Learner(policy, algo, rewards, team=agent, policy=name, joint=learns and jointly)
    return found


def _make_algorithm(experiment: Experiment, make: Callable[[int, int], Algorithm], policy: str = "") -> Algorithm:
    """The algorithm that `make` makes of n_steps and seed."""
    made_by = f"make_algorithm of algo={kind_of('algo', experiment.algo)}"
    with naming_if(is_own(experiment.algo), f"{made_by} failed; it is called with (agent, batch_spec, n_steps, seed)"):
        algo = make(experiment.runner.n_steps, experiment.seed)
    if algo is None:
        raise ConfigError(f"{made_by} gives None; return an Algorithm")
    warn_if_unused(algo, type(experiment.algo).__module__)
    if experiment.init and experiment.init_with != "agent":
        saved = saved_algorithm(experiment.init, policy)
        load_networks(algo, saved, experiment.init)
        if experiment.init_with == "optimizers":
            load_optimizers(algo, saved, experiment.init)
    _check_divided(algo)
    return algo


def _make_rewards(experiment: Experiment, sampler: Source, algo: Algorithm, in_spaces: tuple[Space, Space]) -> Rewards:
    """The rewards that an algorithm learns from, with their bonus."""
    n_steps, bonus, before = experiment.runner.n_steps, experiment.reward.bonus, rewards_for(sampler, algo)
    made_by = f"add_to of {qualified_name(type(bonus))}"
    called = "is called with (rewards, algo, (observation_space, action_space), n_steps, seed)"
    with naming_if(is_own(bonus), f"{made_by} failed; it {called}"):
        rewards = bonus.add_to(before, algo, in_spaces, n_steps, experiment.seed)
    if not isinstance(rewards, Rewards):
        raise ConfigError(f"{made_by} gives {type(rewards).__name__}; return Rewards")
    return rewards


def _described(experiment: Experiment, agent: Agent, sampler: Source, where: str) -> dict[str, str]:
    """Lines of the log about environments and agent."""
    parameters, (T, B, _) = sum(p.numel() for p in agent.parameters()), sampler.batch_spec
    data = experiment.runner.learns_from_data
    played = f"of {experiment.env}, none is played" if data else f"{B} x {T} steps a batch, {sampler.backend}"
    return {
        "environments": played if data else f"{experiment.env}, {played}",
        "agent": f"{type(agent).__name__}, {parameters:,} parameters, {where}",
    }


def _recorders(experiment: Experiment, in_spaces: tuple[Space, Space]) -> list[Recorder]:
    """What writes this rank's episodes to a dataset; none if nothing is recorded.

    Raises:
        ConfigError: the name is wrong, or pyarrow is missing.
    """
    ranks, c = current_ranks(), experiment
    if not c.record or ranks.rank >= ranks.n_samplers:
        return []
    check_can_write()
    facts = facts_of(to_flat(c), kind_of("algo", c.algo), c.seed)
    name = named_for(c.record, c.seed, c.run_ID, ranks.rank)
    transform = load_transform(c.record_transform, "record_transform", in_spaces)
    return [Recorder(name, *in_spaces, facts, c.record_compression, transform)]


def _check_divided(algo: Algorithm) -> None:
    """Raise ConfigError if several learners would learn from a replay that they cannot divide."""
    ranks = current_ranks()
    if ranks.n_samplers < ranks.world_size and not isinstance(getattr(algo, "replay", None), DividedReplay):
        raise ConfigError(f"learners={ranks.world_size} needs {type(algo).__name__}.replay of make_replay")


def _make_evaluator(
    experiment: Experiment, agent: Agent, in_spaces: tuple[Space, Space], affinity: Affinity
) -> BaseEvaluator | None:
    """None: the run evaluates nothing."""
    config, seed = experiment.eval, experiment.seed
    if config.estimate:
        return _make_estimator(experiment, agent, in_spaces)
    if experiment.evaluates:
        env = replace(experiment.eval_env_config(), gpus=affinity.gpus)
        return make_evaluator(config, env, agent, in_spaces, seed, affinity, experiment.sampler.supervision())
    if config.video_every:
        raise ConfigError(f"eval.video_every={config.video_every} films evaluations, and this run makes none")
    return None


def _datasets_of(experiment: Experiment) -> list[str]:
    """That of eval.dataset, else those that are learned from."""
    if experiment.eval.dataset:
        return [experiment.eval.dataset]
    return experiment.algo.replay.names() if learns_from(experiment.algo) == "replay" else []


def _reference(experiment: Experiment, in_spaces: tuple[Space, Space]) -> ReferenceScores | None:
    """The first reference scores of these datasets; None if they name none.

    Raises:
        ConfigError: eval.dataset names none, and is not estimated from either, or it is of other spaces.
    """
    named = experiment.eval.dataset
    datasets = [open_dataset(name) for name in _datasets_of(experiment)]
    for dataset in datasets if named else ():
        check_spaces(dataset, *in_spaces, "the environment of this run")
    found = next((dataset.reference for dataset in datasets if dataset.reference), None)
    if named and found is None and not experiment.eval.estimate:
        raise ConfigError(
            f"eval.dataset={named:.100} names no {' and '.join(SCORE_KEYS)} for eval/normalized_score; give them by "
            f"python -m rlframe.data convert, or add eval.estimate=[wis,fqe]"
        )
    return found


def _make_estimator(experiment: Experiment, agent: Agent, in_spaces: tuple[Space, Space]) -> EstimateEvaluator:
    """An evaluator by all episodes of datasets, those that are learned from as they are learned from.

    Raises ConfigError if there are none, or a method does not fit.
    """
    config = experiment.eval
    names = _datasets_of(experiment)
    if not names:
        raise ConfigError(
            f"eval.estimate=[{','.join(config.estimate)}] needs eval.dataset=NAME, which it estimates from"
        )
    transform = "" if config.dataset else experiment.algo.replay.read_through()
    episodes = chain.from_iterable(load_episodes(name, *in_spaces, transform) for name in names)
    discount, seed = experiment.sampler_config().discount, experiment.seed
    return EstimateEvaluator(
        agent, in_spaces, episodes, discount, config.estimate, seed, config.interval_steps,
        explore=config.explore, epsilon=config.epsilon,
    )  # fmt: skip


def _make_envs(experiment: Experiment, affinity: Affinity) -> Any:
    """The environments, or the processes that step them."""
    env = replace(experiment.env_config(), gpus=affinity.gpus)
    if experiment.on_ray():
        connect(experiment.ray)
    return experiment.runner.make_envs(experiment.sampler_config(), env, experiment.seed, affinity)


def _make_sampler(experiment: Experiment, envs: Any, agent: Agent, device: torch.device, affinity: Affinity) -> Source:
    """`device`: of the learner, where samplers act that the affinity gives no GPUs of their own."""
    config, devices = experiment.sampler_config(), [f"cuda:{gpu}" for gpu in affinity.sampler_gpus] or [str(device)]
    return experiment.runner.make_sampler(config, experiment.algo, envs, agent, experiment.seed, devices)


def make_agent(
    experiment: Experiment, observation_space: Any, action_space: Any, device: torch.device, policy: str = ""
) -> Agent:
    """The experiment's agent on `device`, with weights from `init`, or random ones from its seed; a Team of several."""
    if isinstance(observation_space, JointSpace):
        made = {}
        for i, (name, agents) in enumerate(observation_space.agents.items()):
            seen, done = observation_space.own[name], action_space.own[name]
            with prefixed(f"policy {name} of agent {agents[0]}"):
                made[name] = make_agent(experiment.of_policy(name, i), seen, done, device, name)
        return Team(made, *joint((observation_space, action_space)))
    boxes = [space for _, space in action_parts(action_space) if isinstance(space, spaces.Box)]
    model = experiment.model
    of_boxes = {"log_std": model.log_std, "state_dependent_std": model.state_dependent_std}
    for key, given in {"distribution": model.distribution != "auto", **of_boxes}.items():
        if given and not boxes:
            raise ConfigError(f"model.{key} is for Box actions, and those of {experiment.env} are {action_space}")
    made_by = f"make_agent of algo={kind_of('algo', experiment.algo)}"
    called = "is called with (observation_space, action_space, model, seed)"
    with naming_if(is_own(experiment.algo), f"{made_by} failed; it {called}"):
        agent: Agent = experiment.algo.make_agent(observation_space, action_space, model, experiment.seed)
    if agent is None:
        raise ConfigError(f"{made_by} gives None; return an Agent")
    has_norm = any("norms." in name for name, _ in agent.named_parameters())
    if model.norm != "none" and not has_norm and not has_own(getattr(agent, "model", agent)):
        raise ConfigError(
            f"model.norm={model.norm}: this network has no hidden fully connected layer to normalise; give it some "
            f"(model.hidden, or model.image_hidden for images), or leave norm out"
        )
    if experiment.init:
        load_init(agent, experiment.init, policy, lambda: to_flat(experiment))
    return agent.to(device)


def untrained_agent(experiment: Experiment, affinity: Affinity, observation_space: Space, action_space: Space) -> Agent:
    """An agent to measure with, on the experiment's device."""
    device = choose_device(experiment.device, affinity.gpus)
    check_networks(experiment, observation_space, action_space, device)
    agent = make_agent(experiment.without_init(), observation_space, action_space, device)
    check_batch(experiment, agent, observation_space, action_space)
    return agent
