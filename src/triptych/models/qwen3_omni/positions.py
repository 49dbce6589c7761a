"""Where the rows of a prompt stand for rotary embedding: over time, height and width (M-RoPE). numpy only.

HF: `get_rope_index`. Text counts up on all three axes alike. The rows of an image or video stand at their frame's time
and at their place in the grid, counted from where the text had come to; the text behind goes on after the largest. HF
computes in float32 and rounds at every turn of its loop, and so does this: frames of a fraction of a second give
fractions, which would round otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from triptych.models.qwen3_omni.config import OmniConfig
from triptych.models.qwen3_omni.media_layout import Placed, audio_rows, sound_before

Floats = npt.NDArray[np.float32]


class _Block(NamedTuple):
    """Rows of media with their marks: `marks` rows before and as many behind belong to them."""

    start: int
    end: int
    marks: int
    vision: Placed | None
    num_sound_rows: int


def mrope_positions(
    token_ids: Sequence[int], media: Sequence[Placed], config: OmniConfig, *, talker: bool = False
) -> tuple[Floats, float]:
    """Positions of the rows of a prompt, float32 [3, n], and how far later rows are shifted.

    Row r >= n, a token of the answer, stands at r + delta on all axes. `media` are the items of this prompt by `start`,
    a video's sound behind the video. `talker` lays out as HF's `generate` does for its Talker: see `_blocks`.
    """
    num_rows = len(token_ids)
    rate = config.media.position_id_per_seconds
    if talker and config.talker is not None:
        rate = config.talker.position_id_per_seconds
    positions = np.empty((3, num_rows), dtype=np.float32)
    blocks = list(_blocks(media, config, talker=talker))
    limits = [*(block.start for block in blocks), num_rows][1:]
    first, next_position = 0, np.float32(0)  # the first row without a position, and the position it gets
    for block, limit in zip(blocks, limits, strict=True):
        marks = min(block.marks, block.start - first)
        text = block.start - marks - first
        _count(positions, first, first + text, next_position)
        next_position += np.float32(text)
        _count(positions, block.start - marks, block.start, next_position)
        last = _place(positions, block, next_position + np.float32(marks), config.media.spatial_merge_size, rate)
        first = min(block.end + block.marks, limit)
        _count(positions, block.end, first, last + np.float32(1))
        if first > block.end:
            last = positions[0, first - 1]
        next_position = last + np.float32(1)
    _count(positions, first, num_rows, next_position)
    return positions, float(positions[:, -1].max()) + 1.0 - num_rows if num_rows else 0.0


def _blocks(media: Sequence[Placed], config: OmniConfig, *, talker: bool) -> Iterator[_Block]:
    """Media by place, a video and its sound together.

    HF's `generate` does not tell its Talker that videos have sound. Such a video is then found only while an image or
    a silent video is still to come; else as many of its first rows as the sound has are taken for a clip, and all count
    up like text.
    """
    sounds = {item.start: audio_rows(item.num_mel_frames, config.media.n_window) for item in media if item.in_video}
    silent = [item.start for item in media if item.kind != "audio" and item.start not in sounds]
    last_silent = max(silent, default=-1)
    for item in media:
        if item.in_video:
            continue
        sound = sounds.get(item.start, 0) if item.kind == "video" else 0
        if item.kind == "audio":
            rows = audio_rows(item.num_mel_frames, config.media.n_window)
            yield _Block(item.start, item.end, 1, None, rows)
        elif sound and talker and item.start > last_silent:
            yield _Block(item.start, item.start + sound, 1, None, sound)
        else:
            yield _Block(item.start, item.end, 2 if sound else 1, item, sound)


def _count(positions: Floats, start: int, end: int, position: np.float32) -> None:
    positions[:, start:end] = np.arange(end - start, dtype=np.float32) + position


def _place(positions: Floats, block: _Block, origin: np.float32, merge: int, rate: float) -> np.float32:
    """Write the rows of a block that begins at `origin`; the position after which the text goes on."""
    sound = np.arange(block.num_sound_rows, dtype=np.float32) + origin
    if block.vision is None:
        positions[:, block.start : block.end] = sound
        return np.float32(sound[-1])
    item = block.vision
    frames, height, width = item.grid[0], item.grid[1] // merge, item.grid[2] // merge
    second_per_grid = np.float32(1.0 if item.kind == "image" else item.second_per_grid)
    times = np.arange(frames, dtype=np.float32) * second_per_grid * np.float32(rate)
    place = np.empty((3, frames, height, width), dtype=np.float32)
    place[0] = times[:, None, None]
    place[1] = np.arange(height)[:, None]
    place[2] = np.arange(width)
    video = place.reshape(3, -1) + origin
    farthest = np.float32(max(times[-1], height - 1, width - 1)) + origin
    if not block.num_sound_rows:
        positions[:, block.start : block.end] = video
        return farthest
    before = sound_before(video[0], sound)
    rows = positions[:, block.start : block.end]
    is_video = np.zeros(rows.shape[1], dtype=np.bool_)
    is_video[np.arange(video.shape[1]) + before] = True
    rows[:, is_video] = video
    rows[:, ~is_video] = sound
    # The text goes on after what came last, however far the other of the two has got.
    return np.float32(sound[-1]) if before[-1] < len(sound) else farthest
