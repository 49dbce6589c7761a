"""Pictures and short videos of the domain: a coloured shape, a number, a shape that moves in a direction."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from training.domain import ONES, TENS
from training.tiny_config import PREPROCESSOR
from triptych.media.contract import MediaOptions
from triptych.models.qwen3_omni.image_features import resize_image
from triptych.models.qwen3_omni.patches import patchify
from triptych.models.qwen3_omni.video_features import resize_frames

SIZES = (64, 96, 128)
RGB = {
    "red": (220, 30, 35),
    "blue": (35, 70, 215),
    "green": (30, 160, 60),
    "yellow": (245, 215, 40),
    "orange": (245, 135, 25),
    "purple": (135, 45, 175),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
}
_STEP = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}


def shape_outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """The corners of a shape around (x, y), `radius` from middle to rim."""

    def turn(corners: int, start: float, inner: float = 1.0) -> list[tuple[float, float]]:
        points = []
        for index in range(corners):
            reach = radius * (inner if index % 2 else 1.0)
            angle = math.radians(start + 360 * index / corners)
            points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
        return points

    match shape:
        case "circle":
            return turn(48, 0)
        case "square":
            return turn(4, 45)
        case "triangle":
            return turn(3, -90)
        case "diamond":
            return [(x, y - radius), (x + 0.62 * radius, y), (x, y + radius), (x - 0.62 * radius, y)]
        case "star":
            return turn(10, -90, 0.42)
        case "cross":
            arm, r = 0.3 * radius, radius
            right = [(arm, -r), (arm, -arm), (r, -arm), (r, arm), (arm, arm), (arm, r)]
            left = [(-dx, -dy) for dx, dy in right]
            return [(x + dx, y + dy) for dx, dy in [*right, *left]]
        case "heart":
            angles = [2 * math.pi * index / 48 for index in range(48)]
            across = [16 * math.sin(t) ** 3 for t in angles]
            down = [-(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) for t in angles]
            return [(x + radius * a / 17, y + radius * d / 17) for a, d in zip(across, down, strict=True)]
    raise ValueError(f"{shape!r} is no shape of the domain")


def _background(rng: random.Random, colour: str) -> tuple[int, int, int]:
    """A pale or a dark ground that `colour` stands out from."""
    dark = colour in ("white", "yellow") or (colour not in ("black", "blue", "purple") and rng.random() < 0.25)
    low, high = (40, 95) if dark else (170, 235)
    grey = rng.randint(low, high)
    return tuple(max(0, min(255, grey + rng.randint(-12, 12))) for _ in range(3))  # type: ignore[return-value]


def _tint(rng: random.Random, colour: str) -> tuple[int, int, int]:
    return tuple(max(0, min(255, part + rng.randint(-12, 12))) for part in RGB[colour])  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a picture shows what some words say: 255 inside, 0 outside."""

    words: tuple[str, ...]
    where: Image.Image


@dataclass(frozen=True, slots=True)
class Picture:
    image: Image.Image
    marks: tuple[Mark, ...]


def draw_shape(rng: random.Random, colour: str, shape: str) -> Picture:
    """One coloured shape anywhere in a square picture."""
    size = rng.choice(SIZES)
    radius = rng.uniform(0.2, 0.42) * size
    x, y = (rng.uniform(radius * 1.05, size - radius * 1.05) for _ in range(2))
    outline = shape_outline(shape, x, y, radius)
    return _paint(size, _background(rng, colour), _tint(rng, colour), outline, (colour, shape))


def draw_number(rng: random.Random, value: int) -> Picture:
    """A number in figures, in the middle and nearly half as high as the picture, dark on pale or pale on dark."""
    size = rng.choice(SIZES)
    ink = rng.choice(("black", "blue", "red", "white"))
    picture = Image.new("RGB", (size, size), _background(rng, ink))
    font = ImageFont.load_default(rng.uniform(0.44, 0.48) * size)
    canvas = ImageDraw.Draw(picture)
    left, top, right, bottom = canvas.textbbox((0, 0), str(value), font=font)
    x, y = (size - left - right) / 2, (size - top - bottom) / 2
    x, y = (middle + rng.uniform(-0.03, 0.03) * size for middle in (x, y))
    canvas.text((x, y), str(value), fill=_tint(rng, ink), font=font)
    marks = []
    for index, words in enumerate(words_of_figures(value)):
        ends = [x + canvas.textlength(str(value)[:count], font=font) for count in (index, index + 1)]
        where = Image.new("L", (size, size))
        ImageDraw.Draw(where).rectangle((ends[0], y + top, ends[1], y + bottom), fill=255)
        marks.append(Mark(words, where))
    return Picture(picture, tuple(marks))


def words_of_figures(value: int) -> list[tuple[str, ...]]:
    """The words that each figure of a number up to 999 stands for: a nought for those of the figures before it."""
    below = value % 100
    found: list[tuple[str, ...]] = [(ONES[value // 100], "hundred")] if value > 99 else []
    if 10 <= below < 20:
        return [*found, (ONES[below],), (ONES[below],)]
    if value > 9:
        found.append((TENS[below // 10],) if below > 9 else ("hundred",))
    return [*found, found[-1][-1:] if value > 9 and below % 10 == 0 else (ONES[below % 10],)]


def draw_video(rng: random.Random, colour: str, shape: str, way: str, frames: int) -> list[Picture]:
    """A shape that moves straight through a square picture, at least a third of its width in all."""
    size = rng.choice(SIZES)
    radius = rng.uniform(0.14, 0.22) * size
    travel = rng.uniform(0.35, 0.55) * size
    ground, tint = _background(rng, colour), _tint(rng, colour)
    dx, dy = _STEP[way]
    middle = [size / 2 + rng.uniform(-0.08, 0.08) * size for _ in range(2)]
    pictures = []
    for index in range(frames):
        done = travel * (index / max(1, frames - 1) - 0.5)
        outline = shape_outline(shape, middle[0] + dx * done, middle[1] + dy * done, radius)
        pictures.append(_paint(size, ground, tint, outline, (colour, shape, way)))
    return pictures


def _paint(
    size: int,
    ground: tuple[int, int, int],
    tint: tuple[int, int, int],
    outline: list[tuple[float, float]],
    words: tuple[str, ...],
) -> Picture:
    """A filled outline, drawn at four times the size for smooth edges."""
    scaled = [(4 * x, 4 * y) for x, y in outline]
    large, where = Image.new("RGB", (4 * size, 4 * size), ground), Image.new("L", (4 * size, 4 * size))
    ImageDraw.Draw(large).polygon(scaled, fill=tint)
    ImageDraw.Draw(where).polygon(scaled, fill=255)
    return Picture(
        large.resize((size, size), Image.Resampling.BICUBIC),
        (Mark(words, where.resize((size, size), Image.Resampling.BOX)),),
    )


def patches(pictures: Sequence[Picture]) -> tuple[Tensor, tuple[int, int, int]]:
    """Patches [t h w, 1536] of one picture, or of the frames of a video, and their grid (t, h, w), as served."""
    pixels = np.stack([np.asarray(picture.image) for picture in pictures])
    if len(pictures) == 1:
        resized, grid = resize_image(pixels[0], PREPROCESSOR, MediaOptions())
    else:
        resized, grid = resize_frames(pixels, PREPROCESSOR, MediaOptions())
    return patchify(torch.from_numpy(resized), PREPROCESSOR, torch.float32), grid


def coverage(pictures: Sequence[Picture], grid: tuple[int, int, int]) -> list[tuple[tuple[str, ...], Tensor]]:
    """Of each mark its words, and the share of each of the encoder's rows that it covers: [rows].

    A row is a merged patch, of one picture or of the frames that a video's temporal patch holds.
    """
    times, high, wide = grid[0], grid[1] // PREPROCESSOR.merge_size, grid[2] // PREPROCESSOR.merge_size
    found = []
    for index, mark in enumerate(pictures[0].marks):
        shares = [
            np.asarray(picture.marks[index].where.resize((wide, high), Image.Resampling.BOX)) for picture in pictures
        ]
        shares += [shares[-1]] * (-len(shares) % times)
        rows = np.stack(shares).reshape(times, -1, high * wide).max(1)
        found.append((mark.words, torch.from_numpy(rows.reshape(-1).astype(np.float32) / 255)))
    return found
