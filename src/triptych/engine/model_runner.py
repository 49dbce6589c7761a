"""Everything of an engine that touches the device: the cache, the inputs of a step, and the step itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from triptych.engine.batch import ScheduledBatch, ScheduledRow
from triptych.engine.inputs import StepInputs, begun_blocks, build_inputs
from triptych.engine.kv_cache import KVCache
from triptych.engine.recorded_decodes import RecordedDecodes, StepModel
from triptych.layers.decoder import BetweenLayers


class RowEmbedder(Protocol):
    """Makes the input rows of a batch."""

    def __call__(self, rows: Sequence[ScheduledRow], num_rows: int) -> Tensor:
        """[num_rows, hidden], packed in order; rows past the batch's own are padding of any finite value."""


class ModelRunner:
    """Runs one batch at a time; holds no policy. `between` says what a step does between the layers, if anything.

    Steps of decode rows alone, with nothing between the layers, are replayed where they were `recorded`.
    """

    def __init__(
        self,
        *,
        model: StepModel,
        embed: RowEmbedder,
        cache: KVCache,
        device: torch.device,
        batch_invariant: bool,
        between: Callable[[StepInputs], BetweenLayers | None] | None = None,
        recorded: RecordedDecodes | None = None,
    ) -> None:
        self.model, self.embed, self.cache, self.between = model, embed, cache, between
        self.device, self.batch_invariant, self.recorded = device, batch_invariant, recorded

    def execute(self, batch: ScheduledBatch) -> tuple[tuple[ScheduledRow, ...], Tensor | None]:
        """Compute every row of the batch.

        Returns the rows that sample and their hidden states, [padded, hidden]: one per sampling row in order, then
        padding up to a whole row tile. None when no row samples.
        """
        inputs = build_inputs(
            batch,
            block_size=self.cache.block_size,
            device=self.device,
            batch_invariant=self.batch_invariant,
            by_row=self.model.by_row,
            buckets=self.recorded.buckets if self.recorded is not None else None,
        )
        if not self.model.by_row:  # what is masked is read, and a request that failed may have left NaN
            self.cache.blank(begun_blocks(batch, self.cache.block_size))
        x = self.embed(inputs.rows, inputs.num_rows)
        between = self.between(inputs) if self.between is not None else None
        if self.recorded is not None and inputs.bucket is not None and between is None:
            hidden = self.recorded(inputs.bucket, x, inputs)
        else:
            hidden = self.model(x, inputs.positions, self.cache.layers, inputs.metadata, between)
        if not inputs.sampling:
            return (), None
        return inputs.sampling, hidden.index_select(0, inputs.sample_rows)
