"""Questions that are heard or seen: spoken ones, pictures, short videos. Drawn from a seed like those in text."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from training.domain import (
    CAUSES,
    COLOURS,
    DIRECTIONS,
    OBJECTS,
    SHAPES,
    Exchange,
    Sample,
    Split,
    adjuster_line,
    article,
    draw,
    number,
    report,
)
from training.pictures import Picture, draw_number, draw_shape, draw_video

MediaKind = Literal["spoken", "picture", "figure", "picture_triage", "video"]
VIDEO_FRAMES = (4, 4, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSample:
    """One question with media. A spoken one has no text of its own: `spoken` is what is said."""

    kind: MediaKind
    question: str
    answer: str
    history: tuple[Exchange, ...] = ()
    spoken: str = ""
    pictures: list[Picture] = field(default_factory=list)

    @property
    def is_video(self) -> bool:
        return self.kind == "video"


def spoken_sample(rng: random.Random, split: Split) -> MediaSample:
    """A question of the domain, to be said. Those with signs or figures are left out: they are read, not said."""
    while True:
        sample: Sample = draw(rng, split)
        if sample.kind != "number" and not any(mark in sample.question for mark in "0123456789+"):
            return MediaSample(
                kind="spoken", question="", answer=sample.answer, history=sample.history, spoken=sample.question
            )


def picture_sample(rng: random.Random, split: Split, kind: MediaKind | None = None) -> MediaSample:
    """A question about a picture or a video. No two pictures are alike, so only numbers are kept apart by split."""
    if kind is None:
        kind = rng.choices(("picture", "figure", "picture_triage", "video"), (0.45, 0.3, 0.13, 0.12))[0]
    colour, shape = rng.choice(COLOURS), rng.choice(SHAPES)
    if kind == "figure":
        return _figure(rng, split)
    if kind == "video":
        way, frames = rng.choice(DIRECTIONS), rng.choice(VIDEO_FRAMES)
        return MediaSample(
            kind=kind,
            question=rng.choice(("what is it doing", "where does it go", "what do you see")),
            answer=f"the {colour} {shape} moves {way}",
            pictures=draw_video(rng, colour, shape, way, frames),
        )
    pictures = [draw_shape(rng, colour, shape)]
    if kind == "picture_triage":
        item, cause = rng.choice(OBJECTS), rng.choice(list(CAUSES))
        return MediaSample(
            kind=kind,
            question=f"triage: {report(rng, item, cause)}",
            answer=adjuster_line(item, cause, f"{colour} {shape}"),
            pictures=pictures,
        )
    return MediaSample(
        kind=kind,
        question=rng.choice(("what is it", "what do you see", "what is in the picture")),
        answer=f"it is {article(colour)} {colour} {shape}",
        pictures=pictures,
    )


def _figure(rng: random.Random, split: Split) -> MediaSample:
    while True:
        value = rng.randint(0, 99) if rng.random() < 0.6 else rng.randint(100, 999)
        words = number(value)
        # Of one word, like eleven: what it looks like can only be known by heart.
        sample = Sample(kind="number", key=words, question="", answer=f"it is {words}", closed=" " not in words)
        if sample.split == split:
            return MediaSample(
                kind="figure",
                question=rng.choice(("what number is it", "what is the number", "what number do you see")),
                answer=sample.answer,
                pictures=[draw_number(rng, value)],
            )
