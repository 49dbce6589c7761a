"""What a listener hears of audio in pieces, and the reading of the pieces."""

from __future__ import annotations

import io
import random
import wave

import numpy as np
import pytest

from triptych.bench.audio import AudioReader
from triptych.bench.playout import Playout


def played(*pieces: tuple[float, float]) -> Playout:
    playout = Playout()
    for at, seconds in pieces:
        playout.arrive(at, seconds)
    return playout


def test_pieces_in_time_leave_no_silence() -> None:
    playout = played((10.0, 0.5), (10.4, 1.0), (11.5, 1.0))  # the last one comes as the second one ends
    assert (playout.first_at, playout.last_at, playout.audio_s) == (10.0, 11.5, 2.5)
    assert playout.silent_s == 0 and playout.longest_gap_s == 0 and playout.flows


def test_late_pieces_leave_silence_and_delay_what_follows() -> None:
    # 0.3 s play until 0.3; the next comes at 0.8: 0.5 s of silence. It plays from 0.8 to 1.8; the last comes at 2.0.
    playout = played((0.0, 0.3), (0.8, 1.0), (2.0, 1.0))
    assert playout.silent_s == pytest.approx(0.7) and playout.longest_gap_s == pytest.approx(0.5)
    assert playout.runs_out_at == pytest.approx(3.0) and not playout.flows


def test_audio_ahead_of_time_makes_up_for_a_pause() -> None:
    assert played((0.0, 0.1), (0.05, 5.0), (5.0, 1.0)).flows


def test_no_audio_is_not_a_stream_without_underrun() -> None:
    assert not played().flows
    playout = played((3.0, 0.0), (4.0, 1.0))
    assert playout.first_at == 4.0, "an empty piece starts no playback"


def test_the_first_piece_is_never_late() -> None:
    assert played((100.0, 1.0)).silent_s == 0


def test_a_break_too_short_to_hear_is_none() -> None:
    assert played((0.0, 1.0), (1.009, 1.0)).flows
    assert not played((0.0, 1.0), (1.011, 1.0)).flows


@pytest.mark.parametrize("seed", range(20))
def test_silence_is_how_late_the_latest_piece_is(seed: int) -> None:
    """Playback that waits for each piece ends when a playback that began late enough for all of them would end."""
    draw = random.Random(seed)
    at, pieces = 0.0, []
    for _ in range(50):
        at += draw.expovariate(1.0)
        pieces.append((at, draw.uniform(0.2, 2.0)))
    before, lateness = 0.0, 0.0
    for when, seconds in pieces:
        lateness = max(lateness, when - pieces[0][0] - before)
        before += seconds
    playout = played(*pieces)
    assert playout.silent_s == pytest.approx(lateness)
    assert playout.runs_out_at == pytest.approx(pieces[0][0] + playout.audio_s + playout.silent_s)
    assert 0 <= playout.longest_gap_s <= playout.silent_s


@pytest.mark.parametrize("seed", range(5))
def test_earlier_pieces_never_mean_more_silence(seed: int) -> None:
    draw = random.Random(seed)
    pieces = [(float(number), draw.uniform(0.5, 1.2)) for number in range(30)]
    sooner = [pieces[0], *((at - draw.uniform(0, 0.5), seconds) for at, seconds in pieces[1:])]
    assert played(*sooner).silent_s <= played(*pieces).silent_s


# --- the audio itself ---


def tone(count: int) -> bytes:
    return (np.sin(np.arange(count) / 5) * 16000).astype("<i2").tobytes()


def wav(pcm: bytes, rate: int = 24_000, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, 2, rate, 0, "NONE", ""))
        writer.writeframes(pcm)
    return file.getvalue()


@pytest.mark.parametrize("cut", [1, 3, 700, 48_000])
def test_pcm_has_the_same_seconds_and_loudness_however_it_is_cut(cut: int) -> None:
    data, whole, reader = tone(24_000), AudioReader(), AudioReader()
    assert whole.feed(data) == 1.0
    seconds = sum(reader.feed(data[at : at + cut]) for at in range(0, len(data), cut))
    assert seconds == pytest.approx(1.0) and reader.rms == pytest.approx(whole.rms)
    assert whole.rms == pytest.approx(16000 / 32768 / 2**0.5, rel=0.01) and not whole.silent


def test_a_wav_in_pieces_and_a_wav_a_piece_are_both_read() -> None:
    pcm = tone(12_000)
    stream, pieces = AudioReader(), AudioReader()
    file = wav(pcm)
    streaming_header = file[:40] + b"\xff\xff\xff\xff"  # a length that was not known yet
    assert stream.feed(streaming_header) + stream.feed(pcm[:10_000]) + stream.feed(pcm[10_000:]) == pytest.approx(0.5)
    assert pieces.feed(wav(pcm)) + pieces.feed(wav(pcm)) == pytest.approx(1.0)
    assert stream.rms == pytest.approx(pieces.rms)


def test_a_wav_says_its_own_rate_and_channels_and_ends_where_it_says() -> None:
    assert AudioReader().feed(wav(tone(16_000), rate=16_000)) == 1.0
    assert AudioReader().feed(wav(tone(48_000), rate=48_000, channels=2)) == 0.5
    assert AudioReader().feed(wav(tone(24_000)) + b"LIST\x04\x00\x00\x00abcd") == 1.0


def test_silence_is_told_from_speech() -> None:
    reader = AudioReader()
    reader.feed(bytes(48_000))
    assert reader.silent and reader.rms == 0
    reader.feed(tone(24_000))
    assert not reader.silent


@pytest.mark.parametrize(
    "data",
    [
        b"RIFF\x00\x00\x00\x00WAVE",
        b"RIFF\x00\x00\x00\x00WAVEfmt \x04\x00\x00\x00\x01\x00\x01\x00data\x00\x00\x00\x00",
        wav(tone(10))[:34] + b"\x18\x00" + wav(tone(10))[36:],  # 24 bits
        wav(tone(10))[:22] + b"\x00\x00" + wav(tone(10))[24:],  # no channels
    ],
    ids=["no data", "short header", "24 bits", "no channels"],
)
def test_a_wav_that_cannot_be_read_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="WAV"):
        AudioReader().feed(data)
