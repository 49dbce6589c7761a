"""The teacher's speech at the codec's pace: where words and pauses begin and end."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from training.pace import LEAD, TAIL, speak_in_frames, time_map
from training.teacher import FRAME, SAMPLE_RATE

# "we are": a pause, two words of two phones and one, a pause.
ENDS, OWNERS = (0.05, 0.16, 0.27, 0.39, 0.62), (None, 0, 0, 1, None)


def test_words_last_whole_frames_and_quiet_around_them_is_of_one_length() -> None:
    source, target = time_map(ENDS, OWNERS)
    assert source == pytest.approx([-0.03, 0.05, 0.27, 0.39, 0.55])
    assert target == [0, LEAD, LEAD + 3, LEAD + 5, LEAD + 5 + TAIL]


def test_a_sentence_without_pauses_gets_quiet_around_it() -> None:
    source, target = time_map(ENDS[1:4], OWNERS[1:4])
    assert source == pytest.approx([-0.08, 0.0, 0.27, 0.39, 0.55])
    assert target[0] == 0 and target[1] == LEAD and target[-1] - target[-2] == TAIL


def test_the_shortest_word_has_a_frame() -> None:
    _, target = time_map((0.08, 0.1, 0.5, 0.6), (None, 0, 1, None))
    assert target[2] - target[1] == 1


def test_a_pause_between_words_is_kept_as_one() -> None:
    source, target = time_map((0.08, 0.3, 0.45, 0.7, 0.8), (None, 0, None, 1, None))
    assert len(source) == len(target) == 6
    assert target[3] - target[2] == 2  # 0.15 s of quiet


@pytest.mark.skipif(
    shutil.which("flite") is None or shutil.which("rubberband") is None, reason="flite or rubberband is not installed"
)
def test_speech_is_whole_frames_and_its_words_begin_with_one() -> None:
    speech = speak_in_frames("seven plus two is nine", "rms")
    assert len(speech.samples) % FRAME == 0
    assert np.abs(speech.samples[:1600]).max() < 0.02  # quiet, but for the last hundredth of a second
    seconds = FRAME / SAMPLE_RATE
    starts = [before for (_, before), (phone, _) in zip(speech.phones, speech.phones[1:], strict=False) if phone == "p"]
    assert starts[0] / seconds == pytest.approx(round(starts[0] / seconds), abs=0.02)
    assert speech.phones[-1][1] == pytest.approx(len(speech.samples) / SAMPLE_RATE, abs=0.3)
