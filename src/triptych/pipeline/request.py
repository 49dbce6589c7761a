"""What the server (or `Omni`) asks of the pipeline, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triptych.config.sampling import SamplingParams
from triptych.connectors.wire import MediaItem, TokenLogprob
from triptych.media.contract import MediaLease
from triptych.pipeline.stage_report import StageReport


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaTokens:
    """How many rows of a prompt hold sound (that of videos included), images and frames of videos."""

    audio: int = 0
    image: int = 0
    video: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request ready to run: tokenised, validated, every default filled in, both seeds set.

    `talker` is None for text only. `voice` None is the model's own default. `speaks` is whether audio was asked for.
    `arrival` is the loop's time that its deadline counts from, None: from its submission. `on_stage` hears once of each
    stage that it was announced to: of one that had to be aborted possibly after the request's last event.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    thinker: SamplingParams
    talker: SamplingParams | None = None
    voice: str | None = None
    media: tuple[MediaItem, ...] = ()
    media_tokens: MediaTokens = MediaTokens()
    lease: MediaLease | None = None  # closed when the request has ended, however it ended
    arrival: float | None = None
    on_stage: Callable[[StageReport], None] | None = None

    @property
    def speaks(self) -> bool:
        return self.talker is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text. `finish_reason` ("stop" or "length") is set on the last one of the request."""

    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioDelta:
    """New audio: float32 little-endian samples, mono, 24 kHz, in [-1, 1]."""

    samples: bytes
    num_frames: int
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The last event. `finish_reason` is "length" when either the text or the speech hit a limit, else "stop"."""

    finish_reason: str
    prompt_tokens: int
    text_tokens: int
    audio_frames: int
    cached_tokens: int = 0  # of the prompt tokens, those that the prefix cache held
    media_tokens: MediaTokens = MediaTokens()  # of the prompt tokens, those that stand for media


Event = TextDelta | AudioDelta | Done
