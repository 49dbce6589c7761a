"""What a request brings along, and what becomes of it: the values between the API, the media workers and the pipeline.

Plain values, no torch. The server process fetches the bytes and checks who may be asked for them; a worker process
decodes them and makes the encoder's input; the server hands that on by the name of a shared memory segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from triptych.connectors.wire import FeatureRef

MediaKind = Literal["image", "audio", "video"]
HIGHEST_RATE = 4_000_000  # samples a second of sound: more than of any recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """One part of a message: where its file is (`https:`, `data:` or `file:` URL), or the file itself.

    `param` is the part's place in the request ("messages.0.content.1"), for errors. `max_pixels` is this image's own
    limit, where it is lower than that of the request's options.
    """

    kind: MediaKind
    param: str
    url: str = ""
    data: bytes = b""
    max_pixels: int | None = None


class MediaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`mm_processor_kwargs`, under the names of the processors. None is the checkpoint's own value."""

    use_audio_in_video: bool = False
    fps: float | None = None  # frames a second sampled of a video
    num_frames: int | None = None  # frames sampled of a video, instead of `fps`
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None  # of an image, and of each frame of a video
    max_pixels: int | None = None


class MediaFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """One decoded part, ready for its encoder; see `wire.MediaItem` for the fields. `sound` belongs to a video."""

    kind: MediaKind
    digest: bytes
    features: FeatureRef
    grid: tuple[int, int, int] = (0, 0, 0)
    second_per_grid: float = 0.0
    num_mel_frames: int = 0
    sound: MediaFeatures | None = None


@dataclass(slots=True)
class MediaStats:
    """Counters of a loader since its start."""

    decoded: int = 0  # parts that a worker decoded
    cache_hits: int = 0  # parts that had been decoded before
    refused: int = 0  # parts that ended in an error of the client
    fetch_seconds: float = 0.0
    decode_seconds: float = 0.0


class MediaLease(Protocol):
    """Decoded parts of one request, in their order; their shared memory stays until `close`, which is idempotent."""

    @property
    def items(self) -> Sequence[MediaFeatures]: ...

    def close(self) -> None: ...


class MediaLoader(Protocol):
    """Fetches and decodes. Safe to call from many requests at once in one event loop."""

    @property
    def stats(self) -> MediaStats: ...

    async def load(
        self, parts: Sequence[MediaPart], options: MediaOptions, *, max_rows: int | None = None
    ) -> MediaLease:
        """All parts of one request, or an error and nothing held. No part may take more than `max_rows` of a prompt.

        Raises RequestError whose `param` is that of the part or option at fault, CapacityError when too many wait.
        Cancelled, it lets go of everything.
        """

    async def close(self) -> None:
        """Stop the workers and free all shared memory. Idempotent."""
