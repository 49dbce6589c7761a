"""Make vision.npz: what Transformers' own processors return for the cases of vision_cases.py.

They need torchvision, which the tests do not. In an environment of its own, from the root of the repository:

    pip install "transformers==5.24.0" torch torchvision pillow
    python -m tests.golden.make_vision_goldens
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.golden import vision_cases as cases

# Only torchvision's Python code is used: where its compiled operators do not fit this torch, their names will do.
_operators = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import torchvision  # noqa: E402
import transformers  # noqa: E402
from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor  # noqa: E402
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize  # noqa: E402
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor  # noqa: E402
from transformers.video_utils import VideoMetadata  # noqa: E402

SETTINGS: dict[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
}
PATH = Path(__file__).with_name("vision.npz")


def pixels_of(patches: torch.Tensor, grid: list[int]) -> np.ndarray[Any, Any]:
    """The bytes that were normalised and cut: uint8 [frames, height, width, 3]."""
    time, high, wide = grid
    values = patches.reshape(time, high // 2, wide // 2, 2, 2, 3, 2, 16, 16).permute(0, 6, 1, 3, 7, 2, 4, 8, 5)
    exact = values.reshape(time * 2, high * 16, wide * 16, 3).double() * 127.5 + 127.5
    assert (exact - exact.round()).abs().max() < 1e-3
    return exact.round().to(torch.uint8).numpy()


def record(out: dict[str, Any], key: str, patches: torch.Tensor, grid: list[int]) -> None:
    pixels = pixels_of(patches, grid)
    out[f"{key}/grid"] = np.array(grid, np.int32)
    whole = pixels.size <= cases.SMALL
    out[f"{key}/pixels"] = pixels if whole else pixels.reshape(-1)[:: cases.STRIDE]
    out[f"{key}/patches"] = patches.numpy().reshape(-1)[:: cases.STRIDE]
    for name, array in (("pixels", pixels), ("patches", patches.numpy())):
        out[f"{key}/{name}_sha256"] = np.frombuffer(hashlib.sha256(array.tobytes()).digest(), np.uint8)


def main() -> None:
    images, videos = Qwen2VLImageProcessor(**SETTINGS), Qwen2VLVideoProcessor(**SETTINGS)
    defaults = Qwen3OmniMoeProcessor.videos_kwargs
    out: dict[str, Any] = {}
    for picture in cases.PICTURES:
        made = images(picture.pixels(), return_tensors="pt", input_data_format="channels_last", **picture.options)
        record(out, f"picture/{picture.name}", made["pixel_values"], made["image_grid_thw"][0].tolist())
    for video in cases.VIDEOS:
        options = dict(video.options)
        if "num_frames" not in options:
            options.setdefault("fps", 2.0)
        made = videos(
            video.pixels(),
            video_metadata=VideoMetadata(total_num_frames=video.frames, fps=video.rate),
            do_sample_frames=True,
            return_tensors="pt",
            input_data_format="channels_last",
            **{**defaults, **options},
        )
        record(out, f"video/{video.name}", made["pixel_values_videos"], made["video_grid_thw"][0].tolist())
    for index, sampling in enumerate(cases.SAMPLINGS):
        options = dict(sampling.options)
        if "num_frames" not in options:
            options.setdefault("fps", 2.0)
        metadata = VideoMetadata(total_num_frames=sampling.total, fps=sampling.rate)
        indices = videos.sample_frames(metadata, **options)
        assert indices.max() < sampling.total, (sampling, indices)
        out[f"sampling/{index}"] = indices.numpy().astype(np.int32)
    out["sizes"] = np.array(
        [smart_resize(high, wide, 32, least, most) for high, wide, least, most in cases.sizes()], np.int32
    )
    versions = (
        f"transformers {transformers.__version__}, torchvision {torchvision.__version__}, torch {torch.__version__}"
    )
    out["versions"] = np.array(versions)
    np.savez_compressed(PATH, **out)
    print(f"{PATH.name}: {PATH.stat().st_size} bytes, {versions}", file=sys.stderr)


if __name__ == "__main__":
    main()
