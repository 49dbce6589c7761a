"""From the bytes of a file to what its encoder takes, within the limits of the deployment. Runs in a worker only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from triptych.config.schema import MediaConfig
from triptych.errors import ContextLengthError, RequestError
from triptych.media.decode_audio import SAMPLE_RATE, decode_audio
from triptych.media.decode_image import OpenImage
from triptych.media.decode_video import VideoLimits, decode_video, has_sound
from triptych.media.jobs import Decoded, Job
from triptych.media.sniff import as_image, as_media
from triptych.models.qwen3_omni.audio_features import log_mel
from triptych.models.qwen3_omni.config import MediaConfig as EncoderConfig
from triptych.models.qwen3_omni.image_features import grid_of, image_size, resize, resize_image
from triptych.models.qwen3_omni.media_layout import audio_rows, vision_rows
from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig
from triptych.models.qwen3_omni.video_features import frame_size, sample_frames, second_per_grid


class NoRoomError(Exception):
    """The features would take so many bytes, which is more than there is room for."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


@dataclass(frozen=True, slots=True)
class Features:
    array: npt.NDArray[Any]
    facts: Decoded


class FeatureMaker:
    """Follows one checkpoint's preprocessor."""

    def __init__(self, preprocessor: PreprocessorConfig, encoders: EncoderConfig, limits: MediaConfig) -> None:
        self._preprocessor = preprocessor
        self._encoders = encoders
        self._limits = limits

    def make(self, job: Job, data: bytes) -> Features | None:
        """The features of a file, or None for one that has no sound where sound was asked for.

        Raises RequestError (whose `param` may be that of an option), ContextLengthError or NoRoomError.
        """
        match job.kind:
            case "image":
                return self._image(job, data)
            case "audio":
                return self._audio(job, data)
            case "video":
                return self._video(job, data)

    def _image(self, job: Job, data: bytes) -> Features:
        image = OpenImage(data, as_image(data), self._limits.max_image_pixels)
        # What the header says is enough to refuse by; a turned image has the same number of rows.
        self._check_vision(job, 1, image_size(*image.stored_size, self._preprocessor, job.options))
        array, grid = resize_image(image.pixels(), self._preprocessor, job.options)
        return Features(array, _facts(array, grid=grid))

    def _audio(self, job: Job, data: bytes) -> Features | None:
        limits = self._limits

        def check(num_samples: int) -> None:
            frames = num_samples // self._preprocessor.hop_length
            self._check_rows(job, audio_rows(frames, self._encoders.n_window), "at least ")
            _check_room(job, frames * self._preprocessor.num_mel_bins * 4)

        samples = decode_audio(data, as_media(data, "audio"), max_s=limits.max_audio_s, on_progress=check)
        if samples is None or not len(samples):
            return None
        if len(samples) < limits.min_audio_s * SAMPLE_RATE:
            raise RequestError(
                f"the audio has {len(samples) / SAMPLE_RATE:.3f} seconds: at least {limits.min_audio_s:g}, the limit "
                "'media.min_audio_s'"
            )
        array = log_mel(samples, self._preprocessor)
        return Features(array, _facts(array, num_mel_frames=array.shape[1]))

    def _video(self, job: Job, data: bytes) -> Features:
        file = as_media(data, "video")
        limits = VideoLimits(self._limits.max_video_s, self._limits.max_video_pixels)
        array = decode_video(data, file, _Rules(self, job), limits)
        frames, height, width = array.shape[:3]
        grid = grid_of(frames, height, width, self._preprocessor)
        seconds = second_per_grid(self._preprocessor, job.options)
        return Features(array, _facts(array, grid=grid, second_per_grid=seconds, has_sound=has_sound(data, file)))

    def _check_vision(self, job: Job, frames: int, size: tuple[int, int]) -> None:
        grid = grid_of(frames, *size, self._preprocessor)
        self._check_rows(job, vision_rows(grid, self._encoders.spatial_merge_size), "")
        _check_room(job, frames * size[0] * size[1] * 3)

    def _check_rows(self, job: Job, rows: int, at_least: str) -> None:
        if job.max_rows is not None and rows > job.max_rows:
            change = {
                "image": "send a smaller image or a lower 'max_pixels'",
                "audio": "send a shorter clip",
                "video": "send a shorter video, or a lower 'fps', 'max_frames' or 'max_pixels'",
            }[job.kind]
            raise ContextLengthError(
                f"the {job.kind} takes {at_least}{rows} tokens, more than the context of {job.max_rows}: {change}", None
            )


class _Rules:
    """`decode_video.FrameRules` of one job."""

    def __init__(self, maker: FeatureMaker, job: Job) -> None:
        self._maker = maker
        self._job = job

    def sample(self, num_frames: int, fps: float) -> Sequence[int]:
        wanted = sample_frames(num_frames, fps, self._maker._preprocessor, self._job.options)
        most = self._maker._limits.max_frames
        if len(wanted) > most:
            raise RequestError(
                f"{len(wanted)} frames would be sampled of the video: at most {most}, the limit 'media.max_frames'; "
                "ask for a lower 'fps', 'num_frames' or 'max_frames'"
            )
        return wanted

    def size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        size = frame_size(num_frames, height, width, self._maker._preprocessor, self._job.options)
        self._maker._check_vision(self._job, num_frames, size)
        return size

    def resize(self, frame: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
        return resize(frame, *size)


def _check_room(job: Job, num_bytes: int) -> None:
    if num_bytes > job.max_bytes:
        raise NoRoomError(num_bytes)


def _facts(
    array: npt.NDArray[Any],
    *,
    grid: tuple[int, int, int] = (0, 0, 0),
    second_per_grid: float = 0.0,
    num_mel_frames: int = 0,
    has_sound: bool = False,
) -> Decoded:
    return Decoded(
        dtype=array.dtype.name,
        shape=array.shape,
        grid=grid,
        second_per_grid=second_per_grid,
        num_mel_frames=num_mel_frames,
        has_sound=has_sound,
    )
