"""Films as phones, browsers, screen recorders and editors write them."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from tests.corpus.audio import FRAGMENTS, Pipe
from tests.corpus.file import CorpusFile, Pixels, Samples, film, signal


@contextmanager
def scheduled_as_before() -> Iterator[None]:
    """SVT-AV1 makes its caller a real-time process where it may (as root), and so all that the caller starts later."""
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameter)


def filmed(
    path: Path,
    container: str,
    codec: str,
    frames: Pixels,
    *,
    rate: Fraction | int = 8,
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
    sound: Samples | None = None,
    sound_codec: str = "aac",
    sound_rate: int = 48000,
    times: Sequence[int] | None = None,
    piped: bool = False,
    container_options: dict[str, str] | None = None,
    aspect: Fraction | None = None,
) -> None:
    """Written by FFmpeg's encoders. `times`, in milliseconds, makes the frame rate vary."""
    target: Any = Pipe() if piped else str(path)
    with scheduled_as_before(), av.open(target, "w", format=container, options=container_options or {}) as out:
        stream = out.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        if aspect:
            stream.codec_context.sample_aspect_ratio = aspect
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        hearing = None
        if sound is not None:
            layout = "stereo" if len(sound) == 2 else "mono"
            hearing = out.add_stream(sound_codec, rate=sound_rate, layout=layout)
            packed = av.AudioFrame.from_ndarray(
                np.ascontiguousarray(sound.T.reshape(1, -1)), format="flt", layout=layout
            )
            packed.sample_rate = sound_rate
            packed.pts = 0
        for number, image in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = number if times is None else times[number]
            if times is not None:
                frame.time_base = Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
        if hearing is not None:
            out.mux(hearing.encode(packed))
            out.mux(hearing.encode(None))
    if piped:
        path.write_bytes(target.kept.getvalue())


EXACT = {"qp": "0", "preset": "ultrafast"}
QUICK = {"preset": "ultrafast", "crf": "18"}
X265 = {"preset": "ultrafast", "x265-params": "log-level=none:pools=1:frame-threads=1"}
AV1 = {"preset": "12", "svtav1-params": "lp=1"}
VPX = {"deadline": "realtime", "cpu-used": "8", "crf": "10", "b": "2M"}
FAST = {"movflags": "+faststart"}
IN_PIECES: dict[str, Any] = {"piped": True, "container_options": FRAGMENTS}
LIVE: dict[str, Any] = {"piped": True, "container_options": {"live": "1"}}

# name, file ending, container, codec, (width, height), more. What is lossless says so with "exact".
FILMS: Sequence[tuple[str, str, str, str, tuple[int, int], dict[str, Any]]] = (
    ("mp4-h264", "mp4", "mp4", "libx264", (96, 64), {"options": QUICK}),
    ("mp4-h264-b-frames", "mp4", "mp4", "libx264", (96, 64), {"options": {"preset": "medium", "crf": "18"}}),
    ("mp4-h264-exact", "mp4", "mp4", "libx264rgb", (96, 64), {"options": EXACT, "pixels": "rgb24"}),
    ("mp4-h264-odd-size", "mp4", "mp4", "libx264rgb", (97, 61), {"options": EXACT, "pixels": "rgb24"}),
    ("mp4-h264-444", "mp4", "mp4", "libx264", (95, 63), {"options": QUICK, "pixels": "yuv444p"}),
    ("mp4-h264-10-bit", "mp4", "mp4", "libx264", (96, 64), {"options": QUICK, "pixels": "yuv420p10le"}),
    ("mp4-mpeg4", "mp4", "mp4", "mpeg4", (96, 64), {"options": {"q": "2"}}),
    ("mp4-hevc", "mp4", "mp4", "libx265", (96, 64), {"options": X265}),
    ("mp4-hevc-10-bit", "mp4", "mp4", "libx265", (96, 64), {"options": X265, "pixels": "yuv420p10le"}),
    ("mp4-fragmented", "mp4", "mp4", "libx264", (96, 64), {"options": QUICK} | IN_PIECES),
    ("mp4-faststart", "mp4", "mp4", "libx264", (96, 64), {"options": QUICK, "container_options": FAST}),
    ("mp4-av1", "mp4", "mp4", "libsvtav1", (96, 64), {"options": AV1}),
    ("webm-vp8", "webm", "webm", "libvpx", (96, 64), {"options": VPX}),
    ("webm-vp8-recorder", "webm", "webm", "libvpx", (96, 64), {"options": VPX} | LIVE),
    ("webm-vp9", "webm", "webm", "libvpx-vp9", (97, 63), {"options": VPX}),
    ("webm-vp9-444", "webm", "webm", "libvpx-vp9", (96, 64), {"options": VPX, "pixels": "yuv444p"}),
    ("mkv-h264", "mkv", "matroska", "libx264", (96, 64), {"options": QUICK}),
    ("mkv-ffv1", "mkv", "matroska", "ffv1", (96, 64), {"pixels": "bgr0"}),
    ("mov-h264", "mov", "mov", "libx264", (96, 64), {"options": QUICK}),
    ("mov-prores", "mov", "mov", "prores_ks", (96, 64), {"pixels": "yuv422p10le"}),
    ("mov-png", "mov", "mov", "png", (61, 45), {"pixels": "rgb24"}),
    ("avi-mpeg4", "avi", "avi", "mpeg4", (96, 64), {"options": {"q": "2"}}),
    ("avi-mjpeg", "avi", "avi", "mjpeg", (96, 64), {"pixels": "yuvj420p", "options": {"q": "2"}}),
    ("avi-huffyuv", "avi", "avi", "huffyuv", (64, 48), {"pixels": "rgb24"}),
    ("avi-raw", "avi", "avi", "rawvideo", (64, 48), {"pixels": "bgr24"}),
    ("transport-stream", "ts", "mpegts", "libx264", (96, 64), {"options": QUICK}),
    ("transport-stream-small", "ts", "mpegts", "libx264", (48, 96), {"options": QUICK}),
    ("program-stream", "mpg", "mpeg", "mpeg2video", (96, 64), {"rate": 25, "options": {"q": "2"}}),
    ("flv-h264", "flv", "flv", "libx264", (96, 64), {"options": QUICK}),
    ("wmv", "wmv", "asf", "wmv2", (96, 64), {"options": {"q": "2"}}),
    ("3gp-h263", "3gp", "3gp", "h263", (176, 144), {"options": {"q": "2"}}),
    ("mp4-wide-pixels", "mp4", "mp4", "libx264", (64, 64), {"options": QUICK, "aspect": Fraction(2)}),
)  # fmt: skip
EXACTLY = {"mp4-h264-exact", "mp4-h264-odd-size", "mkv-ffv1", "mov-png", "avi-huffyuv", "avi-raw"}


def films(folder: Path) -> Iterator[CorpusFile]:
    for name, ending, container, codec, (width, height), more in FILMS:
        path = folder / f"{name}.{ending}"
        frames = film(name, width, height, 20)
        filmed(path, container, codec, frames, **more)
        near = None if name in EXACTLY else 14.0
        yield CorpusFile(name=name, kind="video", path=path, frames=frames, near=near)


def patched(data: bytes, name: bytes, offset: int, value: bytes) -> bytes:
    """`value` at that offset behind the name of the first box of that name."""
    at = data.index(name) + len(name) + offset
    return data[:at] + value + data[at + len(value) :]


MATRICES = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}


def turned(data: bytes, degrees: int) -> bytes:
    """The display matrix of a phone held that far clockwise from how its sensor is built."""
    a, b, c, d = (value << 16 for value in MATRICES[degrees])
    return patched(data, b"tkhd", 40, struct.pack(">iiiiiiiii", a, b, 0, c, d, 0, 0, 0, 1 << 30))


def odd_films(folder: Path) -> Iterator[CorpusFile]:
    """Turned, of uneven pace, of one frame, long, wide."""

    def made(name: str, frames: Pixels, ending: str = "mp4", **more: Any) -> CorpusFile:
        path = folder / f"{name}.{ending}"
        container = {"mkv": "matroska"}.get(ending, ending)
        exact = "codec" not in more
        codec = more.pop("codec", "libx264rgb")
        coding: dict[str, Any] = {"options": EXACT, "pixels": "rgb24"} if exact else {}
        filmed(path, container, codec, frames, **coding, **more)
        return CorpusFile(name=name, kind="video", path=path, frames=frames, near=None if exact else 14.0)

    for degrees in MATRICES:
        frames = film(f"turned {degrees}", 96, 64, 12)
        stored = made(f"mov-turned-{degrees}", frames, "mov")
        stored.path.write_bytes(turned(stored.path.read_bytes(), degrees))
        upright = np.ascontiguousarray(np.rot90(frames, -degrees // 90, (1, 2)))
        yield CorpusFile(name=stored.name, kind="video", path=stored.path, frames=upright)
    uneven = np.cumsum([0, 40, 33, 500, 20, 20, 1000, 40, 40, 40, 300, 100, 100, 33, 33, 700, 50, 50, 50]).tolist()
    yield made("mp4-uneven-pace", film("uneven", 64, 48, len(uneven)), times=uneven)
    yield made("mkv-uneven-pace", film("uneven mkv", 64, 48, len(uneven)), "mkv", times=uneven)
    yield made("mkv-starts-late", film("late", 64, 48, 12), "mkv", times=[5000 + 125 * n for n in range(12)])
    yield made("mp4-one-frame", film("one", 64, 48, 1))
    yield made("mkv-one-frame", film("one", 64, 48, 1), "mkv")
    yield made("mp4-two-frames", film("two", 64, 48, 2))
    yield made("mp4-three-frames", film("three", 64, 48, 3))
    yield made("mp4-60-fps", film("sixty", 64, 48, 90), rate=60)
    yield made("mp4-29.97-fps", film("ntsc", 64, 48, 60), rate=Fraction(30000, 1001))
    yield made("mp4-one-frame-in-4-s", film("slow", 64, 48, 6), rate=Fraction(1, 4))
    yield made("mp4-wide", film("wide", 640, 32, 8))
    yield made("mp4-small", film("small", 16, 16, 8))
    yield made("mp4-3-min", film("long", 64, 48, 360), codec="libx264", options=QUICK, rate=2)
    groups = {"preset": "fast", "g": "24", "bf": "3"}  # keyframes between the frames that are sampled
    yield made("mp4-groups", film("groups", 64, 48, 480), codec="libx264", options=groups, rate=24)
    open_groups = groups | {"x264-params": "open-gop=1"}
    yield made("mp4-open-groups", film("open", 64, 48, 480), codec="libx264", options=open_groups, rate=24)
    yield made("mkv-groups", film("mkv groups", 64, 48, 300), "mkv", codec="libx264", options=groups, rate=30)
    hidden = {"deadline": "good", "cpu-used": "5", "auto-alt-ref": "1", "lag-in-frames": "12", "g": "20", "b": "300k"}
    yield made("webm-hidden-frames", film("hidden", 64, 48, 240), "webm", codec="libvpx", options=hidden, rate=24)
    yield made("webm-vp9-groups", film("vp9 groups", 64, 48, 240), "webm", codec="libvpx-vp9", options=hidden, rate=24)
    yield made("mkv-1080", film("large", 1920, 1080, 6), "mkv", codec="libx264", options=QUICK, rate=4)

    path = folder / "gif-film.gif"
    images = [Image.fromarray(frame).quantize(32) for frame in film("gif", 64, 48, 8)]
    images[0].save(path, save_all=True, append_images=images[1:], duration=125, loop=0)
    frames = np.stack([np.asarray(image.convert("RGB")) for image in images])
    yield CorpusFile(name="gif-film", kind="video", path=path, frames=frames)


def with_sound(folder: Path) -> Iterator[CorpusFile]:
    """Films whose sound is asked for: as long, longer, shorter, none; and one whose sound is not wanted."""

    def made(name: str, ending: str, seconds: float | None, *, asked: bool = True, **more: Any) -> CorpusFile:
        path = folder / f"{name}.{ending}"
        frames = film(name, 64, 48, 16)
        sound = None if seconds is None else signal(name, seconds, 48000, 2).astype(np.float32)
        container = {"mkv": "matroska"}.get(ending, ending)
        webm = ending == "webm"
        coding: dict[str, Any] = {"options": VPX, "sound_codec": "libopus"} if webm else {"options": QUICK}
        filmed(path, container, "libvpx" if webm else "libx264", frames, sound=sound, **coding, **more)
        return CorpusFile(
            name=name,
            kind="video",
            path=path,
            frames=frames,
            near=14.0,
            samples=sound if asked else None,
            rate=48000 if sound is not None and asked else 0,
            use_audio_in_video=asked,
        )

    yield made("mp4-sound", "mp4", 2.0)
    yield made("mp4-sound-not-asked", "mp4", 2.0, asked=False)
    yield made("mp4-sound-longer", "mp4", 5.0)
    yield made("mp4-sound-shorter", "mp4", 0.6)
    yield made("mp4-silent-but-asked", "mp4", None)
    yield made("webm-sound", "webm", 2.0)
    yield made("webm-sound-recorder", "webm", 2.0, **LIVE)
    yield made("mkv-sound", "mkv", 2.0)
    yield made("mov-sound", "mov", 2.0)


def video_files(folder: Path) -> Iterator[CorpusFile]:
    folder.mkdir(parents=True, exist_ok=True)
    yield from films(folder)
    yield from odd_films(folder)
    yield from with_sound(folder)
