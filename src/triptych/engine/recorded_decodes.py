"""Decode steps of a decoder's layers, recorded for every shape that they can have."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from triptych.engine.buckets import DecodeBuckets
from triptych.engine.inputs import StepInputs
from triptych.engine.kv_cache import KVCache
from triptych.layers.attention import PagedMetadata, StepMetadata
from triptych.layers.decoder import BetweenLayers
from triptych.layers.recording import Recorder, Recording


class StepModel(Protocol):
    """The layers of a decoder, which the runner steps."""

    @property
    def by_row(self) -> bool:
        """Whether it takes `RowMetadata`; else it takes `PagedMetadata`."""

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        caches: list[Tensor],
        metadata: StepMetadata,
        between: BetweenLayers | None = None,
    ) -> Tensor:
        """Rows [N, hidden] -> hidden states [N, hidden]."""


class RecordedDecodes:
    """The steps of `model` over `cache` that have decode rows alone, of the shapes of `buckets`."""

    def __init__(
        self, model: StepModel, cache: KVCache, buckets: DecodeBuckets, recorder: Recorder, *, hidden_size: int
    ) -> None:
        self.model, self.cache, self.buckets = model, cache, buckets
        with torch.inference_mode():
            self._recordings = {
                (rows, blocks): Recording(recorder, partial(self._step, rows), self._nothing(rows, blocks, hidden_size))
                for rows, blocks in buckets.largest_first()
            }

    def __call__(self, bucket: tuple[int, int], x: Tensor, inputs: StepInputs) -> Tensor:
        """Rows x [rows of the bucket, hidden] -> hidden states of the same shape; see `Recording` for how long."""
        metadata = inputs.metadata
        assert isinstance(metadata, PagedMetadata)
        return self._recordings[bucket](
            x, inputs.positions, metadata.slots, metadata.decode_blocks, metadata.decode_mask
        )

    def _step(self, rows: int, x: Tensor, positions: Tensor, slots: Tensor, blocks: Tensor, mask: Tensor) -> Tensor:
        return self.model(x, positions, self.cache.layers, PagedMetadata(slots, rows, blocks, mask, ()))

    def _nothing(self, rows: int, blocks: int, hidden_size: int) -> tuple[Tensor, ...]:
        """Inputs to record with: rows that look at the first position of the trash block, and write there."""
        device, size = self.cache.layers[0].device, self.cache.block_size
        looks = torch.zeros(rows, 1, 1, blocks * size, dtype=torch.bool, device=device)
        looks[..., 0] = True
        return (
            torch.zeros(rows, hidden_size, dtype=self.cache.dtype, device=device),
            torch.zeros(3, rows, device=device),
            torch.arange(rows, device=device) % size,
            torch.zeros(rows * blocks, dtype=torch.long, device=device),
            looks,
        )
