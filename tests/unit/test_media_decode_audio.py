"""Any audio becomes the same mono 16 kHz samples, bounded while it is decoded."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soxr

from tests.media_files import audio_file, film, tone, video_file
from triptych.errors import RequestError
from triptych.media.container import open_container, packets
from triptych.media.decode_audio import Mono16k, decode_audio, to_float
from triptych.media.sniff import FileType, as_media


def heard(data: bytes, max_s: float = 60.0) -> npt.NDArray[np.float32]:
    samples = decode_audio(data, as_media(data, "audio"), max_s=max_s)
    assert samples is not None and samples.dtype == np.float32 and samples.ndim == 1
    return samples


@pytest.mark.parametrize(("codec", "scale"), [("pcm_s16le", 2**15), ("pcm_s32le", 2**31)])
def test_integers_are_divided_by_their_full_scale_exactly(codec: str, scale: int) -> None:
    kind = np.int16 if scale == 2**15 else np.int32
    values = np.array([[-scale, -1, 0, 1, scale // 2, scale - 1] * 400], kind)
    assert np.array_equal(heard(audio_file(values, 16000, codec=codec)), (values[0] / scale).astype(np.float32))


def test_every_sample_format_has_its_full_scale() -> None:
    assert to_float(np.array([0, 128, 255], np.uint8)).tolist() == [-1.0, 0.0, 127 / 128]
    assert to_float(np.array([-(2**63), 2**62], np.int64)).tolist() == [-1.0, 0.5]
    assert to_float(np.array([0.25, -2.0])).tolist() == [0.25, -2.0]


def test_channels_are_averaged() -> None:
    left_right = tone(0.2, 16000, channels=2)
    samples = heard(audio_file(left_right, 16000, codec="pcm_f32le", layout="stereo"))
    assert np.array_equal(samples, left_right.mean(axis=0))


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_any_rate_is_resampled_as_librosa_does_it_in_one_piece(rate: int) -> None:
    samples = tone(1.7, rate)[0]
    whole = soxr.resample(samples, rate, 16000, quality="HQ")
    made = heard(audio_file(samples[None], rate, codec="pcm_f32le"))
    assert len(made) == -(-len(samples) * 16000 // rate)
    assert np.array_equal(made[: len(whole)], whole[: len(made)])


def test_a_rate_that_changes_on_the_way_is_followed() -> None:
    mono = Mono16k(lambda _: None)
    mono.add(np.ones(8000, np.float32), 8000)
    mono.add(np.ones(16000, np.float32), 16000)
    mono.add(np.ones(24000, np.float32), 24000)
    assert len(mono.finish()) == 3 * 16000 and mono.seconds == 3


@pytest.mark.parametrize(
    ("form", "codec", "rate"),
    [
        ("flac", "flac", 44100),
        ("mp3", "libmp3lame", 44100),
        ("ogg", "flac", 48000),
        ("ogg", "libopus", 48000),
        ("webm", "libopus", 48000),
        ("mp4", "aac", 44100),
        ("adts", "aac", 44100),
        ("aiff", "pcm_s16be", 22050),
        ("au", "pcm_s16be", 8000),
        ("caf", "pcm_s16le", 48000),
        ("w64", "pcm_s16le", 48000),
        ("mpegts", "aac", 48000),
        ("avi", "pcm_s16le", 48000),
    ],
)
def test_what_recorders_write_is_told_by_its_content_and_heard(form: str, codec: str, rate: int) -> None:
    clip = tone(1.0, rate)
    made = heard(audio_file(clip, rate, form, codec))
    assert abs(len(made) - 16000) < 2100  # codecs pad to whole frames
    spectrum = np.abs(np.fft.rfft(made))
    assert abs(np.argmax(spectrum) * 16000 / len(made) - 220) < 3


def test_an_mp3_behind_a_tag_is_an_mp3() -> None:
    data = audio_file(tone(0.5, 44100), 44100, "mp3", "libmp3lame")
    assert data.startswith(b"ID3")
    assert as_media(data, "audio").name == "mp3"
    size = data[6] << 21 | data[7] << 14 | data[8] << 7 | data[9]
    assert as_media(data[10 + size :], "audio").name == "mp3"


def test_the_sound_of_a_video_is_audio() -> None:
    data = video_file(film(10), sound=tone(1.0, 48000)[0][None])
    assert abs(len(heard(data)) - 16000) < 1500


def test_no_sound_is_none() -> None:
    data = video_file(film(3))
    assert decode_audio(data, as_media(data, "audio"), max_s=10) is None


def test_decoding_stops_at_the_limit_and_not_at_the_end() -> None:
    data = audio_file(np.zeros((1, 48000 * 600), np.int16), 48000, "ogg", "libopus")
    assert len(data) < 400_000
    seen: list[int] = []
    with pytest.raises(RequestError, match=r"longer than 2 seconds, the limit 'media\.max_audio_s'"):
        decode_audio(data, as_media(data, "audio"), max_s=2, on_progress=seen.append)
    assert max(seen, default=0) <= 2 * 16000


def test_samples_that_are_no_numbers_are_refused() -> None:
    clip = tone(0.2, 16000)
    for value in (np.nan, np.inf):
        clip[0, 100] = value
        with pytest.raises(RequestError, match="not numbers"):
            heard(audio_file(clip, 16000, codec="pcm_f32le"))


def test_a_rate_of_no_recorder_is_refused_with_the_limit() -> None:
    data = bytearray(audio_file(tone(0.2, 16000), 16000))
    place = data.index(b"fmt ") + 12
    data[place : place + 4] = struct.pack("<I", 2**31 - 1)
    with pytest.raises(RequestError, match="rate of 2147483647 Hz: it may be 1 to 4000000 Hz"):
        heard(bytes(data))


@pytest.mark.parametrize(("form", "codec"), [("wav", "pcm_s16le"), ("flac", "flac"), ("mp4", "aac")])
def test_a_file_that_says_its_length_and_ends_early_is_refused(form: str, codec: str) -> None:
    clip = np.random.default_rng(1).standard_normal((1, 48000 * 2)).astype(np.float32) / 8
    whole = audio_file(clip, 48000, form, codec)
    if form == "mp4":  # the index first, as a download has it
        mdat = whole.index(b"mdat") - 4
        size = struct.unpack(">I", whole[mdat : mdat + 4])[0]
        assert whole[mdat + size + 4 : mdat + size + 8] == b"moov"
        with pytest.raises(RequestError, match="damaged or cut off"):
            heard(whole[: len(whole) // 2])
        return
    with pytest.raises(RequestError, match=r"cut off|damaged"):
        heard(whole[: len(whole) // 2])


@pytest.mark.parametrize(("form", "codec"), [("mp3", "libmp3lame"), ("ogg", "libopus"), ("webm", "libopus")])
def test_a_stream_that_ends_early_is_heard_as_far_as_it_goes(form: str, codec: str) -> None:
    whole = audio_file(
        np.random.default_rng(1).standard_normal((1, 48000 * 4)).astype(np.float32) / 8, 48000, form, codec
    )
    assert 12000 <= len(heard(whole[: len(whole) // 2])) <= 3 * 16000


def test_a_wav_of_a_recorder_that_never_wrote_its_length_is_heard() -> None:
    whole = bytearray(audio_file(np.ones((1, 16000), np.int16), 16000))
    data = whole.index(b"data")
    whole[4:8] = whole[data + 4 : data + 8] = b"\xff\xff\xff\xff"
    assert len(heard(bytes(whole))) == 16000


def test_valid_bits_of_a_wav_are_not_the_width_of_its_samples() -> None:
    samples = (np.arange(4000, dtype=np.int32) - 2000) << 12
    form = struct.pack("<HHIIHHHHI", 0xFFFE, 1, 16000, 64000, 4, 32, 22, 24, 4) + bytes.fromhex(
        "0100000000001000800000aa00389b71"
    )
    body = (
        b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", samples.nbytes) + samples.tobytes()
    )
    data = b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body
    assert np.array_equal(heard(data), (samples / 2**31).astype(np.float32))


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\n",
        b'<?xml version="1.0"?><MPD></MPD>',
        b"WEBVTT\n\n00:00.000 --> 00:01.000\nx\n",
        b"",
        b"\xff",
        bytes(2000),
    ],
)
@pytest.mark.parametrize("wanted", ["audio", "video"])
def test_what_is_no_container_is_given_to_no_decoder(data: bytes, wanted: str) -> None:
    with pytest.raises(RequestError, match=f"this is not {wanted} that can be read but "):
        as_media(data, wanted)


@pytest.mark.parametrize("demuxer", ["hls", "concat"])
def test_a_container_can_open_nothing_else(demuxer: str, tmp_path: Path) -> None:
    """Even were a playlist let in."""
    secret = tmp_path / "secret.wav"
    secret.write_bytes(audio_file(tone(0.2, 16000), 16000))
    hls = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{secret}\n#EXT-X-ENDLIST\n"
    playlist = hls if demuxer == "hls" else f"ffconcat version 1.0\nfile {secret}\n"
    with pytest.raises(RequestError), open_container(playlist.encode(), FileType(demuxer, "media")) as container:
        next(packets(container, container.streams.audio[0], FileType(demuxer, "media", measured=True)))
