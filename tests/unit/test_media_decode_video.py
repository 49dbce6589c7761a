"""Of a video, the frames that the rule names come out upright, whatever the container says of itself."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tests.media_files import audio_file, film, image_file, noise, tone, video_file
from triptych.errors import RequestError
from triptych.media import container
from triptych.media import decode_video as module
from triptych.media.decode_video import VideoLimits, decode_video, has_sound
from triptych.media.sniff import as_media

Frame = npt.NDArray[np.uint8]
LIMITS = VideoLimits(max_s=600, max_pixels=10**6)


class Rules:
    """Takes every `step`-th frame as it is, and notes what it was asked."""

    def __init__(self, step: int = 1) -> None:
        self.step = step
        self.asked: list[tuple[int, float]] = []

    def sample(self, num_frames: int, fps: float) -> Sequence[int]:
        self.asked.append((num_frames, fps))
        return range(0, num_frames, self.step)

    def size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        return height, width

    def resize(self, frame: Frame, size: tuple[int, int]) -> Frame:
        return frame


def shown(data: bytes, rules: Rules | None = None, limits: VideoLimits = LIMITS) -> Frame:
    return decode_video(data, as_media(data, "video"), rules or Rules(), limits)


def brightness(frames: Frame) -> list[float]:
    return [float(frame[-4:, -4:].mean()) for frame in frames]


@pytest.mark.parametrize(
    ("form", "codec"),
    [
        ("mp4", "libx264"),
        ("mov", "mpeg4"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("webm", "libvpx"),
        ("avi", "mpeg4"),
        ("mpegts", "libx264"),
        ("flv", "libx264"),
    ],
)
def test_every_frame_comes_once_and_in_order(form: str, codec: str) -> None:
    pictures, rules = film(30), Rules()
    frames = shown(video_file(pictures, form, codec), rules)
    assert frames.shape == (30, 48, 64, 3) and rules.asked == [(30, 10.0)]
    assert np.abs(np.array(brightness(frames)) - [float(picture[-1, -1, 0]) for picture in pictures]).max() < 8


@pytest.mark.parametrize(
    ("form", "codec", "options"),
    [
        ("mp4", "libx264", {"g": "12"}),
        ("matroska", "libx264", {"g": "12", "x264-params": "open-gop=1:bframes=3"}),
        ("webm", "libvpx-vp9", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "10"}),
    ],
)
def test_frames_reached_by_a_jump_are_those_of_decoding_through(
    form: str, codec: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = video_file([noise(48, 64, n) for n in range(80)], form, codec, options=options)
    decoded = 0
    decode = container.decode

    def count(*arguments: object) -> list[object]:
        nonlocal decoded
        frames = decode(*arguments)  # type: ignore[arg-type]
        decoded += len(frames)
        return frames

    monkeypatch.setattr(module, "decode", count)
    through: dict[int, Frame] = {}
    with monkeypatch.context() as patch:
        patch.setattr(module, "_SEEKABLE", ())
        through = {step: shown(data, Rules(step)) for step in (1, 5, 13, 31)}
    for step, expected in through.items():
        decoded = 0
        assert np.array_equal(shown(data, Rules(step)), expected)
        assert decoded < 60 or step < 13


def test_time_stamps_may_be_uneven() -> None:
    rules = Rules(step=2)
    frames = shown(video_file(film(6), "matroska", times=[0, 1, 2, 30, 31, 90]), rules)
    assert rules.asked[0][0] == 6 and len(frames) == 3


@pytest.mark.parametrize(("rotation", "corner"), [(90, (-1, 0)), (180, (-1, -1)), (-90, (0, -1))])
def test_rotation_is_carried_out(rotation: int, corner: tuple[int, int]) -> None:
    frames = shown(video_file(film(4), rotation=rotation))
    assert frames.shape[1:3] == ((64, 48) if abs(rotation) == 90 else (48, 64))
    assert frames[3][corner].mean() < 40  # the dark corner, which was at the top left
    assert frames[3][0, 0].mean() > 150


def test_odd_pixel_formats_become_rgb() -> None:
    for pixels in ("yuv444p", "yuv420p10le", "gray"):
        assert np.abs(np.diff(brightness(shown(video_file(film(8), pixels=pixels))))).max() < 60


def test_an_animated_gif_is_a_video_as_well() -> None:
    frames = [Image.fromarray(picture) for picture in film(5)]
    rules = Rules()
    assert len(shown(image_file(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100), rules)) == 5
    assert rules.asked == [(5, 10.0)]


def test_sound_is_told_of_and_a_cover_is_no_video() -> None:
    silent, loud = video_file(film(4)), video_file(film(4), sound=tone(0.4, 48000)[0][None])
    assert not has_sound(silent, as_media(silent, "video")) and has_sound(loud, as_media(loud, "video"))
    with pytest.raises(RequestError, match="no video stream"):
        shown(audio_file(tone(0.5, 44100), 44100, "mp3", "libmp3lame"))


def test_limits_are_told_by_name_and_number() -> None:
    data = video_file(film(40))
    with pytest.raises(RequestError, match=r"3\.9 seconds: at most 2, the limit 'media.max_video_s'"):
        shown(data, limits=VideoLimits(max_s=2, max_pixels=10**6))
    with pytest.raises(RequestError, match=r"64 x 48 = 3072 pixels: at most 3071, the limit 'media.max_video_pixels'"):
        shown(data, limits=VideoLimits(max_s=60, max_pixels=3071))


def test_an_index_that_promises_more_than_there_is_is_refused() -> None:
    data = video_file([noise(48, 64, n) for n in range(20)], options={"movflags": "faststart"})
    whole = faststart([noise(48, 64, n) for n in range(20)])
    assert len(shown(whole)) == 20
    with pytest.raises(RequestError, match="cut off"):
        shown(whole[: len(whole) * 2 // 3])
    with pytest.raises(RequestError, match="damaged or cut off"):
        shown(data[: len(data) // 2])


def test_a_recording_that_ends_early_is_shown_as_far_as_it_goes() -> None:
    data = video_file([noise(48, 64, n) for n in range(20)], "webm", "libvpx")
    assert 5 < len(shown(data[: len(data) * 2 // 3])) < 20


def faststart(frames: list[Frame]) -> bytes:
    """An MP4 whose index comes before its frames. PyAV cannot move it, so it is written as one fragment."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4", options={"movflags": "frag_keyframe+empty_moov"}) as muxer:
        stream: Any = muxer.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for number, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts = number
            muxer.mux(stream.encode(frame))
        muxer.mux(stream.encode(None))
    return file.getvalue()
