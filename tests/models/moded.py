"""An encoder whose train and eval modes differ."""

from gymnasium import Space
from torch import Tensor, nn


class Moded(nn.Module):
    """Batch normalisation, a layer, dropout."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        (n,) = space.shape or ()
        self.norm = nn.BatchNorm1d(n)
        self.layers = nn.Sequential(nn.Linear(n, 16), nn.Dropout(0.5), nn.ReLU())

    def forward(self, observation: Tensor) -> Tensor:
        features: Tensor = self.layers(self.norm(observation))
        return features
