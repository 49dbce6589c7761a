"""Examples of one step of the Talker's training as tensors, and what becomes of the frames that it reads back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from training.rows import NO_CODE, UNKNOWN, SpeechExample

# Of the frames read back: some are random, so that the text is what leads; some are what it would have said itself,
# so that it goes on well behind its own mistakes.
SPOILT_ANSWERS, SPOILT_FRAMES = 0.3, 0.15
OWN_ANSWERS, OWN_FRAMES = 0.5, 0.5


class Batch:
    """Examples padded on the right: text_ids [B, R], codes [B, R, groups]; where the M targets [M, groups] are.

    Of each target also the word [M] and the phone [M] that it says, and the row [M] in which that word was given.
    """

    def __init__(self, examples: Sequence[SpeechExample], end: int, pad: int) -> None:
        self.end = end
        longest = max(len(example.text_ids) for example in examples)
        groups = len(examples[0].codes[0])
        self.text_ids = torch.full((len(examples), longest), pad)
        self.codes = torch.full((len(examples), longest, groups), NO_CODE)
        rows, columns, targets, words, phones, sources = [], [], [], [], [], []
        for index, example in enumerate(examples):
            self.text_ids[index, : len(example.text_ids)] = torch.tensor(example.text_ids)
            self.codes[index, : len(example.codes)] = torch.tensor(example.codes)
            for offset, frame in enumerate([*example.frames, [end] * groups]):
                rows.append(index)
                columns.append(example.first + offset)
                targets.append(frame)
            words += [*example.words, UNKNOWN]
            phones += [*example.phones, UNKNOWN]
            sources += [*example.sources, UNKNOWN]
        self.rows, self.columns, self.targets = torch.tensor(rows), torch.tensor(columns), torch.tensor(targets)
        self.words, self.phones, self.sources = torch.tensor(words), torch.tensor(phones), torch.tensor(sources)

    def spoil(self, codebook: int) -> None:
        """Replace some frames that are read back by random ones, in some answers. The targets stay."""
        self._read_back(torch.randint_like(self.codes, codebook), SPOILT_ANSWERS, SPOILT_FRAMES)

    def give_back(self, own: Tensor) -> None:
        """Replace some frames that are read back by the Talker's own ones [M, groups], in some answers."""
        codes = self.codes.clone()
        said = self.targets[:, -1] != self.end
        codes[self.rows[said], self.columns[said] + 1] = own[said]  # a frame is read back by the row behind its own
        self._read_back(codes, OWN_ANSWERS, OWN_FRAMES)

    def _read_back(self, codes: Tensor, answers: float, frames: float) -> None:
        chosen = (torch.rand(len(codes), 1) < answers) & (torch.rand(codes.shape[:2]) < frames)
        self.codes = torch.where((chosen & (self.codes[..., -1] != NO_CODE)).unsqueeze(-1), codes, self.codes)
