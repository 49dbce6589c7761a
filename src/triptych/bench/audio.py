"""Reading the audio of a reply as it comes: its seconds, and whether it can be heard.

Three shapes are read: raw 16-bit PCM; one WAV file in pieces; a whole WAV file in each piece.
"""

from __future__ import annotations

import math
import struct

import numpy as np

SAMPLE_RATE = 24_000  # of PCM without a header: the rate of OpenAI's `pcm16`
FRAMES_PER_S = 12.5  # codec frames in a second of Qwen3-Omni's speech
SILENT_RMS = 1e-3  # of full scale, -60 dB
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


def speech_samples(frames: int) -> int:
    """Samples of a reply of so many codec frames: 1920 each, less what the vocoder trims at the start of a stream."""
    return 1920 * frames - 555


class AudioReader:
    """Counts samples and their power; keeps none of them."""

    def __init__(self, sample_rate: int = SAMPLE_RATE) -> None:
        self.sample_rate = sample_rate
        self._channels = 1
        self._dtype = np.dtype("<i2")
        self._rest = b""  # bytes of a sample that is not complete yet
        self._samples = 0
        self._power = 0.0

    @property
    def rms(self) -> float:
        """Root mean square of all samples so far, 1.0 is full scale."""
        return math.sqrt(self._power / self._samples) if self._samples else 0.0

    @property
    def silent(self) -> bool:
        return self.rms < SILENT_RMS

    def feed(self, data: bytes) -> float:
        """Seconds of audio in the next piece. Raises ValueError for a WAV header that it cannot read."""
        if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
            data = self._open(data)
        data = self._rest + data
        frame = self._dtype.itemsize * self._channels
        whole = len(data) - len(data) % frame
        self._rest = data[whole:]
        samples = np.frombuffer(data, self._dtype, whole // self._dtype.itemsize).astype(np.float64)
        if self._dtype.kind == "i":
            samples /= 32768
        # Not `samples @ samples`: threads of NumPy's BLAS wait for more by spinning, on cores that the server needs.
        self._power += float(np.square(samples).sum())
        self._samples += samples.size
        return whole / frame / self.sample_rate

    def _open(self, data: bytes) -> bytes:
        """Read the header of a WAV file; what follows it. Raises ValueError."""
        self._rest = b""
        at = 12
        while at + 8 <= len(data):
            name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
            at += 8
            if name == b"fmt ":
                self._format(data[at : at + size])
            if name == b"data":
                # A stream whose length was not known when it began says 0 or the largest number.
                return data[at : at + size] if size else data[at:]
            at += size + size % 2
        raise ValueError("a WAV header without data")

    def _format(self, header: bytes) -> None:
        if len(header) < 16:
            raise ValueError("a WAV header that is cut short")
        tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", header)
        if tag == _EXTENSIBLE and len(header) >= 26:
            tag = int.from_bytes(header[24:26], "little")
        if (tag, bits) not in ((_PCM, 16), (_FLOAT, 32)) or not channels or not rate:
            raise ValueError(f"a WAV of format {tag}, {bits} bits, {channels} channels at {rate} Hz")
        self._dtype = np.dtype("<i2" if tag == _PCM else "<f4")
        self._channels, self.sample_rate = channels, rate
