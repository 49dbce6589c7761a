"""Any audio to the one thing that the encoder hears: mono float32 at 16 kHz.

As `librosa.load(sr=16000)` does it: integers are divided by their full scale, channels are averaged, the rate is
changed by soxr's high quality, and the result has ceil(samples * 16000 / rate) samples. All of it happens while
decoding, so that a small file that decodes to hours costs no more than the limit.

The first audio stream is heard. Priming samples and edit lists are left out as the container says. A file that ends
early is used as far as it goes where such files are written to be cut anywhere (MP3, AAC, Ogg, WebM, MPEG, FLV), and
damaged packets in it are skipped as a radio skips them; a file whose header promises more than there is (WAV, FLAC,
MP4) is refused, because its sender has lost a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import soxr

from triptych.errors import RequestError
from triptych.media.container import decode, is_cut_off, open_container, packets, prepare
from triptych.media.contract import HIGHEST_RATE
from triptych.media.sniff import FileType

SAMPLE_RATE = 16000
_BLOCK = 1 << 16  # samples that are resampled at a time

Samples = npt.NDArray[np.float32]
Progress = Callable[[int], None]  # told the number of samples so far, at 16 kHz; may raise


class Mono16k:
    """Takes audio of changing rate, piece by piece, and makes 16 kHz of it."""

    def __init__(self, on_progress: Progress) -> None:
        self._on_progress = on_progress
        self._done: list[Samples] = []
        self._waiting: list[Samples] = []
        self._num_waiting = 0
        self._rate = 0
        self._resampler: soxr.ResampleStream | None = None
        self._num_in = 0  # samples since the rate last changed
        self._num_out = 0
        self.num_samples = 0
        self.seconds = 0.0  # of what came in

    def add(self, samples: Samples, rate: int) -> None:
        if rate != self._rate:
            self._finish_rate()
            self._rate = rate
            self._resampler = (
                None if rate == SAMPLE_RATE else soxr.ResampleStream(rate, SAMPLE_RATE, 1, "float32", "HQ")
            )
        self._waiting.append(samples)
        self._num_waiting += len(samples)
        self.seconds += len(samples) / rate
        if self._num_waiting >= _BLOCK:
            self._resample(last=False)

    def finish(self) -> Samples:
        self._finish_rate()
        return np.concatenate(self._done) if self._done else np.zeros(0, np.float32)

    def _finish_rate(self) -> None:
        if self._rate == 0:
            return
        self._resample(last=True)
        wanted = math.ceil(self._num_in * SAMPLE_RATE / self._rate)
        if self._num_out < wanted:
            self._append(np.zeros(wanted - self._num_out, np.float32))
        elif self._num_out > wanted:
            self._done[-1] = self._done[-1][: len(self._done[-1]) - (self._num_out - wanted)]
            self.num_samples -= self._num_out - wanted
        self._num_in = self._num_out = 0

    def _resample(self, last: bool) -> None:
        block = np.concatenate(self._waiting) if self._waiting else np.zeros(0, np.float32)
        if not np.isfinite(block).all():
            raise RequestError("the audio has samples that are not numbers (NaN or infinite): send finite samples")
        self._waiting, self._num_waiting = [], 0
        self._num_in += len(block)
        self._append(block if self._resampler is None else self._resampler.resample_chunk(block, last=last))

    def _append(self, samples: Samples) -> None:
        self._done.append(samples)
        self._num_out += len(samples)
        self.num_samples += len(samples)
        self._on_progress(self.num_samples)


def decode_audio(
    data: bytes, file: FileType, *, max_s: float, on_progress: Progress = lambda _: None
) -> Samples | None:
    """The first audio stream of a file as float32 [samples] at 16 kHz, or None where the file has no sound.

    `on_progress` hears how many samples there are so far and may raise to stop. Raises RequestError (without its
    `param`) when the audio is longer than `max_s`, damaged, cut off or not finite.
    """

    def check(num_samples: int) -> None:
        if num_samples > max_s * SAMPLE_RATE:
            raise RequestError(
                f"the audio is longer than {max_s:g} seconds, the limit 'media.max_audio_s': send a shorter clip"
            )
        on_progress(num_samples)

    mono = Mono16k(check)
    with open_container(data, file) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        prepare(stream, file)
        num_packets = 0
        for packet in packets(container, stream, file):
            num_packets += packet.size > 0
            for frame in decode(packet, stream, file):
                if not 0 < frame.sample_rate <= HIGHEST_RATE:
                    raise RequestError(
                        f"the audio has a sampling rate of {frame.sample_rate} Hz: it may be 1 to {HIGHEST_RATE} Hz; "
                        "send the clip at another rate"
                    )
                mono.add(to_mono(frame), frame.sample_rate)
        samples = mono.finish()
        if num_packets and not len(samples):
            raise RequestError(
                f"this {file.name} file is damaged or cut off: no sound can be decoded "
                f"({stream.codec_context.name}, {num_packets} packets)"
            )
        if is_cut_off(data, stream, file, mono.seconds):
            raise RequestError(
                f"this {file.name} file is cut off: its header promises more than the {mono.seconds:.2f} seconds that "
                "are there; send the whole file"
            )
    return samples


def to_mono(frame: Any) -> Samples:
    """The mean over the channels of an `av.AudioFrame`, in [-1, 1]: float32 [samples]."""
    channels = frame.layout.nb_channels
    raw: npt.NDArray[Any] = frame.to_ndarray()
    if not frame.format.is_planar:
        raw = raw.reshape(-1, channels).T
    samples = to_float(raw)
    mono: Samples = samples.mean(axis=0, dtype=np.float32) if channels > 1 else samples[0]
    return mono


def to_float(samples: npt.NDArray[Any]) -> Samples:
    """Integers divided by their full scale, 2**15 for int16, so that the lowest becomes -1; unsigned bytes are centred
    on 128 first. Floats as they are."""
    if samples.dtype == np.uint8:
        return ((samples.astype(np.float32) - 128) / 128).astype(np.float32)
    if samples.dtype.kind == "i":
        return (samples / np.float64(2 ** (8 * samples.dtype.itemsize - 1))).astype(np.float32)
    return samples.astype(np.float32)
