"""torch's layers without their initial values, which a checkpoint replaces: on the meta device drawing them imports
half of torch's compiler, a second in which a stage could have been ready."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: the weights are loaded."""


class Conv2d(nn.Conv2d):
    def reset_parameters(self) -> None:
        """Nothing: the weights are loaded."""


class Conv3d(nn.Conv3d):
    def reset_parameters(self) -> None:
        """Nothing: the weights are loaded."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing: the weights are loaded."""
