"""Hidden states travel bit for bit, and each item finds its own rows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from triptych.connectors.wire import MediaItem
from triptych.models.qwen3_omni.config import load_config
from triptych.stages.hidden_rows import from_array, media_rows, placeholder_rows, to_array


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_bit_arrives(dtype: torch.dtype) -> None:
    hidden = torch.randn(33, 7).to(dtype)
    hidden[0, :3] = torch.tensor([float("inf"), -0.0, 1e-7]).to(dtype)
    sent = to_array(hidden)
    assert sent.dtype.name == {torch.bfloat16: "uint16"}.get(dtype, str(dtype).removeprefix("torch."))
    arrived = from_array(sent.copy())
    assert arrived.dtype is dtype
    assert torch.equal(arrived.view(torch.uint8), hidden.view(torch.uint8))


def test_a_video_and_its_sound_share_a_span_and_no_row(nano: Path) -> None:
    config = load_config(nano)
    image, sound, video = config.image_token_id, config.audio_token_id, config.video_token_id
    ids = [1, image, image, 2, video, sound, video, sound, sound, 3, sound]
    picture = MediaItem(kind="image", start=1, end=3, digest=b"")
    film = MediaItem(kind="video", start=4, end=9, digest=b"")
    track = msgspec.structs.replace(film, kind="audio", in_video=True)
    clip = MediaItem(kind="audio", start=10, end=11, digest=b"")
    assert [placeholder_rows(ids, item, config).tolist() for item in (picture, film, track, clip)] == [
        [1, 2],
        [4, 6],
        [5, 7, 8],
        [10],
    ]
    assert media_rows(ids, [picture, film, track, clip], config).tolist() == [1, 2, 4, 5, 6, 7, 8, 10]
    assert media_rows(ids, [], config).dtype == np.int64
