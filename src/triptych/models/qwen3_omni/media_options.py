"""What a request may ask of the preprocessor (`mm_processor_kwargs`), held to what the checkpoint and its code allow.

Everything is refused by name and number, none is clamped; but a `max_` below the checkpoint's own `min_` takes that
along. Torch-free: the API checks before it fetches anything.
"""

from __future__ import annotations

from typing import Protocol

from triptych.errors import RequestError
from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig

PARAM = "mm_processor_kwargs"
MIN_FPS, MAX_FPS = 0.01, 1000.0


class ProcessorOptions(Protocol):
    """The part of a request's options that features depend on. None is the checkpoint's own value."""

    @property
    def fps(self) -> float | None: ...
    @property
    def num_frames(self) -> int | None: ...
    @property
    def min_frames(self) -> int | None: ...
    @property
    def max_frames(self) -> int | None: ...
    @property
    def min_pixels(self) -> int | None: ...
    @property
    def max_pixels(self) -> int | None: ...


def check_options(config: PreprocessorConfig, options: ProcessorOptions) -> None:
    """Refuse what is wrong whatever the media: RequestError whose `param` is the option's place in the request.

    Whether `min_pixels` fits the checkpoint's `max_pixels` depends on the kind of media, and is checked by
    `image_pixels` and `frame_pixels`.
    """
    fps = options.fps
    if fps is not None and not MIN_FPS <= fps <= MAX_FPS:  # also false for NaN
        raise _refused("fps", f"fps is {fps}; it must be from {MIN_FPS} to {MAX_FPS:g} frames a second")
    if options.num_frames is not None:
        for other in ("fps", "min_frames", "max_frames"):
            if getattr(options, other) is not None:
                raise _refused(
                    "num_frames",
                    f"num_frames says how many frames are sampled; send it without {other}, or {other} alone",
                )
        least = config.temporal_patch_size
        if options.num_frames < least:
            raise _refused("num_frames", f"num_frames is {options.num_frames}; it must be at least {least}")
    _check_least("min_frames", options.min_frames, 1)
    _check_least("max_frames", options.max_frames, config.temporal_patch_size)
    for name, value in (("min_pixels", options.min_pixels), ("max_pixels", options.max_pixels)):
        _check_least(name, value, 1)
        if value is not None and value > config.image_max_pixels:
            raise _refused(name, f"{name} is {value}; this checkpoint takes at most {config.image_max_pixels}")
    _range("min_frames", "max_frames", options, config.min_frames, config.max_frames)
    if options.min_pixels is not None and options.max_pixels is not None:
        _range("min_pixels", "max_pixels", options, options.min_pixels, options.max_pixels)


def image_pixels(config: PreprocessorConfig, options: ProcessorOptions) -> tuple[int, int]:
    """Fewest and most pixels of a resized image. Raises RequestError when one is above the other."""
    return _range("min_pixels", "max_pixels", options, config.image_min_pixels, config.image_max_pixels)


def frame_pixels(config: PreprocessorConfig, options: ProcessorOptions, frames: int) -> tuple[int, int]:
    """Fewest and most pixels of each of a video's `frames` resized frames. Raises RequestError as `image_pixels`."""
    least, most = _range("min_pixels", "max_pixels", options, config.frame_min_pixels, config.frame_max_pixels)
    if config.cap_pixels_per_frame:
        budget = int(config.max_video_tokens * config.factor**2 * 0.9) * config.temporal_patch_size
        most = max(min(most, budget // frames), int(least * 1.05))
    return least, most


def frame_counts(config: PreprocessorConfig, options: ProcessorOptions) -> tuple[int, int]:
    """Fewest and most frames sampled of a video. Raises RequestError when one is above the other."""
    return _range("min_frames", "max_frames", options, config.min_frames, config.max_frames)


def sampled_fps(config: PreprocessorConfig, options: ProcessorOptions) -> float:
    """Frames a second sampled of a video, unless the request says how many frames."""
    return config.fps if options.fps is None else float(options.fps)


def _check_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise _refused(name, f"{name} is {value}; it must be at least {least}")


def _range(low: str, high: str, options: ProcessorOptions, low_default: int, high_default: int) -> tuple[int, int]:
    asked_low, asked_high = getattr(options, low), getattr(options, high)
    most = high_default if asked_high is None else asked_high
    least = min(low_default, most) if asked_low is None else asked_low
    if least > most:
        own = f", {high} being the checkpoint's own: send both to change it" if asked_high is None else ""
        raise _refused(low, f"{low} {least} is above {high} {most}{own}")
    return least, most


def _refused(name: str, message: str) -> RequestError:
    return RequestError(message, param=f"{PARAM}.{name}")
