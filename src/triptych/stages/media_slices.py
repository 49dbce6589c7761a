"""An image, clip or video on its way to its encoder: whether it is what it says, and where it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from triptych.errors import TriptychError
from triptych.models.qwen3_omni.encoders import Encoders


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderItem:
    """One image, clip or video of a prompt. `digest`, `grid` and `features` are those of `wire.MediaItem`.

    `num_rows` is how many rows of the prompt it fills, of which those from `first_row` on are needed. `features` may be
    a view of a read-only memory map.
    """

    kind: Literal["image", "audio", "video"]
    digest: bytes
    num_rows: int
    features: np.ndarray
    grid: tuple[int, int, int] = (0, 0, 0)
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """What goes through an encoder at once: `features` [start, stop) along time, `cost` patches or frames, for rows
    [row, row + num_rows) of its item. `grid` is its own; `chunk` is that of `AudioEncoder.forward`."""

    start: int
    stop: int
    cost: int
    row: int
    num_rows: int
    grid: tuple[int, int, int] = (0, 0, 0)
    chunk: int = 0

    @property
    def end(self) -> int:
        return self.row + self.num_rows


def slices(item: EncoderItem, encoders: Encoders, budget: int) -> Iterator[Slice]:
    """An item in pieces that cost at most `budget` each, or one indivisible part where that costs more: an image, a
    temporal patch of a video, an attention window of a clip. They depend on the item and the budget alone."""
    if item.kind == "audio":
        ear = encoders.audio_tower
        assert ear is not None
        frames, window = item.features.shape[1], ear.config.window
        length = max(1, budget // window) * window
        for start in range(0, frames, length):
            stop = min(start + length, frames)
            chunk = min(frames, ear.config.chunk)
            yield Slice(start, stop, stop - start, ear.num_rows(start), ear.num_rows(stop - start), chunk=chunk)
        return
    eye = encoders.visual
    assert eye is not None
    t, h, w = item.grid
    rows, depth = h * w // eye.config.spatial_merge_size**2, eye.config.temporal_patch_size
    length = max(1, budget // (h * w))
    for start in range(0, t, length):
        n = min(length, t - start)
        frames = range(start * depth, (start + n) * depth)
        yield Slice(frames.start, frames.stop, n * h * w, start * rows, n * rows, grid=(n, h, w))


def check_item(item: EncoderItem, encoders: Encoders) -> None:
    """Raise TriptychError unless features, grid and rows belong together and there is an encoder for them."""
    tower = encoders.audio_tower if item.kind == "audio" else encoders.visual
    if tower is None:
        raise TriptychError(f"this checkpoint has no encoder for {item.kind}")
    rows = _audio_rows(item, encoders) if item.kind == "audio" else _vision_rows(item, encoders)
    if rows != item.num_rows:
        raise TriptychError(f"{item.kind} features give {rows} rows, the prompt has {item.num_rows} for them")
    if not 0 <= item.first_row < rows:
        raise TriptychError(f"row {item.first_row} is not one of the {rows} rows of the {item.kind}")


def _audio_rows(item: EncoderItem, encoders: Encoders) -> int:
    assert encoders.audio_tower is not None
    shape, bins = item.features.shape, encoders.audio_tower.config.num_mel_bins
    if item.features.dtype != np.float32 or len(shape) != 2 or shape[0] != bins or not shape[1]:
        raise TriptychError(f"audio features are {item.features.dtype} {list(shape)}, not float32 [{bins}, frames]")
    return encoders.audio_tower.num_rows(shape[1])


def _vision_rows(item: EncoderItem, encoders: Encoders) -> int:
    assert encoders.visual is not None
    config, shape = encoders.visual.config, item.features.shape
    (t, h, w), merge, depth = item.grid, config.spatial_merge_size, config.temporal_patch_size
    if min(item.grid) < 1 or h % merge or w % merge:
        raise TriptychError(f"grid {list(item.grid)} of {item.kind} features is not of {merge} x {merge} blocks")
    size = [h * config.patch_size, w * config.patch_size, 3]
    fits = len(shape) == 4 and list(shape[1:]) == size and -(-shape[0] // depth) == t
    if item.features.dtype != np.uint8 or not fits:
        raise TriptychError(
            f"{item.kind} features are {item.features.dtype} {list(shape)}, not uint8 [{(t - 1) * depth + 1} to "
            f"{t * depth}, {', '.join(map(str, size))}]"
        )
    return t * h * w // merge**2
