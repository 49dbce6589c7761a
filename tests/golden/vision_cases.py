"""Pictures and videos that the golden tensors are made of, by both sides: the same bytes from the same names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

SMALL = 40_000  # bytes of resized pixels that are kept whole; of more, every STRIDE-th and a hash
STRIDE = 997


@dataclass(frozen=True)
class Picture:
    height: int
    width: int
    pattern: str
    options: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "-".join(map(str, (self.pattern, self.height, self.width, *self.options.values())))

    def pixels(self) -> np.ndarray[Any, Any]:
        return pattern(self.pattern, 1, self.height, self.width)[0]


@dataclass(frozen=True)
class Video:
    frames: int
    height: int
    width: int
    pattern: str
    rate: float = 25.0
    options: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        options = (f"{key}={value}" for key, value in self.options.items())
        return "-".join(map(str, (self.pattern, self.frames, self.height, self.width, self.rate, *options)))

    def pixels(self) -> np.ndarray[Any, Any]:
        return pattern(self.pattern, self.frames, self.height, self.width)


@dataclass(frozen=True)
class Sampling:
    total: int
    rate: float
    options: dict[str, float] = field(default_factory=dict)


def pattern(name: str, frames: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """uint8 [frames, height, width, 3], without anything whose bytes could depend on the machine or the library."""
    time, row, column, channel = np.ogrid[:frames, :height, :width, :3]
    if name == "noise":
        source = np.random.RandomState(height * 10_007 + width * 101 + frames)
        return source.randint(0, 256, (frames, height, width, 3)).astype(np.uint8)
    if name == "gradient":
        return ((row * 3 + column * 2 + time * 16 + channel * 80) % 256).astype(np.uint8)
    if name == "edges":  # black and white: bicubic overshoots both ends of the scale
        return np.broadcast_to(
            (((row // 7) + (column // 5) + time + channel) % 2) * 255, (frames, height, width, 3)
        ).astype(np.uint8)
    if name == "lines":  # one pixel wide, which antialiasing must spread
        return np.broadcast_to(((row + column * 2 + time) % 11 == 0) * 255, (frames, height, width, 3)).astype(np.uint8)
    raise ValueError(name)


PICTURES = [
    Picture(1, 1, "noise"),
    Picture(2, 3, "noise"),
    Picture(1, 200, "noise"),
    Picture(200, 1, "gradient"),
    Picture(17, 23, "edges"),
    Picture(56, 56, "noise"),
    Picture(64, 64, "noise"),
    Picture(80, 80, "lines"),  # 2.5 multiples: halves are rounded to even
    Picture(112, 48, "edges"),
    Picture(100, 333, "noise"),
    Picture(333, 100, "lines"),
    Picture(480, 640, "gradient"),
    Picture(719, 1283, "noise"),
    Picture(1283, 719, "edges"),
    Picture(30, 5000, "noise"),
    Picture(500, 700, "noise", {"min_pixels": 3136, "max_pixels": 20_000}),
    Picture(500, 700, "edges", {"min_pixels": 3136, "max_pixels": 5_000}),
    Picture(900, 90, "lines", {"min_pixels": 1, "max_pixels": 1}),
    Picture(40, 60, "noise", {"min_pixels": 10_000, "max_pixels": 200_000}),
    Picture(40, 60, "edges", {"min_pixels": 100_000, "max_pixels": 200_000}),
    Picture(10, 10, "gradient", {"min_pixels": 1, "max_pixels": 100_000}),
]

FEW = {"min_pixels": 1024, "max_pixels": 6000}
VIDEOS = [
    *(Video(frames, 48, 70, "noise", options=FEW) for frames in range(2, 10)),
    Video(50, 40, 90, "edges", options=FEW),
    Video(75, 33, 65, "lines", 29.97, FEW),
    Video(100, 64, 64, "gradient", 24.0, {**FEW, "fps": 1.0}),
    Video(100, 20, 20, "noise", 30.0, {**FEW, "fps": 7.5}),
    Video(60, 50, 30, "edges", 30.0, {**FEW, "num_frames": 7}),
    Video(60, 50, 30, "noise", 30.0, {**FEW, "fps": 30.0, "min_frames": 3, "max_frames": 9}),
    Video(25, 240, 320, "noise"),
    Video(8, 90, 160, "edges"),
    Video(5, 1080, 1920, "lines"),
    Video(6, 300, 1300, "noise", options={"min_pixels": 131072, "max_pixels": 150_000}),
]

SAMPLINGS = [
    *(Sampling(total, 25.0) for total in (*range(2, 40), 100, 101, 1499, 9599, 9601, 16_383)),
    *(Sampling(total, 30000 / 1001) for total in (2, 7, 29, 30, 31, 299, 1798, 14_400)),
    *(Sampling(301, rate) for rate in (0.5, 1.0, 1.999, 2.0, 2.001, 10.0, 12.5, 59.94, 240.0)),
    *(Sampling(250, 25.0, {"fps": fps}) for fps in (0.1, 0.3, 0.5, 1, 1.5, 3.7, 24.9, 25, 26, 100)),
    *(Sampling(97, 24.0, {"num_frames": count}) for count in (2, 3, 4, 5, 6, 7, 9, 11, 31, 48, 96)),
    *(Sampling(5000, 30.0, {"fps": 30, "max_frames": most}) for most in (4, 5, 6, 31, 700, 1001)),
    *(Sampling(200, 30.0, {"fps": 0.5, "min_frames": least}) for least in (2, 3, 4, 5, 16, 33)),
    Sampling(40, 25.0, {"min_frames": 64, "max_frames": 128}),
]

LIMITS = [(3136, 12_845_056), (131_072, 786_432), (1, 100_000), (50_000, 50_000), (1024, 1_000_000)]


def sizes() -> list[tuple[int, int, int, int]]:
    """Heights, widths and limits on pixels for which only the resized size is kept."""
    source = np.random.RandomState(5)
    found = [
        (high, wide, *limits) for high in (1, 15, 16, 17, 32, 48, 80) for wide in (1, 16, 80, 112) for limits in LIMITS
    ]
    for _ in range(1500):
        high, wide = (int(2 ** source.uniform(2, 12)) for _ in range(2))
        if max(high, wide) <= 200 * min(high, wide):
            found.append((high, wide, *LIMITS[source.randint(len(LIMITS))]))
    return found
