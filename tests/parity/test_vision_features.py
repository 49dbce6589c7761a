"""Pictures and videos come out as Transformers' own processors make them, to the bit: tests/golden/vision.npz."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden import vision_cases as cases
from triptych.errors import RequestError
from triptych.media.contract import MediaOptions
from triptych.models.qwen3_omni.image_features import fit, image_size, resize, resize_image
from triptych.models.qwen3_omni.patches import patchify
from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig, load_preprocessor
from triptych.models.qwen3_omni.video_features import frame_size, resize_frames, sample_frames, second_per_grid

Array = np.ndarray[Any, Any]
GOLDEN = Path(cases.__file__).with_name("vision.npz")


@pytest.fixture(scope="module")
def golden() -> Iterator[Any]:
    with np.load(GOLDEN) as file:
        yield file


@pytest.fixture(scope="module")
def config(nano: Path) -> PreprocessorConfig:
    return load_preprocessor(nano)


def sha256(array: Array) -> bytes:
    return hashlib.sha256(array.tobytes()).digest()


def assert_as_recorded(golden: Any, key: str, pixels: Array, grid: tuple[int, ...], config: PreprocessorConfig) -> None:
    """Bytes after the resize, and float32 patches, all of them; the kept sample shows by how much they differ."""
    assert list(grid) == golden[f"{key}/grid"].tolist()
    padded = np.concatenate([pixels, *[pixels[-1:]] * (-len(pixels) % 2)])
    kept = golden[f"{key}/pixels"]
    np.testing.assert_array_equal(padded if kept.ndim == 4 else padded.reshape(-1)[:: cases.STRIDE], kept)
    assert sha256(padded) == golden[f"{key}/pixels_sha256"].tobytes()
    patches = patchify(torch.from_numpy(pixels), config, torch.float32).numpy()
    assert patches.shape == (math.prod(grid), 3 * 2 * 16 * 16)
    np.testing.assert_array_equal(patches.reshape(-1)[:: cases.STRIDE], golden[f"{key}/patches"])
    assert sha256(patches) == golden[f"{key}/patches_sha256"].tobytes()


@pytest.mark.parametrize("picture", cases.PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_resized_and_cut_as_by_the_processor(
    picture: cases.Picture, golden: Any, config: PreprocessorConfig
) -> None:
    pixels, grid = resize_image(picture.pixels(), config, MediaOptions(**picture.options))
    assert_as_recorded(golden, f"picture/{picture.name}", pixels, grid, config)


@pytest.mark.parametrize("video", cases.VIDEOS, ids=lambda video: video.name)
def test_a_video_is_sampled_resized_and_cut_as_by_the_processor(
    video: cases.Video, golden: Any, config: PreprocessorConfig
) -> None:
    options = MediaOptions(**video.options)  # type: ignore[arg-type]
    indices = sample_frames(video.frames, video.rate, config, options)
    pixels, grid = resize_frames(video.pixels()[indices], config, options)
    assert_as_recorded(golden, f"video/{video.name}", pixels, grid, config)


@pytest.mark.parametrize("index", range(len(cases.SAMPLINGS)), ids=lambda index: str(cases.SAMPLINGS[index]))
def test_the_processors_frames_are_sampled(index: int, golden: Any, config: PreprocessorConfig) -> None:
    case = cases.SAMPLINGS[index]
    options = MediaOptions(**case.options)  # type: ignore[arg-type]
    assert sample_frames(case.total, case.rate, config, options) == golden[f"sampling/{index}"].tolist()


def test_sizes_are_the_processors(golden: Any) -> None:
    made = [fit(high, wide, 32, least, most) for high, wide, least, most in cases.sizes()]
    assert made == [tuple(size) for size in golden["sizes"].tolist()]


def test_frames_resized_one_by_one_are_those_of_the_whole_video(config: PreprocessorConfig) -> None:
    pixels, options = cases.pattern("noise", 5, 90, 130), MediaOptions(min_pixels=1024, max_pixels=9000)
    whole = torch.nn.functional.interpolate(
        torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(),
        frame_size(5, 90, 130, config, options),
        mode="bicubic",
        antialias=True,
    )
    resized, grid = resize_frames(pixels, config, options)
    assert torch.equal(torch.from_numpy(resized), whole.permute(0, 2, 3, 1))
    assert grid == (3, resized.shape[1] // 16, resized.shape[2] // 16)


def test_a_video_may_be_cut_between_temporal_patches(config: PreprocessorConfig) -> None:
    pixels = torch.from_numpy(cases.pattern("noise", 7, 64, 96))
    whole = patchify(pixels, config, torch.float32)
    parts = [patchify(part, config, torch.float32) for part in (pixels[:2], pixels[2:6], pixels[6:])]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(patchify(pixels[6:].expand(2, -1, -1, -1), config, torch.float32), parts[-1])


def test_patches_round_to_the_models_dtype_last(config: PreprocessorConfig) -> None:
    pixels = torch.from_numpy(cases.pattern("noise", 2, 32, 64))
    exact = patchify(pixels, config, torch.float32)
    assert torch.equal(patchify(pixels, config, torch.bfloat16), exact.bfloat16())
    assert exact.min() >= -1 and exact.max() <= 1


@pytest.mark.parametrize("shape", [(1, 33, 32, 3), (1, 32, 48, 3), (0, 32, 32, 3), (1, 32, 32, 4)])
def test_patchify_takes_whole_patches_of_three_channels_only(
    shape: tuple[int, ...], config: PreprocessorConfig
) -> None:
    with pytest.raises(ValueError, match="divisible by 32"):
        patchify(torch.zeros(shape, dtype=torch.uint8), config, torch.float32)


def test_a_picture_that_must_not_be_written_is_resized_all_the_same(config: PreprocessorConfig) -> None:
    pixels = cases.pattern("noise", 1, 50, 70)[0]
    frozen = pixels.copy()
    frozen.flags.writeable = False
    assert np.array_equal(resize(frozen, 64, 96), resize(pixels, 64, 96))
    assert resize(pixels, 50, 70) is pixels


def test_a_flipped_view_is_resized_as_its_copy() -> None:
    flipped = cases.pattern("noise", 1, 50, 70)[0][::-1, ::-1]
    assert np.array_equal(resize(flipped, 64, 96), resize(flipped.copy(), 64, 96))


@pytest.mark.parametrize("shape", [(201, 1), (1, 201), (10, 2001)])
def test_a_picture_too_long_and_thin_is_refused_with_its_size(
    shape: tuple[int, int], config: PreprocessorConfig
) -> None:
    with pytest.raises(RequestError, match=f"{shape[1]} x {shape[0]} pixels.* 200 times"):
        image_size(*shape, config, MediaOptions())
    with pytest.raises(RequestError, match="200 times"):
        frame_size(4, *shape, config, MediaOptions())


# Where the processor fails, a video is served all the same.


def test_a_video_of_one_frame_gives_it(config: PreprocessorConfig) -> None:
    assert sample_frames(1, 25.0, config, MediaOptions()) == [0]
    pixels, grid = resize_frames(cases.pattern("edges", 1, 400, 400), config, MediaOptions())
    assert grid == (1, 24, 24) and len(patchify(torch.from_numpy(pixels), config, torch.float32)) == 576


def test_no_frame_behind_the_last_is_named_where_torch_overshoots(config: PreprocessorConfig) -> None:
    overshooting = [(120, 104), (593, 506), (1200, 110), (13604, 404)]
    for total, count in overshooting:
        raw = torch.arange(0, total, total / count).int().tolist()
        assert raw[-1] == total, "the case no longer overshoots"
        assert sample_frames(total, 25.0, config, MediaOptions(num_frames=count)) == raw[:-1]


@pytest.mark.parametrize("total", [1, 2, 3, 5, 100, 20_000, 108_000])
@pytest.mark.parametrize("fps", [0.01, 0.5, 2.0, 30.0, 1000.0])
def test_sampled_frames_exist_in_order_and_fill_temporal_patches(
    total: int, fps: float, config: PreprocessorConfig
) -> None:
    for options in (MediaOptions(fps=fps), MediaOptions(fps=fps, min_frames=1), MediaOptions(fps=fps, max_frames=5)):
        indices = sample_frames(total, 29.97, config, options)
        assert indices == sorted(set(indices)) and indices[0] == 0 and indices[-1] < total
        assert len(indices) % 2 == 0 or total == 1
        assert len(indices) <= (options.max_frames or 768)


def test_more_frames_than_a_video_has_are_refused_by_number(config: PreprocessorConfig) -> None:
    with pytest.raises(
        RequestError, match=r"num_frames 11 \(rounded to 12\) is more than the video's 11 frames"
    ) as caught:
        sample_frames(11, 25.0, config, MediaOptions(num_frames=11))
    assert caught.value.param == "mm_processor_kwargs.num_frames"


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_video_without_a_rate_is_sampled_by_number_only(rate: float, config: PreprocessorConfig) -> None:
    with pytest.raises(RequestError, match="frame rate"):
        sample_frames(10, rate, config, MediaOptions())
    assert sample_frames(10, rate, config, MediaOptions(num_frames=4)) == [0, 2, 5, 7]
    with pytest.raises(RequestError, match="no frames"):
        sample_frames(0, 25.0, config, MediaOptions())


def test_seconds_of_a_grid_follow_the_rate_asked_for(config: PreprocessorConfig) -> None:
    assert second_per_grid(config, MediaOptions()) == 1.0
    assert second_per_grid(config, MediaOptions(fps=0.5)) == 4.0
    assert second_per_grid(config, MediaOptions(num_frames=8)) == 2.0
