"""What was said in spoken answers, so that later messages can refer to it by `audio.id`."""

from __future__ import annotations

import time
from collections.abc import Callable

from triptych.errors import RequestError

MOST_CHARACTERS = 16 * 1024**2  # of all transcripts together; the oldest go first
ENTRY_CHARACTERS = 256  # what an entry costs beside its text


class Transcripts:
    """The text of spoken answers by audio id, each until it expires or makes room for newer ones."""

    def __init__(self, most_characters: int = MOST_CHARACTERS, now: Callable[[], float] = time.time) -> None:
        self._most = most_characters
        self._now = now
        self._texts: dict[str, tuple[float, str]] = {}  # in the order they were kept
        self._held = 0

    def keep(self, audio_id: str, text: str, expires_at: float) -> None:
        """Remember an answer until `expires_at`, in Unix seconds."""
        self._texts[audio_id] = (expires_at, text)
        self._held += len(text) + ENTRY_CHARACTERS
        now = self._now()
        while self._texts:
            oldest, (expires, old) = next(iter(self._texts.items()))
            if self._held <= self._most and expires > now:
                return
            del self._texts[oldest]
            self._held -= len(old) + ENTRY_CHARACTERS

    def find(self, audio_id: str, param: str) -> str:
        """The text of an answer. Raises RequestError, with `param`, for an id that is not or no longer known."""
        expires_at, text = self._texts.get(audio_id, (0.0, ""))
        if expires_at <= self._now():
            raise RequestError(
                f"there is no audio {audio_id!r:.80}: it has expired, made room for newer, or never was; send its "
                "transcript as the message's content",
                param,
                "audio_not_found",
            )
        return text
