"""Weights & Biases: `writers=[wandb]`. Its own settings apply: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and others."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from rlframe.integrations.tracker import Points, Tracker


class WandbWriter(Tracker):
    """Logs each row with `env_steps` as a field, which is the x-axis, since W&B's own step must increase.

    W&B cannot say which points its server has, only how many steps it counts. Therefore wandb_sent.jsonl has a line for
    each step with its points, written before the step is logged; steps that W&B does not count have not arrived.
    Offline, every start writes a new complete file of all rows: sync the newest one, which replaces what was synced
    before. (W&B would append a file that was resumed offline, whatever the files before it had.)

    One window is left, online: a step that is still on its way from the killed process when the resumed one asks.
    Both then write the same step, with the same points, and W&B keeps the later.
    """

    def connect(self, directory: Path, config: Mapping[str, Any], name: str, run_id: str, resumed: bool) -> None:
        offline = wandb.setup().settings.mode in ("offline", "dryrun")
        self._sent = directory / "wandb_sent.jsonl"
        self._run = wandb.init(
            id=run_id,
            name=name,
            config=dict(config),
            dir=os.environ.get("WANDB_DIR") or str(directory),
            resume="allow" if resumed and not offline else None,
            settings=wandb.Settings(console=os.environ.get("WANDB_CONSOLE", "off")),  # debug.log has the messages
        )
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")

    def points(self) -> Points:
        n_steps = self._run.step
        by_step = {}  # a step that did not arrive is given again: its last line counts
        for line in self._sent.read_bytes().splitlines() if self._sent.exists() else ():
            try:
                step, env_steps, names = json.loads(line)
            except ValueError:  # torn by a kill, before its step was logged
                continue
            by_step[step] = env_steps, names
        points: dict[int, set[str]] = {}
        for step, (env_steps, names) in by_step.items():
            if step < n_steps:
                points.setdefault(env_steps, set()).update(names)
        return points

    def send(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        with self._sent.open("a") as file:
            file.write(f"\n{json.dumps([self._run.step, env_steps, [*metrics]])}")
        self._run.log({"env_steps": env_steps, **metrics})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
