"""Small media files for tests, made by the libraries that read them."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from PIL import Image


def image_file(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def noise(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def tone(seconds: float, rate: int, channels: int = 1) -> npt.NDArray[np.float32]:
    """float32 [channels, samples], every channel at its own pitch, within a half of full scale."""
    time = np.arange(round(seconds * rate)) / rate
    return np.stack([np.sin(time * 2 * np.pi * 220 * (n + 1)) / 2 for n in range(channels)]).astype(np.float32)


def audio_file(
    samples: npt.NDArray[Any], rate: int, form: str = "wav", codec: str = "pcm_s16le", layout: str = "mono"
) -> bytes:
    """A file of [channels, samples]: floats, or integers of the codec's own width."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout=layout)
        add_audio(container, stream, samples, rate, layout)
    return file.getvalue()


def add_audio(container: Any, stream: Any, samples: npt.NDArray[Any], rate: int, layout: str) -> None:
    kinds = {"float32": "fltp", "float64": "dblp", "int16": "s16p", "int32": "s32p", "uint8": "u8p"}
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), kinds[samples.dtype.name], layout)
    frame.sample_rate, frame.pts = rate, 0
    resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate)
    fifo = av.AudioFifo()
    for part in resampler.resample(frame) + resampler.resample(None):
        fifo.write(part)
    while (part := fifo.read(stream.codec_context.frame_size or 1024, partial=True)) is not None:
        container.mux(stream.encode(part))
    container.mux(stream.encode(None))


def film(frames: int, height: int = 48, width: int = 64) -> list[npt.NDArray[np.uint8]]:
    """Frames of even grey, each brighter than the one before, with a dark corner at the top left."""
    pictures = []
    for number in range(frames):
        picture = np.full((height, width, 3), 60 + number * 190 // max(1, frames - 1), np.uint8)
        picture[: height // 2, : width // 2] = 0
        pictures.append(picture)
    return pictures


def video_file(
    frames: list[npt.NDArray[np.uint8]],
    form: str = "mp4",
    codec: str = "libx264",
    *,
    fps: int = 10,
    times: list[int] | None = None,  # of the frames, in 1 / fps seconds
    rotation: int = 0,
    sound: npt.NDArray[np.float32] | None = None,  # at 48 kHz
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=fps, options=options or {})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        if rotation:
            stream.set_display_rotation(rotation)
        audio: Any = None
        if sound is not None:
            audio = container.add_stream(
                "libopus" if form in ("webm", "matroska") else "aac", rate=48000, layout="mono"
            )
        for number, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts = number if times is None else times[number]
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound is not None:
            add_audio(container, audio, sound, 48000, "mono")
    return file.getvalue()
