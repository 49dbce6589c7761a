"""Which frames of a video the Thinker sees, and at what size.

Sampling and sizes are those of `Qwen2VLVideoProcessor` called with `do_sample_frames` and the rate in force. Frames are
resized one by one (`image_features.resize`), so that a decoder never holds the unresized video.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from triptych.errors import RequestError
from triptych.models.qwen3_omni.image_features import fit, grid_of, resize
from triptych.models.qwen3_omni.media_options import PARAM, ProcessorOptions, frame_counts, frame_pixels, sampled_fps
from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray


def sample_frames(
    total_frames: int, video_fps: float, config: PreprocessorConfig, options: ProcessorOptions
) -> list[int]:
    """Indices of the frames to keep of a video of `total_frames` frames, `video_fps` of them a second, in order.

    Their number is a multiple of `temporal_patch_size`, and at least that. The processor fails, and this goes on, in
    two cases: a video of fewer frames gives them all (the last is repeated when patches are cut), and where torch's
    `arange` overshoots and names a frame behind the last, that one is left out. Raises RequestError when `num_frames`
    asks for more frames than there are, or the rate of the video is unknown.
    """
    if total_frames < 1:
        raise RequestError("the video has no frames")
    time = config.temporal_patch_size
    if options.num_frames is not None:
        count = round(options.num_frames / time) * time
        if count > total_frames:
            raise RequestError(
                f"num_frames {options.num_frames} (rounded to {count}) is more than the video's {total_frames} frames; "
                f"ask for fewer, or leave num_frames out",
                param=f"{PARAM}.num_frames",
            )
    else:
        if not 0 < video_fps < math.inf:
            raise RequestError(f"the video's frame rate is {video_fps}; ask for num_frames instead of a rate")
        least, most = frame_counts(config, options)
        most = min(most, total_frames) // time * time
        wanted = min(max(total_frames / video_fps * sampled_fps(config, options), least), most, total_frames)
        count = max(math.floor(wanted / time) * time, time)
    if total_frames < time:
        return list(range(total_frames))
    import torch

    # In float32, as the processor does it: past 2**14 frames the rounding decides between two neighbours.
    indices: list[int] = torch.arange(0, total_frames, total_frames / count).int().tolist()
    return indices[:count]


def frame_size(
    frames: int, height: int, width: int, config: PreprocessorConfig, options: ProcessorOptions
) -> tuple[int, int]:
    """Height and width that each of `frames` sampled frames is resized to. Raises RequestError as `image_size`."""
    return fit(height, width, config.factor, *frame_pixels(config, options, frames))


def second_per_grid(config: PreprocessorConfig, options: ProcessorOptions) -> float:
    """Seconds between the positions of two temporal patches.

    They follow the rate that was asked for, as in the family's processor: limits on the number of frames do not change
    it, and `num_frames` counts as one frame a second.
    """
    fps = 1.0 if options.num_frames is not None else sampled_fps(config, options)
    return config.temporal_patch_size / fps


def resize_frames(
    pixels: NDArray[np.uint8], config: PreprocessorConfig, options: ProcessorOptions
) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
    """uint8 [frames, h, w, 3] -> uint8 [frames, height, width, 3] and their grid of patches."""
    frames = len(pixels)
    height, width = frame_size(frames, pixels.shape[1], pixels.shape[2], config, options)
    resized = np.empty((frames, height, width, 3), np.uint8)
    for index, frame in enumerate(pixels):
        resized[index] = resize(frame, height, width)
    return resized, grid_of(frames, height, width, config)
