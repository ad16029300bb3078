"""rlframe in Ray Tune: metrics and schedulers, population based training, exact resumption, and messages."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rlframe
from rlframe.core.errors import ConfigError
from rlframe.runners import Callback

SMALL = {
    "algo": "ppo",
    "env": "CartPole-v1",
    "n_steps": 1024,
    "runner.log_interval_steps": 256,
    "eval.n_episodes": 2,
    "sampler.batch_T": 16,
    "sampler.batch_B": 4,
    "model": {"hidden": (16,)},
    "algo.epochs": 2,
}
QUADRATIC = {
    "algo": "tests.integrations.quadratic",
    "runner": "minibatch_rl",
    "runner.n_steps": 8 * 40 * 4,  # 40 updates a row
    "runner.log_interval_steps": 8 * 40,
    "sampler.batch_T": 8,
    "sampler.batch_B": 1,
}
TIMES = ("time/", "memory/", "system/")


class DiesOnce(Callback):
    """Ends its run, or its process, at the second row, unless it has done so before."""

    def __init__(self, marker: Path, signum: int = 0) -> None:
        self.marker, self.signum = marker, signum

    def on_log(self, row: Mapping[str, float]) -> None:
        if row["env_steps"] < 512 or self.marker.exists():
            return
        self.marker.touch()
        if self.signum:
            os.kill(os.getpid(), self.signum)
        raise RuntimeError("only once")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray with Tune, and a cluster of two CPUs."""
    found = pytest.importorskip("ray")
    pytest.importorskip("ray.tune")
    found.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
    yield found
    found.shutdown()


def of_tune(test: Any) -> Any:
    for mark in (
        pytest.mark.slow,
        pytest.mark.timeout(300),
        pytest.mark.filterwarnings("ignore"),  # those of Ray and of what it imports
    ):
        test = mark(test)
    return test


def metrics_of(result: Any) -> dict[str, float]:
    """Those of rlframe that a clock does not decide."""
    return {k: x for k, x in result.metrics.items() if "/" in k and not k.startswith((*TIMES, "config/"))}


def uninterrupted(**settings: Any) -> dict[str, float]:
    chosen = {**SMALL, "sampler": "serial", "threads": 1, "affinity": "none", "log_level": "WARNING", **settings}
    with rlframe.build(**chosen) as run:
        row = run.train()
    return {k: x for k, x in row.items() if "/" in k and not k.startswith(TIMES)}


def test_without_ray_tune_the_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rlframe.integrations.ray_tune", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "rlframe\[tune\]"'):
        import rlframe.integrations.ray_tune  # noqa: F401


def test_the_report_at_which_a_callback_stops_the_run_has_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Enough(Callback):
        def on_log(self, row: Mapping[str, float]) -> None:
            if row["env_steps"] >= 512:
                self.stop("enough")

    trial = SimpleNamespace(
        get_trial_resources=lambda: SimpleNamespace(bundles=[{"CPU": 1.0}]), get_trial_dir=lambda: str(tmp_path)
    )
    saved: list[bool] = []
    tune: Any = ModuleType("ray.tune")
    tune.get_context, tune.get_checkpoint = lambda: trial, lambda: None
    tune.Checkpoint = SimpleNamespace(from_directory=str)
    tune.report = lambda row, checkpoint="": saved.append(bool(checkpoint))
    ray: Any = ModuleType("ray")
    ray.tune = tune
    for name, module in {"ray": ray, "ray.tune": tune}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "rlframe.integrations.ray_tune", raising=False)
    found = importlib.import_module("rlframe.integrations.ray_tune")
    sys.modules.pop(found.__name__)  # so that no other test gets it
    found.trainable({**SMALL, "callbacks": [Enough()]}, checkpoint_every=10)({})
    assert saved == [False, False, True]


@of_tune
def test_settings_of_tune_win_in_every_form_and_threads_are_the_cpus_of_the_trial(ray: Any) -> None:
    from rlframe.integrations.ray_tune import for_cpus, merged

    both = merged({"algo": "ppo", "algo.clip": 0.1, "seed": 1}, {"algo": {"clip": 0.3}, "model": {"hidden": [8]}})
    assert both == {"algo": "ppo", "algo.clip": 0.3, "seed": 1, "model.hidden": [8]}
    one, three = for_cpus(both, 0.5), for_cpus(both, 3.0)
    assert (one["threads"], one["sampler"], one["affinity"]) == (1, "serial", "none")
    assert (three["threads"], three["sampler"], three["sampler.n_workers"]) == (3, "auto", 3)
    assert for_cpus({"sampler.n_workers": 2, "threads": 5}, 3.0).get("sampler") is None
    assert merged({"n_steps": 8}, {"runner.n_steps": 9, "algo.clip": np.float32(0.5)}) == {
        "runner.n_steps": 9,
        "algo.clip": 0.5,
    }
    with pytest.raises(ConfigError, match=r"log_dir=x is not for trials of Ray Tune: use storage_path"):
        merged({}, {"log_dir": "x"})


@of_tune
def test_asha_over_a_grid_stops_the_worse_ones_at_their_env_steps(ray: Any, tmp_path: Path) -> None:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    from rlframe.integrations.ray_tune import trainable

    asha = ASHAScheduler(time_attr="env_steps", max_t=1280, grace_period=320, reduction_factor=2)
    found = tune.Tuner(
        trainable(QUADRATIC, metrics=["algo/quality"]),
        param_space={"algo": {"weight": tune.grid_search([0.5, 1.0, 0.0])}, "seed": tune.grid_search([0, 1])},
        tune_config=tune.TuneConfig(metric="algo/quality", mode="max", scheduler=asha),
        run_config=tune.RunConfig(name="asha", storage_path=str(tmp_path), stop={"env_steps": 960}),
    ).fit()
    assert not found.errors
    best = found.get_best_result()
    assert best.config["algo"]["weight"] == 0.5
    assert 960 <= best.metrics["env_steps"] < 1280, "stop= ends it"
    assert min(each.metrics["env_steps"] for each in found) < 640, "ASHA ends others at its first or second rung"
    with rlframe.restore(best.checkpoint.path, trust=True) as run:  # a checkpoint is a state of rlframe's own
        assert run.runner.env_steps == best.metrics["env_steps"]


@pytest.mark.ray
@of_tune
def test_a_trial_continues_bit_for_bit_from_its_checkpoint(ray: Any, tmp_path: Path) -> None:
    from ray import tune

    from rlframe.integrations.ray_tune import trainable

    space = {"seed": 3, "callbacks": [DiesOnce(tmp_path / "failed")]}
    config = tune.RunConfig(name="failing", storage_path=str(tmp_path))
    wanted = tune.TuneConfig(metric="eval/return_mean", mode="max")
    failed = tune.Tuner(trainable(SMALL), param_space=space, tune_config=wanted, run_config=config).fit()
    assert "only once" in str(failed.errors[0])
    restored = tune.Tuner.restore(str(tmp_path / "failing"), trainable(SMALL), resume_errored=True).fit()
    assert not restored.errors
    assert metrics_of(restored[0]) == uninterrupted(seed=3)

    killed = tune.Tuner(
        trainable({**SMALL, "callbacks": [DiesOnce(tmp_path / "killed", signal.SIGKILL)]}),
        param_space={"seed": 3},
        tune_config=wanted,
        run_config=tune.RunConfig(
            name="killed", storage_path=str(tmp_path), failure_config=tune.FailureConfig(max_failures=1)
        ),
    ).fit()
    assert (tmp_path / "killed").exists()
    assert not killed.errors
    assert metrics_of(killed[0]) == metrics_of(restored[0])


@of_tune
def test_population_based_training_finds_the_schedule_that_no_fixed_number_is(ray: Any, tmp_path: Path) -> None:
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    from rlframe.integrations.ray_tune import trainable

    pbt = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        quantile_fraction=0.5,
        custom_explore_fn=lambda config: {**config, "algo.weight": 1.0 - config["algo.weight"]},
        synch=True,
    )
    found = tune.Tuner(
        trainable(QUADRATIC, metrics=["algo/quality"]),
        param_space={"algo.weight": tune.grid_search([0.0, 1.0])},
        tune_config=tune.TuneConfig(metric="algo/quality", mode="max", scheduler=pbt, reuse_actors=True),
        run_config=tune.RunConfig(name="pbt", storage_path=str(tmp_path)),
    ).fit()
    assert not found.errors
    assert max(each.metrics["algo/quality"] for each in found) > 1.15  # 0.39 with any one weight of these


@of_tune
def test_the_example_of_the_guide_runs(ray: Any, tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/studies.md").read_text(encoding="utf-8")
    example = guide.partition("```py\n")[2].partition("```")[0]
    for big, small in {
        "num_samples=8": "num_samples=1",
        "100_000": "600",
        "20_000": "300",
        'name="rates"': f'name="rates", storage_path={str(tmp_path)!r}',
    }.items():
        assert big in example
        example = example.replace(big, small)
    found: dict[str, Any] = {}
    exec(compile(example, "studies.md", "exec"), found)
    assert found["policy"].act([0.0] * 4) in (0, 1)


@of_tune
def test_a_mistyped_key_or_metric_is_one_line_with_the_nearest_name(ray: Any, tmp_path: Path) -> None:
    from ray import tune

    from rlframe.integrations.ray_tune import trainable

    def error_of(name: str, settings: Mapping[str, Any], metrics: Any = ()) -> str:
        fit = tune.Tuner(
            trainable({**SMALL, "n_steps": 64, **settings}, metrics),
            run_config=tune.RunConfig(name=name, storage_path=str(tmp_path)),
        ).fit()
        return str(fit.errors[0])

    assert "unknown key algo.clipp; did you mean algo.clip?" in error_of("key", {"algo.clipp": 0.1})
    assert not list((tmp_path / "key").rglob("progress.jsonl")), "nothing began"
    message = error_of("metric", {}, ["eval/returns_mean"])
    assert "waits for the metric eval/returns_mean, which this run never had; did you mean eval/return_mean" in message
