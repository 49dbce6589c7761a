"""Made-up media, as `data:` URLs. Each seed gives other content, so that no cache of a server's helps by chance."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

AUDIO_RATE = 16_000
VIDEO_FPS = 10
BLOCK = 16  # pixels: noise in blocks makes files of a natural size


def _noise(width: int, height: int, seed: int) -> npt.NDArray[np.uint8]:
    """uint8 [height, width, 3], coloured blocks."""
    shape = (-(-height // BLOCK), -(-width // BLOCK), 3)
    blocks = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return np.ascontiguousarray(blocks.repeat(BLOCK, 0).repeat(BLOCK, 1)[:height, :width])


def _url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def image_url(width: int, height: int, seed: int) -> str:
    """A JPEG of coloured blocks."""
    file = io.BytesIO()
    Image.fromarray(_noise(width, height, seed)).save(file, "JPEG", quality=90)
    return _url("image/jpeg", file.getvalue())


def audio_url(seconds: float, seed: int) -> str:
    """A WAV file, 16 kHz, mono: a tone whose pitch glides, and some noise."""
    draw = np.random.default_rng(seed)
    time = np.arange(max(1, round(seconds * AUDIO_RATE))) / AUDIO_RATE
    low, rise = draw.uniform(100, 400), draw.uniform(5, 50)
    samples = np.sin(2 * np.pi * (low * time + rise * time**2)) / 2 + draw.normal(0, 0.02, time.size)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, AUDIO_RATE, 0, "NONE", ""))
        writer.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return _url("audio/wav", file.getvalue())


def video_url(width: int, height: int, seconds: float, seed: int) -> str:
    """An MP4 without sound: coloured blocks that move, ten frames a second. MPEG-4 Part 2, since x264 does not always
    give the same bytes for the same frames, not even with one thread."""
    ground = _noise(width, height, seed)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=VIDEO_FPS, options={"flags": "+bitexact"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.thread_count = 1
        for index in range(max(1, round(seconds * VIDEO_FPS))):
            frame = av.VideoFrame.from_ndarray(np.roll(ground, 3 * index, axis=1), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return _url("video/mp4", file.getvalue())
