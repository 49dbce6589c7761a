"""What a stage has counted since its process started. It travels whole with every heartbeat, so none can be missed."""

from __future__ import annotations

import msgspec

from triptych.config.schema import StageKind
from triptych.telemetry.histogram import BYTES, SECONDS, SIZES, STEP_SECONDS, TOKENS, Histogram
from triptych.telemetry.work import Work


def _histogram(bounds: tuple[float, ...]) -> Histogram:
    histogram: Histogram = msgspec.field(default_factory=lambda: Histogram(bounds))
    return histogram


class TransferCounts(msgspec.Struct, kw_only=True):
    """The handoffs of one edge, as its source hands them to the connector."""

    size_bytes: Histogram = _histogram(BYTES)
    tx_s: Histogram = _histogram(STEP_SECONDS)

    def __add__(self, other: TransferCounts) -> TransferCounts:
        return TransferCounts(size_bytes=self.size_bytes + other.size_bytes, tx_s=self.tx_s + other.tx_s)


class StageCounts(msgspec.Struct, kw_only=True):
    """Only ever grows. A request that the stage finished is in `gen_time_s`; every other one failed or was aborted.

    `queue_wait_s` is from when a request has what it needs to begin to its first step, `gen_time_s` from there to its
    end. `transfers` is by target stage.
    """

    step_time_s: Histogram = _histogram(STEP_SECONDS)
    batch_size: Histogram = _histogram(SIZES)  # requests in a step
    step_tokens: Histogram = _histogram(TOKENS)  # rows computed, or codec frames decoded, in a step
    moved_bytes: float = 0.0  # see `Work`; by `step_time_s.total` this is the bandwidth that was achieved
    flops: float = 0.0
    encoder_step_time_s: Histogram = _histogram(STEP_SECONDS)
    queue_wait_s: Histogram = _histogram(SECONDS)
    gen_time_s: Histogram = _histogram(SECONDS)
    tokens: int = 0  # text tokens drawn, codec frames drawn, or codec frames decoded
    failed: int = 0
    aborted: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens that were looked for in the prefix cache
    prefix_hits: int = 0
    encoder_queries: int = 0  # images, clips and videos that were looked for among the encoded ones
    encoder_hits: int = 0
    transfers: dict[StageKind, TransferCounts] = {}

    def worked(self, work: Work) -> None:
        """Count what a step had to do."""
        self.moved_bytes += work.moved_bytes
        self.flops += work.flops

    def __add__(self, other: StageCounts) -> StageCounts:
        merged = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        transfers = dict(self.transfers)
        for target, counts in other.transfers.items():
            transfers[target] = transfers[target] + counts if target in transfers else counts
        return StageCounts(**merged, transfers=transfers)


_ADDED = tuple(name for name in StageCounts.__struct_fields__ if name != "transfers")
