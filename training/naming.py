"""Auxiliary losses: an encoder's rows are to name what they stand for, as the Thinker's own embedding rows.

The text decoder knows the words of the domain by the rows of its embedding table. Rows of sound and pictures that point
the same way are understood at once, so the encoders need not wait for the answers' loss to find its way to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.domain import COLOURS, DIRECTIONS, ONES, SHAPES, TENS
from training.parts import text_embedding
from training.tiny_config import tiny_config

_BLANK_SEED = 20_240_102
_RARE = 5.0  # logits: a word has to stand out of what a row holds
_COVERED, _TOUCHED = (
    0.12,
    0.02,
)  # shares of a row: from the first on it names what it shows, up to the second it must not

SHOWN = {*COLOURS, *SHAPES, *ONES, *TENS[2:], *DIRECTIONS, "hundred"}  # what can be seen, in words
Covered = Sequence[tuple[Sequence[str], Tensor]]  # words, and the share of each row [rows] that what they name covers


class Names(nn.Module):
    """Scores rows of an encoder [N, hidden] against an embedding table [vocab, hidden] that is not trained."""

    table: Tensor

    def __init__(self, table: Tensor, shown: Mapping[str, int]) -> None:
        """`shown`: the words that a picture can show, with their ids."""
        super().__init__()
        blank = torch.randn(1, table.shape[1], generator=torch.Generator().manual_seed(_BLANK_SEED))
        self.register_buffer("table", torch.cat([table, blank]) / math.sqrt(table.shape[1]), persistent=False)
        self.words = list(shown)
        self.shown = [shown[word] for word in self.words]
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

    def seen(self, rows: Sequence[Tensor], covered: Sequence[Covered]) -> Tensor:
        """Mean loss of pictures each of whose rows must name what it shows, and nothing else."""
        scores = self._scores(torch.cat(list(rows)))
        share = torch.cat([self._shares(part, len(scored)) for part, scored in zip(covered, rows, strict=True)])
        decided = (share >= _COVERED) | (share <= _TOUCHED)
        losses = F.binary_cross_entropy_with_logits(scores, (share >= _COVERED).float(), reduction="none")
        return (losses * decided).sum() / (share >= _COVERED).sum().clamp(min=1)

    def named(self, rows: Sequence[Tensor]) -> list[set[str]]:
        """The words that the rows of each picture name."""
        return [
            {self.words[index] for index in torch.nonzero((self._scores(part) > 0).any(0)).flatten()} for part in rows
        ]

    def spelt(self, rows: Sequence[Tensor]) -> list[list[int]]:
        """The likeliest token of each row, repeats and blanks left out."""
        found = []
        for part in rows:
            likeliest = (part @ self.table.T).argmax(-1).unique_consecutive().tolist()
            found.append([token for token in likeliest if token != self.blank])
        return found

    def _scores(self, rows: Tensor) -> Tensor:
        """Logits [rows, shown] of a word being named."""
        return rows @ self.table[self.shown].T - _RARE

    def _shares(self, covered: Covered, rows: int) -> Tensor:
        shares = torch.zeros(rows, len(self.words))
        for words, share in covered:
            for word in words:
                index = self.words.index(word)
                shares[:, index] = torch.maximum(shares[:, index], share)
        return shares


def word_id(tokenizer: Tokenizer, word: str) -> int:
    """The token of a word inside a sentence. Raises ValueError for a word of several tokens."""
    [found] = tokenizer.encode(f" {word}").ids
    return found


def names_of(tokenizer: Tokenizer) -> Names:
    """The losses of the encoders of a tokenizer's Thinker."""
    config = tiny_config(tokenizer)["thinker_config"]["text_config"]
    table = text_embedding(config["vocab_size"], config["hidden_size"])
    return Names(table, {word: word_id(tokenizer, word) for word in sorted(SHOWN)})
