"""Spoken answers can be referred to until they expire, and no longer."""

from __future__ import annotations

import pytest

from triptych.errors import RequestError
from triptych.server.transcripts import ENTRY_CHARACTERS, Transcripts


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_answer_is_found_until_it_expires() -> None:
    clock = Clock()
    kept = Transcripts(now=clock)
    kept.keep("audio_1", "Hello.", clock.now + 10)
    kept.keep("audio_2", "", clock.now + 20)
    assert kept.find("audio_1", "messages.1.audio.id") == "Hello." and kept.find("audio_2", "x") == ""
    clock.now += 10
    for audio_id in ("audio_1", "audio_3"):
        with pytest.raises(RequestError, match=f"there is no audio '{audio_id}'") as caught:
            kept.find(audio_id, "messages.1.audio.id")
        assert caught.value.param == "messages.1.audio.id" and caught.value.code == "audio_not_found"
    assert kept.find("audio_2", "x") == ""


def test_the_oldest_make_room_and_what_expired_goes_first() -> None:
    clock = Clock()
    kept = Transcripts(most_characters=2 * (ENTRY_CHARACTERS + 100), now=clock)
    for number in range(3):
        kept.keep(f"audio_{number}", "x" * 100, clock.now + 10)
    with pytest.raises(RequestError):
        kept.find("audio_0", "x")
    assert kept.find("audio_1", "x") == kept.find("audio_2", "x") == "x" * 100
    clock.now += 10
    kept.keep("audio_3", "y" * 200, clock.now + 10)
    assert kept.find("audio_3", "x") == "y" * 200
    kept.keep("audio_4", "z" * 1000, clock.now + 10)  # more than there is room for
    with pytest.raises(RequestError):
        kept.find("audio_4", "x")
