"""The residual codes of a step's frames, recorded: all steps of the code predictor and their draws as one."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.engine.buckets import growing, smallest
from triptych.layers.linear import padded_rows
from triptych.layers.recording import Recorder, Recording
from triptych.models.qwen3_omni.talker import Talker
from triptych.stages.residual_draw import ResidualDraw


class RecordedFrames:
    """Of up to `max_frames` frames, recorded for numbers of frames that double from `row_tile` on."""

    def __init__(self, model: Talker, recorder: Recorder, *, max_frames: int, row_tile: int) -> None:
        self.model = model
        self.sizes = tuple(growing(row_tile, padded_rows(max_frames, row_tile), 2))
        with torch.inference_mode():
            self._recordings = {
                # A frame is drawn from its own row alone, so what stands in the others is of no account.
                size: Recording(recorder, self._frames, self._nothing(size), whole=False)
                for size in reversed(self.sizes)
            }

    def __call__(self, hidden: Tensor, first: Tensor, draw: ResidualDraw) -> Tensor:
        """As `Talker.residual_codes`; see `Recording` for how long the codes [n, residuals] stay."""
        count = first.shape[0]
        recording = self._recordings[smallest(self.sizes, count)]
        return recording(hidden[:count], first, draw.uniforms, draw.greedy)[:count]

    def _frames(self, hidden: Tensor, first: Tensor, uniforms: Tensor, greedy: Tensor) -> Tensor:
        return self.model.residual_codes(hidden, first, ResidualDraw(uniforms, greedy))

    def _nothing(self, count: int) -> tuple[Tensor, ...]:
        table = self.model.code_table
        return (
            table.new_zeros(count, table.shape[1]),
            torch.zeros(count, dtype=torch.long, device=table.device),
            torch.zeros(count, self.model.num_code_groups - 1, dtype=torch.float64, device=table.device),
            torch.zeros(count, dtype=torch.bool, device=table.device),
        )
