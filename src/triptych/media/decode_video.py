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
from contextlib import contextmanager
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

    stamps: tuple[int, ...]  # presentation time stamps
    keyframes: frozenset[int]  # the stamps of those
    num_frames: int
    fps: float
    can_jump: bool  # whether the stamps say which frame is which, and decoding can begin at any keyframe


def decode_video(data: bytes, file: FileType, rules: FrameRules, limits: VideoLimits) -> Pixels:
    """The sampled frames, uint8 [frames, height, width, 3].

    Raises RequestError (without its `param`) for a file without pictures, beyond the limits, damaged or cut off.
    """
    reader = _Reader(data, file, rules, limits)
    wanted = rules.sample(reader.line.num_frames, reader.line.fps)
    frames, num_read = reader.read(wanted, jump=True) if reader.line.can_jump else ([], 0)
    if len(frames) < len(wanted):
        frames, num_read = reader.read(wanted, jump=False)
    if not num_read:
        raise RequestError(f"this {file.name} file is damaged: no picture can be decoded")
    if len(frames) < len(wanted):
        # Some packets hold no frame that is shown (VP8's references). Now the number of frames is known.
        wanted = rules.sample(num_read, reader.line.fps)
        frames, _ = reader.read(wanted, jump=False)
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
    can_jump = complete and file.name in _SEEKABLE and stream.codec_context.name in _CODECS
    return Timeline(tuple(known), frozenset(keyframes), len(stamps), fps, can_jump)


class _Reader:
    """Opens the file anew for each reading: not every format can be wound back to its first frame."""

    def __init__(self, data: bytes, file: FileType, rules: FrameRules, limits: VideoLimits) -> None:
        self._data = data
        self._file = file
        self._rules = rules
        self._limits = limits
        with self._open() as (container, stream):
            _check_frame(stream.codec_context.width, stream.codec_context.height, limits)
            self.line = timeline(container, stream, file, limits)
            if is_cut_off(data, stream, file, float("inf")):
                raise RequestError(
                    f"this {file.name} file is cut off: pictures that its header promises are not there; send all of it"
                )

    def read(self, wanted: Sequence[int], jump: bool) -> tuple[list[Pixels], int]:
        """The wanted frames as far as there are any, and how many frames were passed on the way."""
        frames: list[Pixels] = []
        size: tuple[int, int] | None = None
        number = -1
        with self._open() as (container, stream):
            shown = self._jumping(container, stream, wanted) if jump else enumerate(self._decoded(container, stream))
            for number, frame in shown:
                if number != wanted[len(frames)]:
                    continue
                pixels = self._pixels(frame)
                if size is None:
                    size = self._rules.size(len(wanted), *pixels.shape[:2])
                frames.append(self._rules.resize(pixels, size))
                if len(frames) == len(wanted):
                    break
        return frames, number + 1

    @contextmanager
    def _open(self) -> Iterator[tuple[InputContainer, Any]]:
        with open_container(self._data, self._file) as container:
            stream = video_stream(container)
            if stream is None:
                raise RequestError("the file has no video stream: send it as audio, or send a file with pictures")
            prepare(stream, self._file)
            yield container, stream

    def _decoded(self, container: InputContainer, stream: Any) -> Iterator[Any]:
        for packet in packets(container, stream, self._file):
            yield from decode(packet, stream, self._file)

    def _jumping(self, container: InputContainer, stream: Any, wanted: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """The wanted frames with their numbers, and some others. Ends early when a frame is not where it should be."""
        numbers = {stamp: number for number, stamp in enumerate(self.line.stamps)}
        keyframes = sorted(numbers[stamp] for stamp in self.line.keyframes if stamp in numbers)
        decoded, next_number = self._decoded(container, stream), 0
        for target in wanted:
            before = bisect.bisect_right(keyframes, target) - 1
            if before >= 0 and keyframes[before] > next_number:
                try:
                    container.seek(self.line.stamps[keyframes[before]], stream=stream)
                except FFmpegError as error:
                    raise damaged(self._file, error) from error
                decoded = self._decoded(container, stream)
            for frame in decoded:
                number = numbers.get(frame.pts, len(numbers))
                if number > target:
                    return
                next_number = number + 1
                yield number, frame
                if number == target:
                    break

    def _pixels(self, frame: Any) -> Pixels:
        _check_frame(frame.width, frame.height, self._limits)
        try:
            pixels: Pixels = frame.to_ndarray(format="rgb24", threads=1)
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
