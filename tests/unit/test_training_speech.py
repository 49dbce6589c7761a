"""What the speech data holds: answers known by heart, and those given often, in every voice."""

from __future__ import annotations

from pathlib import Path

import pytest

from training import speech
from training.domain import SMALL_TALK, SPOKEN_WORDS, Sample, samples
from training.phrasing import UNKNOWN
from training.teacher import VOICES


def test_answers_known_by_heart_are_spoken_in_every_voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(speech, "build_store", lambda folder, pairs, speak: asked.extend(pairs))
    speech.by_heart_store(tmp_path)
    answers = {exchange.answer for exchange in SMALL_TALK} | {UNKNOWN}
    assert sorted(asked) == sorted((answer, voice) for answer in answers for voice in VOICES)


def test_answers_given_often_are_spoken_in_every_voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(speech, "build_store", lambda folder, pairs, speak: asked.extend(pairs))
    monkeypatch.setattr(speech, "DRAWS", 1000)
    speech.common_store(tmp_path)
    drawn = [sample.answer for sample in samples(1000, "train")]
    answers = {answer for answer in drawn if drawn.count(answer) >= 3} - set(speech.BY_HEART)
    assert answers and sorted(asked) == sorted((answer, voice) for answer in answers for voice in VOICES)


def test_lists_are_different_words_in_any_order_that_are_not_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "LISTS", 300)
    found = speech.word_lists()
    assert found == speech.word_lists() and len(set(found)) == 300
    for words in found:
        assert 3 <= len(words.split()) <= 12 and set(words.split()) <= set(SPOKEN_WORDS)
        assert Sample(kind="repeat", key=words, question="", answer=words).split == "train"
