"""A corpus of media files, made anew from fixed seeds: what people send, what is broken and what is made to harm."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from tests.corpus.audio import audio_files
from tests.corpus.file import CorpusFile, picture
from tests.corpus.hostile import hostile_files
from tests.corpus.images import image_files
from tests.corpus.video import video_files
from triptych.config.schema import MediaConfig

# What the corpus is made for: every good file is within these, the bad ones that exceed a limit exceed one of these.
LIMITS = MediaConfig(max_bytes=4_000_000, max_audio_s=305.0, max_video_s=200.0, max_image_pixels=100_000_000)


def corpus(folder: Path) -> list[CorpusFile]:
    """Write every file below `folder`; names are unique. The same files each time, given the same libraries."""
    cover = io.BytesIO()
    Image.fromarray(picture("cover", 64, 64)[0]).save(cover, "PNG")
    good = [
        *audio_files(folder / "audio", cover.getvalue()),
        *image_files(folder / "images"),
        *video_files(folder / "video"),
    ]
    return good + list(hostile_files(folder / "hostile", {file.name: file.path for file in good}))
