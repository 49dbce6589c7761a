"""What the server process and a media worker say to each other, over a socket pair.

A message is its length (four bytes, little endian) and that many bytes of msgpack. The server sends one `Setup`, then
one `Job` after another, each followed by the `size` bytes of the file; the worker answers `Ready`, then each job.
"""

from __future__ import annotations

from io import BufferedIOBase

import msgspec

from triptych.config.schema import MediaConfig
from triptych.media.contract import MediaKind, MediaOptions

LENGTH = 4  # bytes that hold a message's length
MAX_MESSAGE = 1 << 20


class Setup(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """First message to a worker: the checkpoint whose preprocessor it follows, and its limits."""

    model_dir: str
    config: MediaConfig


class Job(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Decode the file of `size` bytes that follows and write its features to the segment of that name."""

    kind: MediaKind
    options: MediaOptions
    size: int
    segment: str
    max_rows: int | None = None  # of a prompt; what takes more is refused
    max_bytes: int  # room for the features


ToWorker = Setup | Job


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The worker waits for jobs."""


class Decoded(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The features are in the segment. `has_sound` is of a video: whether it also has an audio stream."""

    dtype: str
    shape: tuple[int, ...]
    grid: tuple[int, int, int] = (0, 0, 0)
    second_per_grid: float = 0.0
    num_mel_frames: int = 0
    has_sound: bool = False


class Silent(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Asked for sound, the worker found none in the file."""


class Refused(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The file or what was asked of it is wrong: the message, param and code of a RequestError."""

    message: str
    param: str | None = None
    code: str | None = None


class NoRoom(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The features would take `num_bytes` of shared memory, and there is not as much."""

    num_bytes: int


class Last(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The answer, and the worker's end: it holds more memory than a fresh one would."""

    answer: Decoded | Silent | Refused | NoRoom


Answer = Decoded | Silent | Refused | NoRoom
FromWorker = Ready | Decoded | Silent | Refused | NoRoom | Last

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """A message behind its length."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH, "little") + body


def decode_to_worker(body: bytes) -> ToWorker:
    """Raises msgspec.DecodeError on anything but a message for a worker."""
    return _to_worker.decode(body)


def decode_from_worker(body: bytes) -> FromWorker:
    """Raises msgspec.DecodeError on anything but a message of a worker."""
    return _from_worker.decode(body)


def receive(stream: BufferedIOBase) -> ToWorker | None:
    """A worker's next message, or None when the server has closed the socket. Raises ValueError for anything else."""
    length = stream.read(LENGTH)
    if len(length) < LENGTH:
        return None
    size = int.from_bytes(length, "little")
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    body = stream.read(size)
    return decode_to_worker(body) if len(body) == size else None
