"""How far a drawn frame is from the one that was wanted, as the codec measures it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training.codec import entries_of


class Distortion(nn.Module):
    """The expected distance between what drawn residual codes stand for and what is left to say.

    A residual codebook can make up for what went wrong in those before it, and entries that are nearly alike are nearly
    as good. The likelihood of the one true code knows neither; this does. Distances are squared, in units of their
    variance over `frames` [N, groups], which `codebooks` [groups, codes, latent] speak for.
    """

    codebooks: Tensor

    def __init__(self, codebooks: Tensor, frames: Tensor) -> None:
        super().__init__()
        spread = entries_of(codebooks, frames).var(0).sum().sqrt()
        self.register_buffer("codebooks", codebooks / spread, persistent=False)

    def forward(self, drawn: Tensor, logits: Tensor, wanted: Tensor) -> Tensor:
        """Frames drawn in turn and wanted, both [N, groups]; logits [N, groups - 1, codes] of the draws -> a scalar.

        Each draw is judged by what it leaves to those behind it: the sum over residual groups, the mean over frames.
        """
        rest = entries_of(self.codebooks, wanted) - self.codebooks[0][drawn[:, 0]]
        total = rest.new_zeros(())
        for group, book in enumerate(self.codebooks[1:], 1):
            distances = torch.cdist(rest, book).square()
            total = total + (logits[:, group - 1].softmax(-1) * distances).sum(-1).mean()
            rest = rest - book[drawn[:, group]]
        return total
