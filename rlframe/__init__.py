"""rlframe: deep-RL research on one machine: a Runner drives a Sampler, an Agent and an Algorithm over [T, B] batches.

`train`, `build` and `load_policy` are one line each for a notebook. Importing rlframe loads neither torch nor NumPy.
"""

from typing import TYPE_CHECKING, Any, NoReturn

from rlframe.core.version import __version__ as __version__

if TYPE_CHECKING:
    from rlframe.experiment.live_run import LiveRun
    from rlframe.experiment.train import TrainResult
    from rlframe.study.overview import StudyOverview


def train(algo: Any = None, env: Any = None, /, n_steps: float | None = None, **settings: Any) -> "TrainResult":
    """Train one run, and return its directory and the last row of its log.

        result = rlframe.train("ppo", "CartPole-v1", n_steps=50_000, seed=0, **{"algo.learning_rate": 1e-3})
        result.metrics["eval/return_mean"]
        policy = rlframe.load_policy(result.directory)

        rlframe.train("ppo", MyEnv, n_steps=50_000, algo={"learning_rate": 1e-3}, callbacks=[MyCallback()])

    Settings are the keys of the command line (python -m rlframe.launch --help): algo, env, runner.n_steps (for short
    n_steps), seed, log_dir and so on; resume=RUN_DIR continues a run, and resume=URI one that
    sync= has copied there. Keys of a group may be a dict, and classes, functions and instances stand wherever a key
    takes module:name; a Config gives all of its keys. Settings that are left out have the algorithm's defaults: a
    preset is used only if experiment=NAME names it. As on the command line, the run is recorded in log_dir/run_0 or
    below data/local. This process is pinned to the run's cores until its end, and keeps its number of torch threads.

    Raises:
        ConfigError: a setting is wrong; nothing was written.
        Interrupted: Ctrl-C stopped it; a snapshot was written, and resume= continues the run.
    """
    keys = _keys("train", algo, env, n_steps, settings)
    from rlframe.experiment import fetch, job, train

    return train.train(job.place_job(job.read_job(fetch.with_fetched(keys)))[0])


def build(algo: Any = None, env: Any = None, /, n_steps: float | None = None, **settings: Any) -> "LiveRun":
    """A run to train step by step, with its `agent`, `algo`, `sampler` and `runner`. Settings: see train.

        with rlframe.build("dqn", "CartPole-v1", n_steps=10_000) as run:
            for row in run:  # trains up to the next row of the log
                print(row["env_steps"], row["eval/return_mean"])
            run.save("cartpole")

    It is recorded only if log_dir=DIR says where.

    Raises:
        ConfigError: a setting is wrong, or is for several processes.
    """
    keys = _keys("build", algo, env, n_steps, settings)
    from rlframe.experiment.job import read_job
    from rlframe.experiment.train import live_run

    return live_run(read_job(keys), str(settings.get("log_dir") or ""))


def restore(path: Any, n_steps: float | None = None, **settings: Any) -> "LiveRun":
    """The run whose state is in `path`, of LiveRun.save or a run directory, as it was; see build.

    Settings that may change are those of resume= on the command line: runner., eval., sampler., device and so on. As
    this is a run of its own, numbers that take schedules may change too, such as algo.learning_rate, and algo.epochs,
    minibatches, batch_size and replay_ratio; they hold from here on. A rate that Algorithm.learning_rate has set stays
    unless one is given, also by a Config. Objects that its params.json names but nothing can import are given again:
    restore(path, env=MyEnv). It is recorded only if log_dir=DIR says where.

    Raises:
        ConfigError: a setting is wrong or cannot change; there is no such run, or it needs trust=True.
        SnapshotError: it has no snapshot.
    """
    log_dir = str(settings.pop("log_dir", "") or "")
    settings.setdefault("sync", "")  # the state's own is that of another run
    keys = _keys("restore", None, None, n_steps, {"resume": str(path), **settings})
    from rlframe.experiment.job import read_job
    from rlframe.experiment.resumable import check_fits_state
    from rlframe.experiment.train import live_run

    return live_run(read_job(keys, check_fits_state), log_dir)


def run_study(
    variants: Any = ({},), seeds: Any = (0,), search: Any = (), n_steps: float | None = None, **settings: Any
) -> "StudyOverview":
    """Train every variant with every seed, several at a time, and return the runs with their scores and curves.

        study = rlframe.run_study(
            [{"algo": "ppo"}, {"algo": "a2c", "algo.learning_rate": 1e-3}],
            seeds=range(3), env="CartPole-v1", n_steps=50_000, log_dir="data/mine",
        )
        study.runs  # a dict for each run: setting, seed, state, score, ...; pandas.DataFrame(study.runs)
        study.curves()  # the columns of all logs

        rlframe.run_study(seeds=range(3), search={"algo.learning_rate": "loguniform(1e-5,1e-2)"}, n_runs=40, algo="ppo")

    A run is a process of its own, python -m rlframe.launch. Objects that it cannot import, of a notebook for example,
    are pickled into the study's directory. What is done is not repeated: the same call with the same log_dir continues
    a study. The table of the runs is printed, as on the command line.

    Args:
        variants: settings that differ, one dict for each variant; see train.
        search: what each key is drawn from, as search.KEY= on the command line; then there is one variant.
        settings: those of all runs (env, algo and so on), and of the study: log_dir, affinity, retries, stall_s, and
            n_runs, searcher, pruner and metric of a search.
    Raises:
        ConfigError: a setting of any run is wrong; nothing was started.
        Interrupted: Ctrl-C stopped it; the runs wrote snapshots.
    """
    from rlframe.study.variants import train_variants

    return train_variants(variants, [("runner.n_steps", n_steps), *settings.items()], seeds, search)


def read_study(directory: Any) -> "StudyOverview":
    """The study in a directory, its runs and curves, while it runs elsewhere or after it; see run_study.

    Raises:
        ConfigError: it is no study, or damaged.
    """
    from rlframe.study.overview import read_study as read

    return read(directory)


def entrypoint(function: Any, argv: Any = None) -> NoReturn:
    """Call the main function of a script with the key=value words of its command line, and exit.

        def train(n_steps: int = 100_000, seed: int = 0, log_dir: str = "") -> None: ...

        if __name__ == "__main__":
            rlframe.entrypoint(train)

    Words have the types of the parameters, and --help lists these. As in rlframe's own commands, an error of rlframe is
    one line, Ctrl-C shows no traceback, and the exit status is 1 if a run failed, 2 if a setting was wrong, 128 + n
    after signal n, and else 0 or the number that the function returns.
    """
    from rlframe.core.entrypoint import entrypoint as call

    call(function, argv)


def log(name: str, value: Any) -> None:
    """Log a metric from anywhere in a run's process: a network, an algorithm, an environment with sampler=serial.

    The row of the log has the mean of the interval's values, or what the name ends in: _sum, _last, _min or _max.
    Outside of a training nothing is logged. Environments in worker processes log through their `info`.

    Raises:
        ValueError: the name is not of the form group/name, or is a metric of rlframe, or value is not one number.
    """
    from rlframe.record import metrics

    metrics.log(name, value)


def _keys(call: str, algo: Any, env: Any, n_steps: float | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Flat keys, with names in the place of objects; `call`: the function that a script has called."""
    from rlframe.core.main_script import check_not_imported  # imports are in functions: rlframe alone loads no torch
    from rlframe.core.parts import python_keys
    from rlframe.experiment.presets import competing_work
    from rlframe.system.machine import gc_paused, limit_threads

    check_not_imported(call)
    given = [("algo", algo), ("env", env), ("runner.n_steps", n_steps)]
    keys = python_keys([*given, *settings.items()])
    limit_threads(competing_work(keys))
    with gc_paused():
        import rlframe.experiment.train  # noqa: F401  # with all that it loads
        from rlframe.experiment.objects import named
    return named(keys)


def load_policy(
    path: Any, device: str = "cpu", trust: bool = False, policy: str = "", snapshot: str = "", **settings: Any
) -> Any:
    """The trained policy of a run directory or snapshot (str or Path); `load_policy(RUN_DIR).act(observation)`.

    Of a run it is that of the best snapshot if it keeps one, else of the newest; `snapshot` names another: best, last
    or step_....

    Of several policies it is the one that `policy` names, for the observations of one of its agents. Without a name it
    is a TeamPolicy of all: `act({agent: observation})` returns {agent: action}.

    With `trust` the run's config may name code that is not part of rlframe. Settings take the place of the run's own:
    `env=MyEnv` for a class that the run cannot import.

    Raises:
        ConfigError: the run needs trust, or it has no policy of this name.
        SnapshotError: it has no snapshot.
    """
    from rlframe.core.parts import python_keys
    from rlframe.deploy.load import load_policy as load
    from rlframe.experiment.objects import named

    return load(path, device, trust, named(python_keys(settings.items())), policy, snapshot)
