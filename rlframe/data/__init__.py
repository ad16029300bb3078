"""Recorded experience: datasets of episodes, read and written in Minari's formats."""

from rlframe.data.episodes import Episode
from rlframe.data.reading import Dataset, open_dataset
from rlframe.data.writing import DatasetWriter, NewDataset

__all__ = ["Dataset", "DatasetWriter", "Episode", "NewDataset", "open_dataset"]
