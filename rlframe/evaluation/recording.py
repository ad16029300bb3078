"""EvaluationRecorder: writes the episodes that an evaluation counts to a dataset."""

from __future__ import annotations

from collections import defaultdict

from rlframe.core.types import Samples, Trajectory
from rlframe.data.cutting import Behaviour, EpisodeCutter, as_acted
from rlframe.data.episodes import Episode
from rlframe.data.writing import DatasetWriter, NewDataset


class EvaluationRecorder:
    """Takes the batches of an evaluator; an environment's episodes are written once the evaluation counts them."""

    def __init__(self, new: NewDataset, sampled: bool, behaviour: Behaviour = as_acted) -> None:
        """Args:
            sampled: whether actions are drawn from the policy, so that their log-probability is recorded.
            behaviour: gives it, see EpisodeCutter.add.
        Raises:
            ConfigError: there is a dataset of this name, or pyarrow is missing.
        """
        self.writer = DatasetWriter(new)
        self._behaviour = behaviour
        self._cutter = EpisodeCutter(new.observation_space, new.action_space, sampled)
        self._waiting: defaultdict[int, list[Episode]] = defaultdict(list)  # by environment

    def on_batch(self, samples: Samples) -> None:
        for b, episode in self._cutter.add(samples, self._behaviour):
            self._waiting[b].append(episode)

    def on_episode(self, trajectory: Trajectory) -> None:
        waiting, n_steps = self._waiting[trajectory.env], trajectory.length
        while waiting and n_steps > 0:  # a game has an episode for each life
            n_steps -= len(waiting[0])
            self.writer.put(waiting.pop(0))

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()
