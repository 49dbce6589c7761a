"""Pixels to the vision encoder's input: normalised, and cut into patches in the order that the encoder merges them."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig


def patchify(
    pixels: Tensor, config: PreprocessorConfig, dtype: torch.dtype, device: torch.device | str | None = None
) -> Tensor:
    """Patches of an image or of consecutive frames: uint8 [frames, height, width, 3] -> [patches, features].

    Height and width are multiples of `config.factor`. Where frames do not fill the last temporal patch, the last frame
    is repeated; so a video may be cut between temporal patches. Rows go by time, then by square of neighbours that are
    merged, then within the square; the features of a row are channel, frame, row, column. The arithmetic is
    that of `Qwen2VLImageProcessor` and `Qwen2VLVideoProcessor`: float32, rescaling folded into mean and deviation.
    """
    frames, height, width, channels = pixels.shape
    if pixels.dtype != torch.uint8 or channels != 3 or not frames or height % config.factor or width % config.factor:
        raise ValueError(
            f"pixels must be uint8 [frames, height, width, 3] with sides divisible by {config.factor}, "
            f"not {pixels.dtype} {list(pixels.shape)}"
        )
    patch, merge, time = config.patch_size, config.merge_size, config.temporal_patch_size
    pixels = pixels.to(device or pixels.device)
    if missing := -frames % time:
        pixels = torch.cat((pixels, pixels[-1:].expand(missing, -1, -1, -1)))
    squares = (height // config.factor, merge, patch, width // config.factor, merge, patch)
    grid = pixels.reshape(-1, time, *squares, 3)
    rows = grid.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3, time * patch * patch).float()
    mean, deviation = (
        (torch.tensor(value, device=pixels.device) * (1.0 / config.rescale_factor))[:, None]
        for value in (config.image_mean, config.image_std)
    )
    return rows.sub_(mean).div_(deviation).flatten(1).to(dtype)
