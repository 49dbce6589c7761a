"""Every format decodes to the audio that went in, however it is cut, and its first bytes say what it is."""

from __future__ import annotations

import io
import os
import struct
import wave
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from triptych.server import audio
from triptych.server.audio import FORMATS, AudioFormat, encodable, make_encoder, pcm16

RATE = 24000
COMPRESSED: tuple[AudioFormat, ...] = ("flac", "mp3", "opus", "aac")
MP3_DELAY = 1105  # samples of silence that encoding and decoding put before the audio
MAGIC = {"wav": (b"RIFF",), "flac": (b"fLaC",), "opus": (b"OggS",), "mp3": (b"ID3", b"\xff\xf3"), "aac": (b"\xff\xf1",)}


def tone(seconds: float) -> NDArray[np.float32]:
    time = np.arange(int(seconds * RATE)) / RATE
    return (0.5 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)


def encode(audio_format: AudioFormat, samples: NDArray[np.float32], *, streaming: bool, cut: int = 1920) -> list[bytes]:
    encoder = make_encoder(audio_format, streaming=streaming)
    chunks = [samples[:1365], *(samples[start : start + cut] for start in range(1365, len(samples), cut))]
    return [encoder.encode(chunk) for chunk in chunks] + [encoder.finish()]


def decode(data: bytes) -> NDArray[np.float32]:
    """All samples at 24 kHz; PyAV is the judge of whether the file is valid."""
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    container: Any = av.open(io.BytesIO(data))
    frames = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
    frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray()[0] for frame in frames] or [np.zeros(0, np.float32)])


def test_samples_round_to_the_nearest_and_clip() -> None:
    samples = np.array([0.0, 1.0, -1.0, 2.0, -3.0, 0.5, 1 / 32767], np.float32)
    assert pcm16(samples).tolist() == [0, 32767, -32767, 32767, -32767, 16384, 1]


def test_raw_samples_are_little_endian_and_joined_pieces_equal_the_whole() -> None:
    samples = tone(0.5)
    whole = encode("pcm16", samples, streaming=False)
    pieces = encode("pcm16", samples, streaming=True, cut=777)
    assert b"".join(whole) == b"".join(pieces) == pcm16(samples).astype("<i2").tobytes()
    assert all(len(piece) % 2 == 0 for piece in pieces)


def test_whole_wav_has_the_right_sizes() -> None:
    samples = tone(0.5)
    (data,) = [piece for piece in encode("wav", samples, streaming=False) if piece]
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        assert file.readframes(file.getnframes()) == pcm16(samples).tobytes()
    assert struct.unpack_from("<I", data, 4)[0] == len(data) - 8


def test_streamed_wav_is_one_placeholder_header_and_then_the_same_samples() -> None:
    samples = tone(0.5)
    pieces = encode("wav", samples, streaming=True)
    joined = b"".join(pieces)
    whole = encode("wav", samples, streaming=False)[-1]
    assert joined.count(b"RIFF") == 1 and joined[44:] == whole[44:]
    assert struct.unpack_from("<I", joined, 4) == struct.unpack_from("<I", joined, 40) == (0xFFFFFFFF,)
    assert len(pieces[0]) == 44 + 2 * 1365 and len(pieces[1]) == 2 * 1920
    assert np.abs(decode(joined) - samples).max() < 1e-4


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("audio_format", COMPRESSED)
def test_compressed_audio_decodes_to_the_tone(audio_format: AudioFormat, streaming: bool) -> None:
    samples = tone(1.5)
    pieces = encode(audio_format, samples, streaming=streaming)
    data = b"".join(pieces)
    assert data.startswith(MAGIC[audio_format])
    heard = decode(data)
    assert abs(len(heard) - len(samples)) <= 0.12 * RATE  # encoders pad to whole frames and add their delay
    middle = heard[RATE // 2 : RATE]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert abs(int(spectrum.argmax()) * RATE / len(middle) - 440) < 3
    assert 0.3 < float(np.sqrt(2 * np.mean(middle**2))) < 0.7
    assert streaming or not any(pieces[:-1])


@pytest.mark.parametrize("audio_format", COMPRESSED)
def test_compressed_audio_leaves_before_the_end(audio_format: AudioFormat) -> None:
    pieces = encode(audio_format, tone(3.0), streaming=True)
    early = sum(map(len, pieces[: len(pieces) // 2]))
    assert early > 0.25 * sum(map(len, pieces))


@pytest.mark.parametrize("streaming", [False, True])
def test_flac_is_lossless(streaming: bool) -> None:
    samples = tone(0.3)
    data = b"".join(encode("flac", samples, streaming=streaming))
    assert np.array_equal(np.rint(decode(data) * 32768).astype(np.int16), pcm16(samples))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("audio_format", FORMATS)
def test_the_same_samples_are_the_same_bytes_however_they_are_cut(audio_format: AudioFormat, streaming: bool) -> None:
    first, second = (encode(audio_format, tone(0.7), streaming=streaming, cut=cut) for cut in (1920, 5003))
    assert b"".join(first) == b"".join(second)


@pytest.mark.parametrize("audio_format", FORMATS)
def test_streamed_equals_whole_as_far_as_the_docs_say(audio_format: AudioFormat) -> None:
    samples = tone(0.7)
    streamed, whole = (b"".join(encode(audio_format, samples, streaming=streaming)) for streaming in (True, False))
    assert (streamed == whole) == (audio_format in ("pcm16", "aac"))
    if audio_format == "pcm16":
        return
    heard, expected = decode(streamed), decode(whole)
    if audio_format == "mp3":  # no header says where the audio begins and ends between the encoder's padding
        assert len(expected) == len(samples) and len(heard) % 576 == 0
        heard = heard[MP3_DELAY : MP3_DELAY + len(samples)]
    assert np.array_equal(heard, expected)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("audio_format", FORMATS)
@pytest.mark.parametrize("num_samples", [0, 1, 555])
def test_almost_no_audio_is_still_a_valid_file(audio_format: AudioFormat, streaming: bool, num_samples: int) -> None:
    data = b"".join(encode(audio_format, tone(1.0)[:num_samples], streaming=streaming))
    if audio_format == "pcm16":
        assert len(data) == 2 * num_samples
    elif audio_format == "wav":
        assert len(decode(data) if num_samples else b"") == num_samples and len(data) == 44 + 2 * num_samples
    else:
        assert 0 < len(decode(data)) < RATE // 4


def test_an_abandoned_encoder_holds_no_threads() -> None:
    before = len(os.listdir("/proc/self/task"))
    for audio_format in FORMATS:
        for _ in range(10):
            encoder = make_encoder(audio_format, streaming=True)
            encoder.encode(tone(0.2))
            encoder.close()
            encoder.close()
            assert encoder.encode(tone(0.1)) == b"" or audio_format in ("pcm16", "wav")
    assert len(os.listdir("/proc/self/task")) <= before


def test_an_encoder_is_closed_while_another_thread_encodes() -> None:
    for audio_format in FORMATS:
        encoder = make_encoder(audio_format, streaming=True)
        with ThreadPoolExecutor(2) as pool:
            encoded = [pool.submit(encoder.encode, tone(1.0)) for _ in range(4)]
            pool.submit(encoder.close).result()
            assert all(isinstance(part.result(), bytes) for part in encoded)


def test_format_without_its_encoder_is_not_encodable(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = audio._Codec("no_such_encoder", "mp3", 0, {})
    monkeypatch.setitem(audio._CODECS, "mp3", codec)
    encodable.cache_clear()
    try:
        assert not encodable("mp3") and encodable("wav")
        with pytest.raises(ValueError, match="no_such_encoder"):
            make_encoder("mp3", streaming=True)
    finally:
        encodable.cache_clear()
