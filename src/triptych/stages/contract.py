"""What the process loop needs from a stage. A stage never blocks: it takes what has come, steps, and emits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from triptych.config.schema import DeployConfig, StageConfig, StageKind
from triptych.connectors.contract import Receiver, Sender
from triptych.connectors.wire import Grant, StageStats, SubmitCodec, SubmitSpeech, SubmitText, ToServer
from triptych.telemetry.stage_times import StageTimes

Submit = SubmitText | SubmitSpeech | SubmitCodec


class Outbox(Protocol):
    """Where a stage puts messages for the server. Never blocks; delivery is off the step loop."""

    def send(self, message: ToServer, samples: bytes | None = None) -> None: ...


class Stage(Protocol):
    kind: StageKind

    def submit(self, message: Submit) -> None:
        """Take a request. A request that cannot be served is answered with `Failed`, never an exception."""

    def grant(self, message: Grant) -> None:
        """More credit for audio chunks (Code2Wav; others ignore it)."""

    def abort(self, request_id: str) -> StageTimes | None:
        """Free everything of the request, at once and idempotently. The loop sends `Freed` with its times, None for a
        request that was not here."""

    def poll_inputs(self) -> None:
        """Take what the connectors have delivered (new handoffs, new credit)."""

    def has_work(self) -> bool:
        """Whether `step` would do something now."""

    def step(self) -> None:
        """One unit of work. An exception here is fatal for the process, so per-request faults are caught inside."""

    def stats(self) -> StageStats: ...

    def close(self) -> None:
        """Release device memory, connectors and shared memory."""


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """Everything a stage is built from. Stage classes are built by `load(context)`.

    `config` is the stage as this replica of it sees it. `senders` is keyed by target stage, `receivers` by source
    stage; each holds an edge for every replica of that stage, by the replica's name. `progress(done, total)` reports
    bytes of weights loaded. The payloads: thinker -> talker `{"token_ids": int32 [n]}`, and before the first of those,
    of prompts with media, `{"hidden": [n, hidden]}` (bfloat16 as uint16); talker -> code2wav
    `{"codes": int32 [n, num_code_groups]}`. Each may be empty (n = 0) on the final handoff, and without async chunks
    they come in one.
    """

    config: StageConfig
    deploy: DeployConfig
    model: str
    outbox: Outbox
    senders: Mapping[StageKind, Mapping[str, Sender]]
    receivers: Mapping[StageKind, Mapping[str, Receiver]]
    progress: Callable[[int, int], None]
