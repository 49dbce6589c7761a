"""Typed messages between the server process and the stage processes, and their msgpack encoding.

Control goes over one ZeroMQ ROUTER (server) with a DEALER in each stage process; every message is one msgpack frame,
`AudioOutput` followed by one frame of raw samples. Stage-to-stage payloads do not pass here: see `contract`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from triptych.config.sampling import SamplingParams
from triptych.config.schema import DeployConfig, StageKind
from triptych.telemetry.stage_counts import StageCounts
from triptych.telemetry.stage_times import StageTimes

# --- server -> stage process -----------------------------------------------------------------------------------------


class Configure(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """First message to a process: what to load. `peers` maps each process name to its inbox endpoint."""

    deploy: DeployConfig
    model: str
    process: str
    run_dir: str
    peers: dict[str, str]
    log_level: str = "info"


class FeatureRef(msgspec.Struct, frozen=True, kw_only=True):
    """An array in a shared memory segment that the server holds until the request ends: map it, do not unlink it."""

    segment: str
    dtype: str  # numpy's name
    shape: tuple[int, ...]


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image, clip or video of a prompt.

    Its rows are those of [start, end) that hold the placeholder id of its kind. A video and its own sound have the same
    span, their placeholders interleaved; the sound follows its video in the list and is `in_video`. `digest` stands for
    the content and for all that was asked of the processor. `features` are uint8 [frames, height, width, 3] as
    resized for the encoder, one frame for an image; or the log mel spectrogram, float32 [bands, frames]. None for the
    Talker, which needs spans and positions only.
    """

    kind: Literal["image", "audio", "video"]
    start: int
    end: int
    digest: bytes
    grid: tuple[int, int, int] = (0, 0, 0)  # patches over time, height and width; image and video
    second_per_grid: float = 0.0  # video
    num_mel_frames: int = 0  # audio
    in_video: bool = False
    features: FeatureRef | None = None


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The replica of each stage that a request goes to, by its name in the deploy config, in all that it does there."""

    thinker: str = "thinker"
    talker: str = "talker"
    code2wav: str = "code2wav"


class SubmitText(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A request for the Thinker. `speak` opens its edge to the Talker."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # `seed` is always set here
    speak: bool
    media: tuple[MediaItem, ...] = ()  # by `start`
    route: Route = Route()


class SubmitSpeech(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The same request for the Talker: the prompt ids of its user turns and assistant header, and the speaker."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    speaker_id: int
    params: SamplingParams
    media: tuple[MediaItem, ...] = ()  # those of the user turns, by `start` in this prompt
    route: Route = Route()


class SubmitCodec(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The same request for Code2Wav. `credit` is how many audio chunks it may send before the server grants more."""

    request_id: str
    credit: int
    route: Route = Route()


class Grant(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The client has taken `count` audio chunks: Code2Wav may send as many more."""

    request_id: str
    count: int


class Abort(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Free everything of this request in every stage of the process, then answer `Freed` for each. Idempotent."""

    request_id: str


class PeerRestarted(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Another process has died: forget what its connection holds; a new one will bind the same inbox."""

    process: str


class Shutdown(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Leave the loop, release everything, exit with status 0."""


ToStage = Configure | SubmitText | SubmitSpeech | SubmitCodec | Grant | Abort | PeerRestarted | Shutdown

# --- stage process -> server -----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A process has connected and waits for `Configure`."""

    process: str
    pid: int


class LoadProgress(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """How far a replica of a stage has loaded: `done` of `total` bytes of weights. `stage` is the replica's name."""

    stage: str
    done: int
    total: int


class Loaded(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Every stage of a process is loaded. `summary` is one line per stage for the log."""

    process: str
    seconds: float
    summary: tuple[str, ...]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


class TextOutput(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """New text of a request. `finish_reason` is "stop" or "length" on the last one, which has `times`; else None."""

    request_id: str
    seq: int
    text: str
    num_tokens: int  # sampled tokens that this message stands for, the stop token included
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache held
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    times: StageTimes | None = None


class SpeechOutput(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The Talker is done with a request: how many frames, and why it ended ("stop" or "length")."""

    request_id: str
    num_frames: int
    finish_reason: str
    times: StageTimes | None = None


class AudioOutput(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """One chunk of audio; the samples (float32, little endian, 24 kHz mono, in [-1, 1]) are the next frame. The final
    one has `times`."""

    request_id: str
    seq: int
    num_frames: int
    final: bool
    times: StageTimes | None = None


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A stage could not go on with this request alone; the stage itself is well. It has freed the request."""

    request_id: str
    stage: StageKind
    message: str
    times: StageTimes | None = None  # None where the stage had not taken the request


class Freed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The answer to `Abort`: this stage holds nothing of the request any more. It has `times` where it held any."""

    request_id: str
    stage: StageKind
    times: StageTimes | None = None


class StageStats(msgspec.Struct, frozen=True, kw_only=True):
    """How one stage is now, and what it has counted since its start. `replica` is for the server to fill in.

    `device`, `dtype` (as torch names them) and `threads` are what it computes with; empty for one that is down.
    """

    stage: StageKind
    replica: int = 0
    running: int = 0
    waiting: int = 0
    parked: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    device: str = ""
    dtype: str = ""
    threads: int = 0
    counts: StageCounts = msgspec.field(default_factory=StageCounts)


class Heartbeat(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Sent at least once a second by a live process."""

    process: str
    stages: tuple[StageStats, ...]


class Fatal(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The process is about to exit with an error that is not one request's fault."""

    process: str
    message: str
    error: str = ""  # class name of the exception
    stage: StageKind | None = None  # the stage that was loading or stepping


ToServer = Hello | LoadProgress | Loaded | TextOutput | SpeechOutput | AudioOutput | Failed | Freed | Heartbeat | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_stage = msgspec.msgpack.Decoder(ToStage)
_to_server = msgspec.msgpack.Decoder(ToServer)


def encode(message: ToStage | ToServer) -> bytes:
    return _encoder.encode(message)


def decode_to_stage(frame: bytes) -> ToStage:
    """Raises msgspec.DecodeError on anything but a message for a stage."""
    return _to_stage.decode(frame)


def decode_to_server(frame: bytes) -> ToServer:
    """Raises msgspec.DecodeError on anything but a message for the server."""
    return _to_server.decode(frame)
