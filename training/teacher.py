"""The teacher's voices: sentences spoken by flite, as 24 kHz waveforms of whole codec frames."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soxr
from numpy.typing import NDArray

SAMPLE_RATE = 24_000
FRAME = 1920  # samples of one codec frame
# The checkpoint's name of a voice -> flite's.
VOICES = {"rms": "rms", "slt": "slt"}
_NATIVE_RATE = 16_000
_LEAD, _TAIL = 0.06, 0.16  # seconds kept before the first and behind the last sound
_LOUD = 0.01
_GAIN = {"rms": 1.8, "slt": 0.95}  # to about the same loudness, peaks below one

Waveform = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Speech:
    """24 kHz samples in [-1, 1], whole frames; each phone that flite said, with the second at which it ends."""

    samples: Waveform
    phones: list[tuple[str, float]]


def speak(sentence: str, voice: str) -> Speech:
    """One sentence, silence around it trimmed, padded to whole frames.

    Raises ValueError for an unknown voice and RuntimeError where flite is missing, fails or says nothing.
    """
    if voice not in VOICES:
        raise ValueError(f"voice {voice!r} is not one of {', '.join(VOICES)}")
    if shutil.which("flite") is None:
        raise RuntimeError("flite is not installed; on Debian: apt-get install flite")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        command = ["flite", "-voice", VOICES[voice], "-psdur", "-t", sentence, "-o", str(path)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        native = read_waveform(path, _NATIVE_RATE)
    sounding = np.flatnonzero(np.abs(native) > _LOUD)
    if not len(sounding):
        raise RuntimeError(f"flite said nothing for {sentence!r}")
    start = max(0, sounding[0] - int(_LEAD * _NATIVE_RATE))
    end = sounding[-1] + int(_TAIL * _NATIVE_RATE)
    speech = soxr.resample(native[start:end], _NATIVE_RATE, SAMPLE_RATE, quality="HQ")
    speech = np.clip(speech * _GAIN[voice], -1, 1).astype(np.float32)
    phones = [
        (phone, round(float(second) - start / _NATIVE_RATE, 3))
        for phone, _, second in (entry.partition(":") for entry in said.split())
    ]
    return Speech(np.pad(speech, (0, -len(speech) % FRAME)), phones)


def read_waveform(path: Path, rate: int) -> Waveform:
    """Samples of a mono 16-bit file. Raises RuntimeError for one of another rate or more channels."""
    with wave.open(str(path)) as file:
        if file.getframerate() != rate or file.getnchannels() != 1:
            raise RuntimeError(f"{path} has {file.getframerate()} Hz, {file.getnchannels()} channels")
        return np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16).astype(np.float32) / 32768


def write_waveform(target: str | BinaryIO, samples: Waveform) -> None:
    """A mono 16-bit WAV file at 24 kHz, by its path or where `target` stands."""
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(np.round(np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
