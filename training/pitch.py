"""The pitch of a voice, which tells the two voices apart."""

from __future__ import annotations

import numpy as np

from training.teacher import SAMPLE_RATE, Waveform

LOWER_VOICE, HIGHER_VOICE = "ethan", "chelsie"
_BOUNDARY = 135  # Hz, between the two teachers': about 101 and 174
_LOWEST, _HIGHEST = 70, 300  # Hz
_WINDOW, _HOP = 1200, 600
_QUIET = 1e-3  # energy per sample
_VOICED = 0.4  # correlation of a voiced window with itself, one period later


def pitch(waveform: Waveform) -> float:
    """The median pitch of the voiced windows in Hz, by autocorrelation; 0 where nothing is voiced."""
    shortest, longest = SAMPLE_RATE // _HIGHEST, SAMPLE_RATE // _LOWEST
    found = []
    for start in range(0, len(waveform) - _WINDOW, _HOP):
        window = waveform[start : start + _WINDOW] - waveform[start : start + _WINDOW].mean()
        energy = float(window @ window)
        if energy < _WINDOW * _QUIET:
            continue
        correlation = np.correlate(window, window, "full")[_WINDOW - 1 :]
        lag = shortest + int(correlation[shortest:longest].argmax())
        if correlation[lag] > _VOICED * energy:
            found.append(SAMPLE_RATE / lag)
    return float(np.median(found)) if found else 0.0


def voice_of(waveform: Waveform) -> str:
    """Which of the two voices speaks."""
    return LOWER_VOICE if pitch(waveform) < _BOUNDARY else HIGHER_VOICE
