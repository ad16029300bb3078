"""Trackio: `loggers=[trackio]`. Its own settings apply: TRACKIO_DIR, TRACKIO_SPACE_ID and others."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import trackio
from trackio.remote_client import RemoteClient
from trackio.sqlite_storage import SQLiteStorage

from rlframe.integrations.tracker import Points, Tracker

_DEFAULT_PROJECT = "rlframe"  # trackio itself has no variable for the project


class TrackioLogger(Tracker):
    """Logs rows with step `env_steps`.

    Trackio tells all points that it has. Rows in its memory are lost by a kill, and therefore sent by the resumed run.
    Locally no window is left. With a Space or server that cannot be reached, trackio buffers rows on disk and sends
    them at its next start; rows that were in this buffer when the run was killed are doubled.
    """

    def connect(self, directory: Path, config: Mapping[str, Any], name: str, run_id: str, resumed: bool) -> None:
        self._project = os.environ.get("TRACKIO_PROJECT", _DEFAULT_PROJECT)
        self._name = f"{name}-{run_id}"  # trackio finds a run by its name
        self._run = trackio.init(self._project, self._name, config=dict(config), resume="allow")

    def points(self) -> Points:
        source = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        if source:
            client = RemoteClient(source, hf_token=huggingface_hub.get_token(), verbose=False)
            logs = client.predict(self._project, self._name, api_name="/get_logs")
        else:
            logs = SQLiteStorage.get_logs(self._project, self._name)
        points: dict[int, set[str]] = {}
        for row in logs:
            points.setdefault(row["step"], set()).update(row)
        return points

    def send(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=env_steps)

    def finish(self, failed: bool) -> None:
        self._run.finish()
