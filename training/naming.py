"""Auxiliary losses: an encoder's rows are to name what they stand for, as the Thinker's own embedding rows.

The text decoder knows the words of the domain by the rows of its embedding table. Rows of sound and pictures that point
the same way are understood at once, so the encoders need not wait for the answers' loss to find its way to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BLANK_SEED = 20_240_102
_RARE = 5.0  # logits: a word has to stand out of all rows of a picture


class Names(nn.Module):
    """Scores rows of an encoder [N, hidden] against an embedding table [vocab, hidden] that is not trained."""

    table: Tensor

    def __init__(self, table: Tensor, content: Sequence[int]) -> None:
        """`content`: ids of the words that a picture can show."""
        super().__init__()
        blank = torch.randn(1, table.shape[1], generator=torch.Generator().manual_seed(_BLANK_SEED))
        self.register_buffer("table", torch.cat([table, blank]) / math.sqrt(table.shape[1]), persistent=False)
        self.content = sorted(set(content))
        self.blank = table.shape[0]

    def heard(self, rows: Sequence[Tensor], words: Sequence[Sequence[int]]) -> Tensor:
        """Mean loss of clips whose rows must spell their transcripts in order (CTC, Graves et al. 2006)."""
        lengths = torch.tensor([len(part) for part in rows])
        logits = nn.utils.rnn.pad_sequence(list(rows)) @ self.table.T
        targets = torch.tensor([word for said in words for word in said])
        return F.ctc_loss(
            logits.log_softmax(-1),
            targets,
            lengths,
            torch.tensor([len(said) for said in words]),
            blank=self.blank,
            zero_infinity=True,
        )

    def seen(self, rows: Sequence[Tensor], words: Sequence[Sequence[int]]) -> Tensor:
        """Mean loss of pictures of which some row must name each word that is shown, and none any other."""
        shown = torch.tensor([[float(word in said) for word in self.content] for said in words])
        return F.binary_cross_entropy_with_logits(self._scores(rows), shown, reduction="sum") / max(1.0, shown.sum())

    def named(self, rows: Sequence[Tensor]) -> list[set[int]]:
        """The words that the rows of each picture name."""
        return [{self.content[index] for index in torch.nonzero(part > 0).flatten()} for part in self._scores(rows)]

    def _scores(self, rows: Sequence[Tensor]) -> Tensor:
        """Logits [pictures, content] of a word being named by some row."""
        content = self.table[self.content]
        return torch.stack([(part @ content.T).logsumexp(0) for part in rows]) - _RARE
