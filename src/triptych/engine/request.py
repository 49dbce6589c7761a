"""One request inside an autoregressive engine, as plain integers. Rows stand for tokens: of text in the Thinker, of
prompt and codec frames in the Talker."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from triptych.config.sampling import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # holds no blocks; new or preempted
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, kw_only=True, eq=False)
class EngineRequest:
    """Scheduling state of one request.

    The engine lets `num_computed_tokens` catch up with `num_tokens`. Prompt rows, rows that a prior step sampled, rows
    that have not arrived from another stage yet and rows lost to preemption are the same case: rows not computed.
    `num_tokens` is how many rows are known; `token_ids` holds their ids where prefix hashes need them. The scheduler
    writes every field from `num_sampled` on; two requests are equal only if they are the same object.
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
    # Media whose first row is the key, as a digest of what was fed: equal placeholder ids with other media never match.
    content_keys: dict[int, bytes] = field(default_factory=dict)
    # Inputs of some rows before this one are not at hand (media that is not encoded): the request starts only from a
    # prefix-cache hit that reaches up to here, or once whoever brings the inputs has set it back.
    absent_end: int = 0
    # Where the prompt rows stand on the three axes of M-RoPE, [3, num_prompt_tokens]; row r behind them stands at
    # r + position_delta. None: row r at r on all three.
    positions: NDArray[np.float32] | None = None
    position_delta: float = 0.0
    # When a step with its next row has to begin, on the engine's clock; the stage that knows may write it at any time.
    # Requests are served by it, then by arrival: where all have the same, first come, first served.
    due_at: float = 0.0
    # Of use to metrics and traces alone: when the request had what it needs to begin, when its first step began, and
    # when its first token was drawn.
    ready_at: float = 0.0
    started_at: float | None = None
    first_at: float | None = None
    # Tokens drawn so far. Row p draws the next one only if p == num_prompt_tokens - 1 + num_sampled, so a row that is
    # recomputed after a preemption never draws twice.
    num_sampled: int = 0
    block_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    parked: bool = False  # downstream has no credit: not schedulable until it has
    slot: int = -1  # row in the runner's per-request buffers while running; -1 when it holds none
    num_preemptions: int = 0
    arrival: int = -1  # place in first-come order
    num_cached_tokens: int = 0  # prompt rows that the prefix cache held at the first admission
    num_cached_blocks: int = 0  # leading blocks of `block_ids` whose contents are registered in the prefix cache
    block_hashes: list[bytes] = field(default_factory=list)  # chained, one per full block of `token_ids`
