"""A video file to the frames that the encoder sees, each resized as soon as it is decoded.

Which frames is the processor's rule over the number of frames and the average rate, as Transformers' PyAV reader
applies it (`video_utils.read_video_pyav`): a frame's number is its place in the order of display, whatever its time
stamp. Unlike there, the number is counted and not taken from the header, and the rotation that a phone notes down is
carried out. Interlaced frames are taken as they are.

Frames are decoded one after another, but where more than a whole group of pictures lies between two that are wanted,
the decoder goes on from the last keyframe before the next; time stamps then say which frame is which.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.error import FFmpegError

from triptych.errors import RequestError
from triptych.media.container import damaged, decode, is_cut_off, open_container, packets, prepare
from triptych.media.decode_image import MAX_ASPECT_RATIO
from triptych.media.sniff import FileType

_SEEKABLE = ("mov", "matroska")
_CODECS = ("h264", "hevc", "vp9", "libdav1d", "av1")  # of which every packet is one frame that is shown

Pixels = npt.NDArray[np.uint8]


class FrameRules(Protocol):
    """What the processor does to a video."""

    def sample(self, num_frames: int, fps: float) -> Sequence[int]:
        """The frames to take, ascending. Raises RequestError."""

    def size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """What each of `num_frames` sampled frames is resized to. Raises RequestError when that is too much."""

    def resize(self, frame: Pixels, size: tuple[int, int]) -> Pixels:
        """uint8 [height, width, 3] to uint8 [*size, 3]."""


@dataclass(frozen=True, slots=True)
class VideoLimits:
    max_s: float
    max_pixels: int  # of one frame as it is stored


@dataclass(frozen=True, slots=True)
class Timeline:
    """The frames of a stream in the order of display, counted by its packets."""

    stamps: tuple[int, ...]  # presentation time stamps; empty where the packets have none
    keyframes: frozenset[int]  # the stamps of those
    num_frames: int
    fps: float


def decode_video(data: bytes, file: FileType, rules: FrameRules, limits: VideoLimits) -> Pixels:
    """The sampled frames, uint8 [frames, height, width, 3].

    Raises RequestError (without its `param`) for a file without pictures, beyond the limits, damaged or cut off.
    """
    with open_container(data, file) as container:
        stream = video_stream(container)
        if stream is None:
            raise RequestError("the file has no video stream: send it as audio, or send a file with pictures")
        prepare(stream, file)
        _check_frame(stream.codec_context.width, stream.codec_context.height, limits)
        line = timeline(container, stream, file, limits)
        if is_cut_off(data, stream, file, float("inf")):
            raise RequestError(f"this {file.name} file is cut off: pictures that its header promises are not there")
        reader = _Reader(container, stream, file, line, limits)
        wanted = rules.sample(line.num_frames, line.fps)
        frames, num_read = reader.read(wanted, rules, jump=reader.can_jump)
        if len(frames) < len(wanted) and reader.can_jump:
            frames, num_read = reader.read(wanted, rules, jump=False)
        if len(frames) < len(wanted):
            # Some packets hold no frame that is shown (VP8's references). Now the number of frames is known.
            if not num_read:
                raise RequestError(f"this {file.name} file is damaged: no picture can be decoded")
            wanted = rules.sample(num_read, line.fps)
            frames, _ = reader.read(wanted, rules, jump=False)
        if len(frames) < len(wanted):
            raise RequestError(f"this {file.name} file is damaged: only {len(frames)} pictures can be decoded")
    return np.stack(frames)


def video_stream(container: InputContainer) -> Any | None:
    """The first stream of moving pictures; the cover of an album is none."""
    return next((s for s in container.streams.video if not s.disposition & s.disposition.attached_pic), None)


def has_sound(data: bytes, file: FileType) -> bool:
    """Whether there is an audio stream beside the pictures."""
    with open_container(data, file) as container:
        return bool(container.streams.audio)


def timeline(container: InputContainer, stream: Any, file: FileType, limits: VideoLimits) -> Timeline:
    """Counts the frames by reading the file through, without decoding it."""
    stamps: list[int | None] = []
    keyframes: set[int] = set()
    for packet in packets(container, stream, file):
        if not packet.size or packet.is_discard:
            continue
        stamps.append(packet.pts)
        if packet.is_keyframe and packet.pts is not None:
            keyframes.add(packet.pts)
    known = sorted({stamp for stamp in stamps if stamp is not None})
    complete = len(known) == len(stamps)
    span = float((known[-1] - known[0]) * stream.time_base) if len(known) > 1 else 0.0
    rate = stream.average_rate or stream.guessed_rate
    fps = float(rate) if rate else (len(known) - 1) / span if span > 0 else 1.0
    seconds = max(span, 0.0 if complete else len(stamps) / fps)
    if seconds > limits.max_s:
        raise RequestError(
            f"the video has {seconds:.1f} seconds: at most {limits.max_s:g}, the limit 'media.max_video_s'; send a "
            "shorter one"
        )
    if not stamps:
        raise RequestError(f"this {file.name} file is damaged or empty: its video stream has no pictures")
    return Timeline(tuple(known) if complete else (), frozenset(keyframes), len(stamps), fps)


class _Reader:
    def __init__(
        self, container: InputContainer, stream: Any, file: FileType, line: Timeline, limits: VideoLimits
    ) -> None:
        self._container = container
        self._stream = stream
        self._file = file
        self._line = line
        self._limits = limits

    @property
    def can_jump(self) -> bool:
        """Whether a packet is a frame, its time stamp says which, and keyframes are where decoding can begin."""
        return self._file.name in _SEEKABLE and self._stream.codec_context.name in _CODECS and bool(self._line.stamps)

    def read(self, wanted: Sequence[int], rules: FrameRules, jump: bool) -> tuple[list[Pixels], int]:
        """The wanted frames as far as there are any, and how many frames were passed on the way."""
        frames: list[Pixels] = []
        size: tuple[int, int] | None = None
        number = -1
        for number, frame in self._jumping(wanted) if jump else self._all():
            if number != wanted[len(frames)]:
                continue
            pixels = self._pixels(frame)
            if size is None:
                size = rules.size(len(wanted), *pixels.shape[:2])
            frames.append(rules.resize(pixels, size))
            if len(frames) == len(wanted):
                break
        return frames, number + 1

    def _all(self) -> Iterator[tuple[int, Any]]:
        """Every frame with its number, decoded from the start."""
        self._rewind()
        return enumerate(self._decoded())

    def _decoded(self) -> Iterator[Any]:
        for packet in packets(self._container, self._stream, self._file):
            yield from decode(packet, self._stream, self._file)

    def _jumping(self, wanted: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """The wanted frames with their numbers, and some others. Ends early when a frame is not where it should be."""
        numbers = {stamp: number for number, stamp in enumerate(self._line.stamps)}
        keyframes = sorted(numbers[stamp] for stamp in self._line.keyframes)
        decoded, next_number = self._decoded(), -1
        for target in wanted:
            at_or_before = bisect.bisect_right(keyframes, target) - 1
            if at_or_before < 0 and next_number < 0:
                return
            if at_or_before >= 0 and keyframes[at_or_before] > next_number:
                self._seek(self._line.stamps[keyframes[at_or_before]])
                decoded = self._decoded()
            for frame in decoded:
                number = numbers.get(frame.pts, len(numbers))
                if number > target:
                    return
                next_number = number + 1
                yield number, frame
                if number == target:
                    break

    def _rewind(self) -> None:
        start = self._stream.start_time
        self._seek(start if start is not None else 0)

    def _seek(self, stamp: int) -> None:
        try:
            self._container.seek(stamp, stream=self._stream)
        except FFmpegError as error:
            raise damaged(self._file, error) from error
        self._stream.codec_context.flush_buffers()

    def _pixels(self, frame: Any) -> Pixels:
        _check_frame(frame.width, frame.height, self._limits)
        try:
            pixels: Pixels = frame.to_ndarray(format="rgb24")
        except (FFmpegError, ValueError) as error:
            raise damaged(self._file, error) from error
        # Degrees against the clock, as `rot90` turns.
        return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))


def _check_frame(width: int, height: int, limits: VideoLimits) -> None:
    if min(width, height) < 1:
        raise RequestError(f"the video's pictures have {width} x {height} pixels: nothing to see")
    if width * height > limits.max_pixels:
        raise RequestError(
            f"the video's pictures have {width} x {height} = {width * height} pixels: at most {limits.max_pixels}, the "
            "limit 'media.max_video_pixels'; send a smaller one"
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise RequestError(
            f"the video is {width} x {height} pixels: one side may be at most {MAX_ASPECT_RATIO} times the other"
        )
