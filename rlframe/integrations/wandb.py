"""Weights & Biases: `loggers=[wandb]`. Its own settings apply: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and others."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import wandb

from rlframe.core.errors import ConfigError
from rlframe.core.files import append, open_regular_file, open_to_append, parse_json
from rlframe.integrations.tracker import Points, Tracker

_FOLDERS = ("wandb", ".wandb")  # one of them is W&B's own in the run's directory
_MAX_BYTES, _MAX_LINE_BYTES, _MAX_NAMES = 1 << 28, 1 << 20, 10_000  # of wandb_sent.jsonl


class WandbLogger(Tracker):
    """Logs each row with `env_steps` as a field, which is the x-axis, since W&B's own step must increase.

    W&B cannot say which points its server has, only how many steps it counts. Therefore wandb_sent.jsonl has a line for
    each step with its points, written before the step is logged; steps that W&B does not count have not arrived.
    Offline, every start writes a new complete file of all rows: sync the newest one, which replaces what was synced
    before. (W&B would append a file that was resumed offline, whatever the files before it had.)

    One window is left, online: a step that is still on its way from the killed process when the resumed one asks.
    Both then write the same step, with the same points, and W&B keeps the later.
    """

    def connect(self, directory: Path, config: Mapping[str, Any], name: str, run_id: str, resumed: bool) -> None:
        for folder in (directory / name for name in _FOLDERS):
            if folder.is_symlink():
                raise ConfigError(f"{folder} is a link, and W&B would write into its target; remove it")
            if os.path.lexists(folder / "settings"):  # read if this is the working directory
                raise ConfigError(f"{folder / 'settings'} may name another server for W&B; remove it")
        self._sent = directory / "wandb_sent.jsonl"
        if os.path.lexists(self._sent):  # before W&B starts
            open_regular_file(self._sent, _MAX_BYTES).close()
        offline = wandb.setup().settings.mode in ("offline", "dryrun")
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
        given = (line for line in _given(self._sent) if 0 <= line[0] < n_steps)
        # A step that did not arrive is given again: its last line counts.
        by_step = {step: (env_steps, names) for step, env_steps, names in given}
        points: dict[int, set[str]] = {}
        for env_steps, names in by_step.values():
            points.setdefault(env_steps, set()).update(names)
        return points

    def send(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        with open_to_append(self._sent) as file:
            append(file, f"\n{json.dumps([self._run.step, env_steps, [*metrics]])}")
        self._run.log({"env_steps": env_steps, **metrics})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _given(path: Path) -> Iterator[tuple[int, int, frozenset[str]]]:
    """The lines of a wandb_sent.jsonl: step, env_steps and names; without lines that a kill has torn.

    Raises:
        ConfigError: it is not a regular file, or larger than one of a run.
    """
    if not os.path.lexists(path):
        return
    known: dict[str, str] = {}  # each name once, however many lines have it
    with open_regular_file(path, _MAX_BYTES) as file:
        for line in iter(lambda: file.readline(_MAX_LINE_BYTES), b""):
            try:
                found = parse_json(line)
            except ValueError:  # torn, before its step was logged; or longer than a line can be
                continue
            match found:
                case [int() as step, int() as env_steps, [*names]] if all(isinstance(name, str) for name in names):
                    yield step, env_steps, frozenset(known.setdefault(name, name) for name in names)
            if len(known) > _MAX_NAMES:
                raise ConfigError(f"{path} names more than {_MAX_NAMES:,} metrics; remove it, to send all rows again")
