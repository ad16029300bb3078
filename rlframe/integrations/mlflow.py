"""MLflow: `loggers=[mlflow]`. Its own settings apply: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and others."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient, MlflowException
from mlflow.entities import Metric, Param

from rlframe.integrations.tracker import Points, Tracker

_TAG = "rlframe.run"  # finds the run again
_DEFAULT_EXPERIMENT = "0"
_MAX_PARAMS = 100  # in one request
_MAX_VALUE = 500  # characters of a param, in MLflow's older stores


class MlflowLogger(Tracker):
    """Logs metrics with step `env_steps`.

    MLflow appends a second value at the same step instead of replacing it. But it tells all points that it has, and
    stores a row in one transaction (its file store: metric by metric), so that no window is left.
    """

    def connect(self, directory: Path, config: Mapping[str, Any], name: str, run_id: str, resumed: bool) -> None:
        self._client = MlflowClient()
        experiment = _experiment(self._client)
        found = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{run_id}'", max_results=1) if resumed else []
        run = found[0] if found else self._client.create_run(experiment, run_name=name, tags={_TAG: run_id})
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")
        params = {self.metric_name(key): str(value)[:_MAX_VALUE] for key, value in config.items()}
        missing = [Param(key, value) for key, value in params.items() if key not in run.data.params]
        for part in range(0, len(missing), _MAX_PARAMS):
            self._client.log_batch(self._run, params=missing[part : part + _MAX_PARAMS])

    def points(self) -> Points:
        points: dict[int, set[str]] = {}
        for name in self._client.get_run(self._run).data.metrics:
            for metric in self._client.get_metric_history(self._run, name):
                points.setdefault(metric.step, set()).add(name)
        return points

    def send(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [Metric(name, float(value), now, env_steps) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=rows)

    def finish(self, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")

    def metric_name(self, name: str) -> str:
        """With _ for each character that MLflow does not allow, of params too."""
        return re.sub(r"[^/\w.\- :]", "_", name)


def _experiment(client: MlflowClient) -> str:
    """The id of the experiment that MLflow's environment variables name; it is made if it does not exist."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if not name:
        return os.environ.get("MLFLOW_EXPERIMENT_ID", _DEFAULT_EXPERIMENT)
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name)
        except MlflowException:  # another run has just made it
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return found.experiment_id
