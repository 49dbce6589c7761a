"""Decoded images as the Thinker takes them: the size it wants, resized with the bits of the family's processor.

Sizes are computed without torch, which is imported by the first resize.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.errors import RequestError
from triptych.models.qwen3_omni.media_options import ProcessorOptions, image_pixels
from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_ASPECT = 200


def image_size(height: int, width: int, config: PreprocessorConfig, options: ProcessorOptions) -> tuple[int, int]:
    """Height and width that an image is resized to. Raises RequestError for one too long and thin."""
    return fit(height, width, config.factor, *image_pixels(config, options))


def resize_image(
    pixels: NDArray[np.uint8], config: PreprocessorConfig, options: ProcessorOptions
) -> tuple[NDArray[np.uint8], tuple[int, int, int]]:
    """uint8 [h, w, 3] -> uint8 [1, height, width, 3] and its grid of patches over time, height and width."""
    height, width = image_size(pixels.shape[0], pixels.shape[1], config, options)
    return resize(pixels, height, width)[None], grid_of(1, height, width, config)


def grid_of(frames: int, height: int, width: int, config: PreprocessorConfig) -> tuple[int, int, int]:
    """Patches over time, height and width of resized frames."""
    return -(-frames // config.temporal_patch_size), height // config.patch_size, width // config.patch_size


def fit(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The multiples of `factor` nearest to a size that keep to the limits, the aspect ratio about kept.

    This is `smart_resize` of the Qwen2-VL processors, with Python's rounding of halves to even. Raises RequestError
    when one side is more than MAX_ASPECT times the other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise RequestError(
            f"the picture is {width} x {height} pixels; its longer side may be at most {MAX_ASPECT} times its shorter"
        )
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        high = max(factor, math.floor(height / scale / factor) * factor)
        wide = max(factor, math.floor(width / scale / factor) * factor)
    elif high * wide < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        high = math.ceil(height * scale / factor) * factor
        wide = math.ceil(width * scale / factor) * factor
    return high, wide


def resize(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Bicubic, antialiased, in torch's arithmetic for bytes: uint8 [h, w, 3] -> uint8 [height, width, 3].

    The same bits as `torchvision`'s `resize` of one image or of a whole video. An image of that size is returned as
    it is.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise ValueError(f"pixels must be uint8 [height, width, 3], not {pixels.dtype} {list(pixels.shape)}")
    if pixels.shape[:2] == (height, width):
        return pixels
    import torch

    # torch takes no memory that it must not write, nor backwards: those are copied.
    source = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))
    resized: Any = torch.nn.functional.interpolate(
        source.permute(2, 0, 1)[None], (height, width), mode="bicubic", antialias=True
    )
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())
