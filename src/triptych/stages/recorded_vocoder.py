"""Chunks of Code2Wav, recorded for the sizes that streams are cut to."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.engine.buckets import growing, smallest
from triptych.layers.recording import Recorder, Recording
from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.stages.cadence import Cadence
from triptych.streaming.state import StreamState


class RecordedVocoder:
    """`model` over `state`: first chunks and later ones of a cadence, for numbers of streams that double.

    The last chunk of a stream may have any size; one of another size is decoded as it comes.
    """

    def __init__(
        self, model: Code2Wav, state: StreamState, cadence: Cadence, recorder: Recorder, *, max_batch: int
    ) -> None:
        self.model, self.state = model, state
        self.sizes = tuple(growing(1, max_batch, 2))
        kinds = [(cadence.initial, True), *((frames, False) for frames in cadence.later_sizes())]
        shapes = [(size, *kind) for size in self.sizes for kind in kinds]
        shapes.sort(key=lambda shape: shape[0] * shape[1], reverse=True)
        with torch.inference_mode():
            self._recordings = {
                (size, frames, first): Recording(recorder, partial(self._decode, first), self._nothing(size, frames))
                for size, frames, first in shapes
            }

    def __call__(self, codes: Tensor, slots: Tensor, *, first: bool) -> Tensor:
        """As `Code2Wav.forward` with a state; see `Recording` for how long the samples [B, n] stay."""
        count, _, frames = codes.shape
        size = smallest(self.sizes, count)
        recording = self._recordings.get((size, frames, first))
        if recording is None:
            return self._decode(first, codes, slots)
        missing = size - count
        padded = F.pad(codes, (0, 0, 0, 0, 0, missing)), F.pad(slots, (0, missing), value=self.state.trash_slot)
        return recording(*padded)[:count]

    def _decode(self, first: bool, codes: Tensor, slots: Tensor) -> Tensor:
        wav: Tensor = self.model(codes, self.state, slots, first=first)
        return wav

    def _nothing(self, count: int, frames: int) -> tuple[Tensor, Tensor]:
        """Codes and slots to record with: what is kept of them goes to the trash slot."""
        device = self.model.norm.device
        codes = torch.zeros(count, self.model.config.num_quantizers, frames, dtype=torch.int32, device=device)
        return codes, torch.full((count,), self.state.trash_slot, device=device)
