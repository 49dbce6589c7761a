"""Where rows stand for rotary embedding, by examples small enough to check by hand, and in no time."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from triptych.config.sampling import SamplingParams
from triptych.connectors.wire import MediaItem
from triptych.engine.batch import ScheduledBatch, ScheduledRow
from triptych.engine.inputs import build_inputs
from triptych.engine.request import EngineRequest
from triptych.models.qwen3_omni.config import OmniConfig, load_config
from triptych.models.qwen3_omni.positions import mrope_positions


@pytest.fixture(scope="module")
def config(nano: Path) -> OmniConfig:
    return load_config(nano)


def image(start: int, height: int, width: int) -> MediaItem:
    rows = height * width
    return MediaItem(kind="image", start=start, end=start + rows, digest=b"", grid=(1, 2 * height, 2 * width))


def sounding(start: int, frames: int, second_per_grid: float, num_mel_frames: int, sound_rows: int) -> list[MediaItem]:
    """A video of one row a frame, and its sound."""
    video = MediaItem(
        kind="video",
        start=start,
        end=start + frames + sound_rows,
        digest=b"",
        grid=(frames, 2, 2),
        second_per_grid=second_per_grid,
    )
    sound = msgspec.structs.replace(video, kind="audio", num_mel_frames=num_mel_frames, in_video=True, grid=(0, 0, 0))
    return [video, sound]


@pytest.mark.parametrize("talker", [False, True])
def test_text_counts_up_on_all_axes(config: OmniConfig, talker: bool) -> None:
    positions, delta = mrope_positions([1] * 5, [], config, talker=talker)
    assert positions.dtype == np.float32
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3 and delta == 0


def test_a_prompt_of_no_rows_has_no_positions(config: OmniConfig) -> None:
    positions, delta = mrope_positions([], [], config)
    assert positions.shape == (3, 0) and delta == 0


@pytest.mark.parametrize("talker", [False, True])
def test_an_image_stands_in_its_grid_and_the_text_behind_its_longer_side(config: OmniConfig, talker: bool) -> None:
    positions, delta = mrope_positions([1] * 11, [image(2, 2, 3)], config, talker=talker)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]
    assert delta == -3  # row 11 stands at 8


def test_frames_of_a_video_stand_at_their_time_between_its_sound(config: OmniConfig) -> None:
    """Two marks, frames at 0 and 0.25 * 13 = 3.25, sound at 0 to 5, two marks."""
    media = sounding(2, 2, 0.25, 41, 6)
    positions, delta = mrope_positions([1] * 12, media, config)
    assert positions[0].tolist() == [0, 1, 2, 2, 3, 4, 5, 5.25, 6, 7, 8, 9]
    assert positions[1].tolist() == [0, 1, 2, 2, 3, 4, 5, 2, 6, 7, 8, 9]
    assert delta == -2


def test_the_talker_knows_of_the_sound_only_while_a_silent_picture_is_to_come(config: OmniConfig) -> None:
    media = sounding(2, 2, 0.25, 41, 6)
    alone, _ = mrope_positions([1] * 12, media, config, talker=True)
    assert alone.tolist() == [list(range(12))] * 3
    followed = [*media, image(13, 1, 1)]
    np.testing.assert_array_equal(
        mrope_positions([1] * 16, followed, config, talker=True)[0], mrope_positions([1] * 16, followed, config)[0]
    )


def test_the_talker_counts_time_by_its_own_rate(config: OmniConfig) -> None:
    assert config.talker is not None
    fast = msgspec.structs.replace(config, talker=msgspec.structs.replace(config.talker, position_id_per_seconds=26.0))
    video = sounding(1, 3, 1.0, 0, 0)[:1]
    assert mrope_positions([1] * 6, video, fast)[0][0].tolist() == [0, 1, 14, 27, 28, 29]
    assert mrope_positions([1] * 6, video, fast, talker=True)[0][0].tolist() == [0, 1, 27, 53, 54, 55]


def test_the_answer_behind_a_long_video_goes_on_by_exactly_one(config: OmniConfig) -> None:
    """A shift of many thousands has no digits left for fractions in float32: it must not be rounded by itself."""
    frames, side = 60, 64
    rows = frames * side**2 // 4
    video = MediaItem(
        kind="video", start=2, end=2 + rows, digest=b"", grid=(frames, side, side), second_per_grid=2 / 29.97
    )
    prompt = [1] * (video.end + 5)
    request = EngineRequest(request_id="r", num_prompt_tokens=len(prompt), params=SamplingParams(seed=0))
    request.positions, request.position_delta = mrope_positions(prompt, [video], config)
    request.block_ids = list(range(len(prompt) // 16 + 2))
    batch = ScheduledBatch(rows=(ScheduledRow(request, len(prompt) - 1, 4, True),), preempted=())
    inputs = build_inputs(batch, block_size=16, device=torch.device("cpu"), batch_invariant=False)
    last = request.positions[:, -1:]
    assert last[0, 0] % 1 != 0 and request.position_delta < -60_000
    np.testing.assert_array_equal(inputs.positions[:, :4].numpy(), last + np.arange(4, dtype=np.float32))


def test_a_long_video_takes_milliseconds(config: OmniConfig) -> None:
    sound_rows, frames, side = 13 * 2400, 384, 24
    video = MediaItem(
        kind="video",
        start=2,
        end=2 + frames * side**2 // 4 + sound_rows,
        digest=b"",
        grid=(frames, side, side),
        second_per_grid=6.25,
    )
    sound = msgspec.structs.replace(video, kind="audio", num_mel_frames=240_000, in_video=True)
    prompt = [1] * (video.end + 10)
    best = min(_seconds(prompt, [video, sound], config) for _ in range(5))
    assert len(prompt) > 80_000 and best < 0.1


def _seconds(prompt: list[int], media: list[MediaItem], config: OmniConfig) -> float:
    started = time.perf_counter()
    mrope_positions(prompt, media, config)
    return time.perf_counter() - started
