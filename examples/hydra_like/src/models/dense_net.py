"""A network of dense layers."""

import torch
from torch import nn


class DenseNet(nn.Sequential):
    """One hidden layer with dropout.

    Args:
        inputs: numbers of an example.
        hidden: units of the hidden layer.
        classes: number of classes.
        dropout: share of hidden units that are left out in training.
    """

    def __init__(self, inputs: int = 64, hidden: int = 64, classes: int = 10, dropout: float = 0.1) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(inputs, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the classes."""
        return super().forward(images)
