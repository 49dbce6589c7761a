"""A checkpoint's preprocessor files are read as Transformers reads them, and a request's options are held to them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from triptych.errors import CheckpointError, RequestError
from triptych.media.contract import MediaOptions
from triptych.models.qwen3_omni.media_options import check_options, frame_counts, frame_pixels, image_pixels
from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig, load_preprocessor
from triptych.models.qwen3_omni.video_features import frame_size


@pytest.fixture
def folder(nano: Path, tmp_path: Path) -> Path:
    """The files of a checkpoint that say how media are prepared, free to be changed."""
    for name in ("config.json", "generation_config.json", "preprocessor_config.json"):
        shutil.copy(nano / name, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def config(nano: Path) -> PreprocessorConfig:
    return load_preprocessor(nano)


def change(folder: Path, file: str = "preprocessor_config.json", drop: str = "", **values: Any) -> None:
    raw = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    raw.pop(drop, None)
    (folder / file).write_text(json.dumps(raw | values))


def nested(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((folder / "preprocessor_config.json").read_text())
    return raw


def test_the_published_settings(config: PreprocessorConfig) -> None:
    assert (config.patch_size, config.temporal_patch_size, config.merge_size, config.factor) == (16, 2, 2, 32)
    assert (config.image_min_pixels, config.image_max_pixels) == (3136, 12_845_056)
    assert (config.frame_min_pixels, config.frame_max_pixels) == (128 * 32 * 32, 768 * 32 * 32)
    assert (config.fps, config.min_frames, config.max_frames) == (2.0, 4, 768)
    assert (config.sampling_rate, config.num_mel_bins, config.n_fft, config.hop_length) == (16_000, 128, 400, 160)
    assert config.image_mean == config.image_std == (0.5, 0.5, 0.5)


def test_a_file_for_videos_stands_before_the_general_one(folder: Path) -> None:
    change(folder, "video_preprocessor_config.json", **(nested(folder) | {"max_frames": 32, "fps": 4, "max_pixels": 9}))
    config = load_preprocessor(folder)
    assert (config.max_frames, config.fps, config.image_max_pixels) == (32, 4.0, 12_845_056)
    assert config.frame_max_pixels == 768 * 32 * 32  # the whole processor's own stands above it


def test_parts_of_the_processors_file_stand_before_all_others(folder: Path) -> None:
    parts = {name: nested(folder) for name in ("image_processor", "video_processor", "feature_extractor")}
    parts["image_processor"]["size"] = {"shortest_edge": 1, "longest_edge": 2}
    del parts["image_processor"]["min_pixels"]
    parts["image_processor"]["max_pixels"] = None
    parts["video_processor"]["min_frames"] = 8
    change(folder, "processor_config.json", **parts)
    change(folder, "video_preprocessor_config.json", min_frames="broken")
    (folder / "preprocessor_config.json").unlink()
    config = load_preprocessor(folder)
    assert (config.image_min_pixels, config.image_max_pixels, config.min_frames) == (1, 2, 8)


def test_a_processors_file_without_parts_changes_nothing(folder: Path, config: PreprocessorConfig) -> None:
    change(folder, "processor_config.json", processor_class="Qwen3OmniMoeProcessor")
    assert load_preprocessor(folder) == config


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"patch_size": "16"}, "patch_size"),
        ({"patch_size": 0}, "patch_size"),
        ({"patch_size": 14}, "patch_size is 14, but config.json builds the encoder for 16"),
        ({"merge_size": 4}, "merge_size is 4"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1"),
        ({"feature_size": 80}, "feature_size is 80"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std"),
        ({"min_pixels": 20_000_000}, "min_pixels 20000000 is above max_pixels"),
        ({"max_pixels": -1}, "max_pixels"),
        ({"size": {"height": 3, "width": 4}}, "shortest_edge"),
        ({"resample": 2}, "resample 2"),
        ({"do_resize": False}, "do_resize"),
        ({"do_normalize": False}, "do_normalize"),
        ({"dither": 0.1}, "dither"),
        ({"n_fft": 401}, "n_fft"),
        ({"sampling_rate": 24_000}, "sampling_rate 24000"),
        ({"hop_length": 0}, "hop_length"),
        ({"fps": 0}, "fps"),
        ({"num_frames": 8}, "num_frames"),
        ({"max_frames": 3}, "max_frames 3 is below min_frames 4"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(folder: Path, values: dict[str, Any], named: str) -> None:
    change(folder, **values)
    with pytest.raises(CheckpointError) as caught:
        load_preprocessor(folder)
    assert named in str(caught.value) and str(folder / "preprocessor_config.json") in str(caught.value)


def test_videos_normalised_otherwise_than_images_are_refused(folder: Path) -> None:
    change(folder, "video_preprocessor_config.json", **(nested(folder) | {"image_mean": [0.1, 0.2, 0.3]}))
    with pytest.raises(CheckpointError, match="image_mean"):
        load_preprocessor(folder)


@pytest.mark.parametrize("content", [None, "", "[1]", "{", '{"patch_size": }', "\udcff"])
def test_a_missing_or_broken_file_is_named(folder: Path, content: str | None) -> None:
    file = folder / "preprocessor_config.json"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        load_preprocessor(folder)


@pytest.mark.parametrize(
    ("options", "name", "says"),
    [
        (MediaOptions(fps=0), "fps", "0.01 to 1000"),
        (MediaOptions(fps=-2), "fps", "-2"),
        (MediaOptions(fps=math.nan), "fps", "nan"),
        (MediaOptions(fps=math.inf), "fps", "inf"),
        (MediaOptions(fps=1, num_frames=4), "num_frames", "without fps"),
        (MediaOptions(num_frames=4, max_frames=8), "num_frames", "without max_frames"),
        (MediaOptions(num_frames=1), "num_frames", "at least 2"),
        (MediaOptions(num_frames=-4), "num_frames", "at least 2"),
        (MediaOptions(min_frames=0), "min_frames", "at least 1"),
        (MediaOptions(max_frames=1), "max_frames", "at least 2"),
        (MediaOptions(min_frames=1000), "min_frames", "max_frames 768"),
        (MediaOptions(min_frames=9, max_frames=8), "min_frames", "min_frames 9 is above max_frames 8"),
        (MediaOptions(min_pixels=0), "min_pixels", "at least 1"),
        (MediaOptions(max_pixels=-5), "max_pixels", "at least 1"),
        (MediaOptions(min_pixels=10, max_pixels=9), "min_pixels", "min_pixels 10 is above max_pixels 9"),
        (MediaOptions(max_pixels=12_845_057), "max_pixels", "at most 12845056"),
        (MediaOptions(min_pixels=10**12), "min_pixels", "at most 12845056"),
    ],
)
def test_a_wrong_option_is_refused_by_name_and_number(
    options: MediaOptions, name: str, says: str, config: PreprocessorConfig
) -> None:
    with pytest.raises(RequestError) as caught:
        check_options(config, options)
    assert caught.value.param == f"mm_processor_kwargs.{name}" and says in str(caught.value)


def test_options_in_range_pass(config: PreprocessorConfig) -> None:
    check_options(config, MediaOptions())
    check_options(config, MediaOptions(fps=0.01, min_frames=1, max_frames=2, min_pixels=1, max_pixels=1))
    check_options(config, MediaOptions(num_frames=2, min_pixels=500_000))


def test_one_limit_is_held_to_the_checkpoints_other_for_each_kind(config: PreprocessorConfig) -> None:
    high, low = MediaOptions(min_pixels=1_000_000), MediaOptions(max_pixels=100_000)
    assert image_pixels(config, high) == (1_000_000, 12_845_056)
    with pytest.raises(RequestError, match="min_pixels 1000000 is above max_pixels 786432, max_pixels being the check"):
        frame_size(4, 100, 100, config, high)
    assert frame_pixels(config, low, 4) == (100_000, 100_000)  # to ask for smaller frames is not to ask for none
    assert image_pixels(config, low) == (3136, 100_000)
    assert image_pixels(config, MediaOptions(max_pixels=3000)) == (3000, 3000)
    assert frame_counts(config, MediaOptions(max_frames=2)) == (2, 2)


def test_frames_share_a_budget_where_the_checkpoint_says_so(folder: Path) -> None:
    assert frame_pixels(load_preprocessor(folder), MediaOptions(), 768) == (131_072, 786_432)
    change(folder, cap_pixels_per_frame=True)
    config = load_preprocessor(folder)
    budget = int(128_000 * 1024 * 0.9) * 2
    assert frame_pixels(config, MediaOptions(), 4)[1] == 786_432
    assert frame_pixels(config, MediaOptions(), 768)[1] == budget // 768
    assert frame_pixels(config, MediaOptions(), 100_000)[1] == int(131_072 * 1.05)
