"""One file of the corpus, and the signals and pictures that all of them are made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from triptych.media.contract import MediaKind

Samples = NDArray[np.float32]  # [channels, samples], full scale is 1
Pixels = NDArray[np.uint8]  # [frames, height, width, 3]

Verdict = Literal["good", "bad", "either"]
Made = tuple[str, MediaKind, bytes, str]  # name, what it is sent as, content, pattern of the message


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFile:
    """A file, what it is sent as, and what must become of it.

    A bad one is refused with a message that `error` (a pattern, cases alike) is found in. One of `either` is damaged so
    that an answer and a refusal are both right; nothing else is. A good one that is lossless carries its content:
    `samples` at `rate`, or `frames`. That of a lossy one is what a plain decoder makes of the file, and is near
    `samples` or `frames` where `near` says how near: correlation of sound, mean difference in levels of pictures.
    """

    name: str
    kind: MediaKind
    path: Path
    verdict: Verdict = "good"
    error: str = ""
    samples: Samples | None = None
    rate: int = 0
    frames: Pixels | None = None
    near: float | None = None
    use_audio_in_video: bool = False


def signal(name: str, seconds: float, rate: int, channels: int = 1) -> NDArray[np.float64]:
    """A few gliding tones and a little noise below 0.3 of the rate, different in every channel: [channels, samples]."""
    generator = np.random.default_rng(list(name.encode()))
    count = round(seconds * rate)
    time = np.arange(count) / rate
    top = min(0.3 * rate, 3500.0)
    out = np.zeros((channels, count))
    for channel in out:
        for _ in range(4):
            start, end = generator.uniform(90.0, top, 2)
            glide = start * time + (end - start) * time**2 / (2 * max(seconds, 1e-9))
            channel += generator.uniform(0.05, 0.15) * np.sin(2 * np.pi * (glide + generator.uniform()))
    return out


def picture(name: str, width: int, height: int) -> Pixels:
    """Soft gradients with a few flat shapes, as one frame: [1, height, width, 3]."""
    generator = np.random.default_rng(list(name.encode()))
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    planes = [
        127.5 + 100.0 * np.sin(x * a / max(width, 8) + y * b / max(height, 8) + c)
        for a, b, c in generator.uniform(0.5, 6.0, (3, 3))
    ]
    image = np.stack(planes, -1)
    for _ in range(4):
        left, top = int(generator.integers(0, width)), int(generator.integers(0, height))
        image[top : top + max(1, height // 4), left : left + max(1, width // 4)] = generator.uniform(0, 255, 3)
    return image.round().astype(np.uint8)[None]


def film(name: str, width: int, height: int, count: int) -> Pixels:
    """A picture whose brightness tells the frame's number and that a square crosses: [count, height, width, 3]."""
    base = picture(name, width, height)[0].astype(np.int32)
    frames = np.empty((count, height, width, 3), np.uint8)
    side = max(2, min(width, height) // 5)
    for number in range(count):
        frame = np.clip(base // 2 + 100 * number // max(1, count - 1), 0, 255)
        left = (width - side) * number // max(1, count - 1)
        frame[height // 2 - side // 2 : height // 2 - side // 2 + side, left : left + side] = (250, 30, 60)
        frames[number] = frame
    return frames
