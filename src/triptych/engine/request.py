"""One request inside an autoregressive engine, as plain integers. Rows stand for tokens: of text in the Thinker, of
prompt and codec frames in the Talker."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from triptych.config.sampling import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # holds no blocks; new or preempted
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, kw_only=True)
class EngineRequest:
    """Scheduling state of one request.

    The engine lets `num_computed_tokens` catch up with `num_tokens`. Prompt rows, rows that a prior step sampled, rows
    that have not arrived from another stage yet and rows lost to preemption are the same case: rows not computed.
    `num_tokens` is how many rows are known; `token_ids` holds their ids where prefix hashes need them.
    """

    request_id: str
    num_prompt_tokens: int
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_computed_tokens: int = 0
    # Rows at or past this index are computed one a step, also when they are recomputed after a preemption, so that
    # their arithmetic never depends on timing. None: no such promise, rows may be computed together.
    single_from: int | None = None
    block_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    parked: bool = False  # downstream has no credit: not schedulable until it has
    slot: int = -1  # row in the runner's per-request buffers while running; -1 when it holds none
    num_preemptions: int = 0

    @property
    def num_output_tokens(self) -> int:
        return max(0, self.num_tokens - self.num_prompt_tokens)
