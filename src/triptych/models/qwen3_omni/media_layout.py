"""Which rows of a prompt the images, clips and videos take. Plain numbers, no torch: the server process lays out.

The chat template writes one placeholder for each part; here it is repeated once for every row that the encoder makes of
the part. A video with sound is laid out in time: its frames where they begin, the sound's rows between them. HF:
`Qwen3OmniMoeProcessor`, `replace_image_token` to `replace_video_with_audio_token`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from triptych.errors import RequestError
from triptych.models.qwen3_omni.config import MediaConfig, OmniConfig

Kind = Literal["image", "audio", "video"]
Grid = tuple[int, int, int]  # patches over time, height and width
KINDS: tuple[Kind, ...] = ("image", "audio", "video")


class Measured(Protocol):
    """The size of something decoded."""

    @property
    def kind(self) -> Kind: ...
    @property
    def grid(self) -> Grid: ...
    @property
    def second_per_grid(self) -> float: ...
    @property
    def num_mel_frames(self) -> int: ...


class Part(Measured, Protocol):
    """One decoded part; `media.contract.MediaFeatures` is one. `sound` belongs to a video."""

    @property
    def sound(self) -> Part | None: ...


class Placed(Measured, Protocol):
    """One item at its place in a prompt; `connectors.wire.MediaItem` is one."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def in_video(self) -> bool: ...


class Span(NamedTuple):
    """The rows [start, end) of the part of that number; `in_video` where it is a video's sound that is meant."""

    part: int
    start: int
    end: int
    in_video: bool = False


def audio_rows(num_mel_frames: int, n_window: int) -> int:
    """Rows that the audio encoder makes of a clip. HF: `_get_feat_extract_output_lengths`, 13 rows a full window."""
    windows, rest = divmod(num_mel_frames, 2 * n_window)
    for _ in range(3):  # convolutions of stride 2
        rest = (rest - 1) // 2 + 1
    return 13 * windows + rest


def vision_rows(grid: Grid, merge: int) -> int:
    """Rows that the vision encoder makes of an image or video: one for each merge x merge patches."""
    frames, height, width = grid
    return frames * height * width // merge**2


def own_rows(item: Measured, media: MediaConfig) -> int:
    """Rows that the encoder of its kind makes of an item."""
    if item.kind == "audio":
        return audio_rows(item.num_mel_frames, media.n_window)
    return vision_rows(item.grid, media.spatial_merge_size)


def part_rows(part: Part, media: MediaConfig) -> int:
    """Rows of a part, a video's sound included."""
    return own_rows(part, media) + (0 if part.sound is None else own_rows(part.sound, media))


def media_rows(items: Iterable[Placed], media: MediaConfig) -> dict[Kind, int]:
    """How many rows of a prompt are of each kind. A video's sound counts as audio."""
    rows = dict.fromkeys(KINDS, 0)
    for item in items:
        rows[item.kind] += own_rows(item, media)
    return rows


def sound_before(times: npt.NDArray[np.floating], sound: npt.NDArray[np.floating]) -> npt.NDArray[np.intp]:
    """For each row of a video, how many rows of its sound go before it: those that are strictly earlier."""
    return np.searchsorted(sound, times, side="left")


def is_video_row(grid: Grid, second_per_grid: float, num_sound_rows: int, media: MediaConfig) -> npt.NDArray[np.bool_]:
    """For each row of a video with sound, whether it is one of the video's. Time counts in position ids, in float64."""
    frames = grid[0]
    rows = vision_rows(grid, media.spatial_merge_size)
    times = np.repeat(np.arange(frames), rows // frames) * second_per_grid * media.position_id_per_seconds
    video = np.zeros(rows + num_sound_rows, dtype=np.bool_)
    video[np.arange(rows) + sound_before(times, np.arange(num_sound_rows, dtype=np.float64))] = True
    return video


def expand(
    token_ids: Sequence[int], parts: Sequence[Part], config: OmniConfig
) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    """The whole prompt of one that has a single placeholder a part, and the rows of every part in order.

    A video with sound gets two equal spans, its own and that of the sound. Raises RequestError when the placeholders
    are not those of the parts, which a chat template without support for a kind of media makes of them.
    """
    kinds: dict[int, Kind] = {
        config.image_token_id: "image",
        config.audio_token_id: "audio",
        config.video_token_id: "video",
    }
    places = [index for index, token in enumerate(token_ids) if token in kinds]
    written, given = [kinds[token_ids[place]] for place in places], [part.kind for part in parts]
    if written != given:
        raise RequestError(
            f"the chat template of this model writes placeholders for {_listed(written)}, where the messages have "
            f"{_listed(given)}; send that media in messages of another role, or leave it out",
            "messages",
        )
    ids: list[int] = []
    spans: list[Span] = []
    done = 0
    for index, (place, part) in enumerate(zip(places, parts, strict=True)):
        ids += token_ids[done:place]
        done = place + 1
        rows = part_rows(part, config.media)
        if part.sound is None:
            spans.append(Span(index, len(ids), len(ids) + rows))
            ids += [token_ids[place]] * rows
            continue
        ids.append(config.media.audio_start_token_id)
        spans += (Span(index, len(ids), len(ids) + rows), Span(index, len(ids), len(ids) + rows, in_video=True))
        sound_rows = audio_rows(part.sound.num_mel_frames, config.media.n_window)
        video = is_video_row(part.grid, part.second_per_grid, sound_rows, config.media)
        ids += np.where(video, config.video_token_id, config.audio_token_id).tolist()
        ids.append(config.media.audio_end_token_id)
    ids += token_ids[done:]
    return tuple(ids), tuple(spans)


def _listed(kinds: Sequence[Kind]) -> str:
    return ", ".join(kinds) or "no media"
