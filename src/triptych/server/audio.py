"""Audio on the wire: from float samples to the six formats of OpenAI's API, whole or streamed.

An encoder takes the samples of one reply in order and returns the bytes that are ready so far. `blocking` ones compute
for more than a moment (PyAV) and belong on a worker thread. PyAV is imported when the first of them is asked for.
"""

from __future__ import annotations

import functools
import io
import struct
import threading
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

AudioFormat = Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"]
FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)
WAV_HEADER_BYTES = 44
_UNKNOWN_SIZE = 0xFFFFFFFF  # what a WAV header says while the length is not known, as in OpenAI's streams


class Encoder(Protocol):
    """One reply's audio. `encode` and `finish` return b"" when nothing is ready; `finish` is called once, last.

    `close` gives up what the encoder holds, at any time and from any thread. Idempotent; nothing is encoded after it.
    """

    blocking: bool

    def encode(self, samples: NDArray[np.float32]) -> bytes:
        """Take the next mono samples, in [-1, 1] (anything louder is clipped)."""

    def finish(self) -> bytes:
        """The bytes that were still held back."""

    def close(self) -> None: ...


class _Codec:
    """How PyAV writes a format: encoder name, container, bit rate (bit/s), container options for a stream."""

    def __init__(self, encoder: str, container: str, bit_rate: int, options: dict[str, str]) -> None:
        self.encoder, self.container, self.bit_rate, self.options = encoder, container, bit_rate, options


_SAME_BYTES = {"fflags": "+bitexact"}  # else FFmpeg draws a random number for each Ogg stream
_CODECS: dict[str, _Codec] = {
    "flac": _Codec("flac", "flac", 0, {}),
    "mp3": _Codec("libmp3lame", "mp3", 96_000, {"write_xing": "0", "id3v2_version": "0"}),
    "opus": _Codec("libopus", "ogg", 64_000, {"page_duration": "100000", "flush_packets": "1"}),
    "aac": _Codec("aac", "adts", 96_000, {}),
}


@functools.cache
def encodable(audio_format: AudioFormat) -> bool:
    """Whether this build can write the format: the compressed ones need their encoder in PyAV's FFmpeg."""
    if audio_format not in _CODECS:
        return True
    import av

    try:
        av.codec.Codec(_CODECS[audio_format].encoder, "w")
    except av.codec.codec.UnknownCodecError:
        return False
    return True


def make_encoder(audio_format: AudioFormat, *, streaming: bool, sample_rate: int = 24000) -> Encoder:
    """An encoder for one reply. With `streaming` bytes come as soon as they can; else `finish` gives the whole file,
    its header complete. `pcm16` has no header to wait for. Raises ValueError for a format that is not `encodable`."""
    if not encodable(audio_format):
        raise ValueError(f"this build has no {_CODECS[audio_format].encoder} encoder for {audio_format!r}")
    match audio_format:
        case "pcm16":
            return PCMEncoder()  # complete after every piece
        case "wav" if streaming:
            return StreamedWAVEncoder(sample_rate)
        case "wav":
            return _WholeWAVEncoder(sample_rate)
        case _:
            return CompressedEncoder(_CODECS[audio_format], streaming=streaming, sample_rate=sample_rate)


def pcm16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    """Float samples in [-1, 1] as signed 16-bit, little endian."""
    scaled: NDArray[np.float32] = np.rint(np.clip(samples, -1.0, 1.0) * np.float32(32767.0))
    return scaled.astype(np.dtype("<i2"))


def wav_header(num_bytes: int | None, *, sample_rate: int) -> bytes:
    """The 44 bytes before `num_bytes` of mono 16-bit samples; None where the length is not known yet."""
    data = _UNKNOWN_SIZE if num_bytes is None else num_bytes
    riff = _UNKNOWN_SIZE if num_bytes is None else num_bytes + WAV_HEADER_BYTES - 8
    fields = (16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)  # size, PCM, mono, rate, bytes/s, bytes/sample, bits
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", b"fmt ", *fields, b"data", data)


class PCMEncoder:
    """Raw signed 16-bit little-endian samples, mono."""

    blocking = False

    def encode(self, samples: NDArray[np.float32]) -> bytes:
        return pcm16(samples).tobytes()

    def finish(self) -> bytes:
        return b""

    def close(self) -> None:
        """It holds nothing."""


class StreamedWAVEncoder:
    """One header with placeholder sizes before the first samples, then raw samples: the pieces join to one file."""

    blocking = False

    def __init__(self, sample_rate: int) -> None:
        self._header = wav_header(None, sample_rate=sample_rate)

    def encode(self, samples: NDArray[np.float32]) -> bytes:
        return self._take_header() + pcm16(samples).tobytes()

    def finish(self) -> bytes:
        return self._take_header()  # a reply without any audio is still a valid, empty file

    def close(self) -> None:
        """It holds nothing."""

    def _take_header(self) -> bytes:
        header, self._header = self._header, b""
        return header


class _WholeWAVEncoder:
    """Holds everything back until the end, when the header can tell how much there is."""

    blocking = False

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate = sample_rate
        self._parts: list[bytes] = []

    def encode(self, samples: NDArray[np.float32]) -> bytes:
        self._parts.append(pcm16(samples).tobytes())
        return b""

    def finish(self) -> bytes:
        body = b"".join(self._parts)
        return wav_header(len(body), sample_rate=self._sample_rate) + body

    def close(self) -> None:
        self._parts.clear()


class _Sink:
    """A file that PyAV can only append to, so no muxer ever goes back to patch its header."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


class CompressedEncoder:
    """FLAC, MP3, Opus in Ogg or AAC in ADTS through PyAV. Less than 80 ms is filled up with silence: these formats have
    no file of a few samples, or none, that every player accepts."""

    blocking = True

    def __init__(self, codec: _Codec, *, streaming: bool, sample_rate: int) -> None:
        import av

        self._frame_type = av.AudioFrame
        self._rate = sample_rate
        self._sink: Any = _Sink() if streaming else io.BytesIO()
        options = _SAME_BYTES | (codec.options if streaming else {})
        self._container = av.open(self._sink, "w", format=codec.container, options=options)
        self._stream = self._container.add_stream(codec.encoder, rate=sample_rate, layout="mono")
        if codec.bit_rate:
            self._stream.bit_rate = codec.bit_rate
        self._num_samples = 0
        self._turn, self._closed = threading.Lock(), False  # a reply may be given up while a thread encodes it

    def encode(self, samples: NDArray[np.float32]) -> bytes:
        with self._turn:
            if self._closed:
                return b""
            self._write(samples)
            return self._take()

    def finish(self) -> bytes:
        with self._turn:
            if not self._closed:
                self._write(np.zeros(max(0, self._rate * 80 // 1000 - self._num_samples), np.float32))
                self._container.mux(self._stream.encode(None))
        self.close()
        return self._sink.getvalue() if isinstance(self._sink, io.BytesIO) else self._take()

    def close(self) -> None:
        """Until then FFmpeg holds megabytes and threads, which Python's collector finds late."""
        with self._turn:
            if not self._closed:
                self._closed = True
                self._container.close()

    def _write(self, samples: NDArray[np.float32]) -> None:
        if samples.size:
            frame = self._frame_type.from_ndarray(pcm16(samples).reshape(1, -1), format="s16", layout="mono")
            frame.sample_rate = self._rate
            frame.pts = self._num_samples
            self._num_samples += samples.size
            self._container.mux(self._stream.encode(frame))

    def _take(self) -> bytes:
        return self._sink.take() if isinstance(self._sink, _Sink) else b""
