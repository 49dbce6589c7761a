"""What the codec hears in a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from training.speech_store import build_store
from training.teacher import FRAME, Speech
from training.train_codec import FRAMES, LEAD, Crops


def test_crops_begin_with_their_utterance_or_lead_up_to_what_is_heard(tmp_path: Path) -> None:
    """A decoder that starts in the middle of speech is nothing that anybody will hear."""

    def speak(sentence: str, voice: str) -> Speech:
        return Speech(np.full(FRAME * (30 + len(sentence)), 0.5, dtype=np.float32), [])

    store = build_store(tmp_path / "speech", [("a" * length, "slt") for length in range(1, 9)], speak)
    crops, leads = Crops([store], closed=0.0), []
    for step in range(40):
        _, waveform, places, lead = crops.batch(step)
        firsts = {first for _, first in places}
        assert waveform.shape[1] == FRAMES * FRAME
        assert firsts == {0} if lead == 0 else max(firsts) > 0
        leads.append(lead)
    assert set(leads) == {0, LEAD} and 4 < leads.count(0) < 20
