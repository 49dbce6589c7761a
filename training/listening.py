"""What the decoder makes of the Talker's own residual codes, beside what the teacher said: a loss that hears them.

A distance between frames does not know which differences are heard, nor that the frames around are heard with each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.codec import entries_of
from training.evaluate_codec import load_codec
from training.phone_ear import clarity_loss, train_ear
from training.rows import SpeechExample
from training.spectra import spectral_loss
from training.teacher import FRAME

# Crops of a batch, whose answers are of about one length: so many of so many frames, the first that it has enough of.
SHAPES = ((6, 20), (12, 9))
OPENINGS, LEAD = 0.3, 4  # of the batches of long crops, those of first frames; in others so many frames are not heard


@dataclass(frozen=True, slots=True)
class Crops:
    """Where the frames of some stretches of speech are among the targets of their batch [C, n], and the teacher's
    samples [C, 1920 n]. The first `lead` frames are decoded and not heard."""

    places: Tensor
    waveforms: Tensor
    lead: int


def crops(examples: Sequence[SpeechExample], rng: np.random.Generator) -> Crops | None:
    """Random crops of a batch; None where its answers are too short for any."""
    lengths = [len(example.frames) for example in examples]
    first_target = np.cumsum([0, *(length + 1 for length in lengths)])  # behind the frames of each is its end
    for count, frames in SHAPES:
        chosen = [index for index in rng.permutation(len(examples)) if lengths[index] >= frames][:count]
        if len(chosen) < count:
            continue
        opening = (count, frames) != SHAPES[0] or rng.random() < OPENINGS
        places, waveforms = [], []
        for index in chosen:
            first = 0 if opening else int(rng.integers(0, lengths[index] - frames + 1))
            recording = examples[index].recording
            if recording is None:
                raise ValueError("an example without a recording cannot be compared with what the teacher said")
            waveforms.append(torch.from_numpy(recording.waveform(first * FRAME, frames * FRAME)))
            places.append(torch.arange(frames) + int(first_target[index]) + first)
        return Crops(torch.stack(places), torch.stack(waveforms), 0 if opening else LEAD)
    return None


class Listening:
    """The trained codec and the trained ear under `work`, both as they are."""

    def __init__(self, work: Path) -> None:
        codec, _ = load_codec(work)
        self.codec, self.ear = codec.requires_grad_(False), train_ear(work)
        self._upsample = torch.compile(self.codec.upsample, dynamic=False)

    def __call__(self, frames: Tensor, logits: Tensor, heard: Crops) -> dict[str, Tensor]:
        """Frames [N, groups] of which the first are those of the crops, drawn from logits [N, groups - 1, codes] -> how
        far their sound is from the teacher's, by spectra and by the ear.

        The decoder hears what was drawn; the gradient is that of the expected entries (straight through, Bengio et al.,
        "Estimating or propagating gradients through stochastic neurons", 2013).
        """
        count, books = heard.places.numel(), self.codec.quantizer.codebooks
        expected = torch.stack([logits[:count, group].softmax(-1) @ book for group, book in enumerate(books[1:])]).sum(
            0
        )
        latents = entries_of(books, frames[:count]) + (expected - expected.detach())
        rows = latents.view(*heard.places.shape, -1).transpose(1, 2)
        output = self._upsample(self.codec.transform(rows))
        target = heard.waveforms[:, : output.shape[1]]
        output, target = output[:, heard.lead * FRAME :], target[:, heard.lead * FRAME :]
        return {"spectral": spectral_loss(output, target), "clarity": clarity_loss(self.ear, output, target)}
