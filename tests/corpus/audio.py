"""Sound as recorders, browsers, editors and telephones write it."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.corpus.file import CorpusFile, Samples, signal

LAYOUTS = {1: "mono", 2: "stereo", 3: "2.1", 4: "quad", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
PCM = bytes.fromhex("000000001000800000aa00389b71")  # what follows the tag in WAVE_FORMAT_EXTENSIBLE
UNKNOWN = 0xFFFFFFFF


class Pipe:
    """A file that cannot be sought in, as a recorder's upload: the writer cannot go back to fill lengths in."""

    def __init__(self) -> None:
        self.kept = io.BytesIO()

    def write(self, data: bytes) -> int:
        return self.kept.write(data)


def quantised(sound: np.ndarray[Any, Any], bits: int) -> tuple[np.ndarray[Any, Any], Samples]:
    """Whole numbers of that many bits, and the samples they stand for."""
    whole = np.round(sound * (2 ** (bits - 1) - 1)).astype(np.int64)
    return whole, (whole / 2 ** (bits - 1)).astype(np.float32)


def pcm(sound: np.ndarray[Any, Any], bits: int) -> tuple[bytes, Samples]:
    """Interleaved little-endian PCM as WAV keeps it (8 bits without sign), and the samples it stands for."""
    whole, samples = quantised(sound, bits)
    flat = whole.T.reshape(-1)
    if bits == 8:
        return (flat + 128).astype(np.uint8).tobytes(), samples
    return flat.astype("<i8").view(np.uint8).reshape(-1, 8)[:, : bits // 8].tobytes(), samples


def chunk(name: bytes, body: bytes, size: int | None = None) -> bytes:
    return name + struct.pack("<I", len(body) if size is None else size) + body + b"\0" * (len(body) % 2)


def wave_format(tag: int, channels: int, rate: int, bits: int, extra: bytes = b"") -> bytes:
    block = channels * bits // 8
    return chunk(b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, rate * block, block, bits) + extra)


def riff(*chunks: bytes, size: int | None = None, name: bytes = b"RIFF") -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return name + struct.pack("<I", len(body) if size is None else size) + body


def wav(sound: np.ndarray[Any, Any], rate: int, bits: int = 16) -> tuple[bytes, Samples]:
    data, samples = pcm(sound, bits)
    return riff(wave_format(1, len(sound), rate, bits), chunk(b"data", data)), samples


def encoded(
    path: Path,
    container: str,
    codec: str,
    samples: np.ndarray[Any, Any],
    rate: int,
    *,
    sample_format: str | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    piped: bool = False,
) -> None:
    """Written by FFmpeg's own encoders."""
    target: Any = Pipe() if piped else str(path)
    layout = LAYOUTS[len(samples)]
    with av.open(target, "w", format=container, options=container_options or {}) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout, options=options or {})
        if sample_format:
            stream.format = sample_format
        packed = samples.T.reshape(1, -1)
        if sample_format in ("s32", "s32p"):
            packed = np.round(packed.astype(np.float64) * 2**31).clip(-(2**31), 2**31 - 1).astype(np.int32)
        kind = "s32" if packed.dtype == np.int32 else "flt"
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(packed), format=kind, layout=layout)
        frame.sample_rate = rate
        frame.pts = 0
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    if piped:
        path.write_bytes(target.kept.getvalue())


def id3(data: bytes, picture: bytes) -> bytes:
    """An ID3v2.3 tag with a title and a cover before an MP3 stream."""

    def frame(name: bytes, body: bytes) -> bytes:
        return name + struct.pack(">IH", len(body), 0) + body

    tag = frame(b"TIT2", b"\0A title") + frame(b"APIC", b"\0image/png\0\3cover\0" + picture)
    size = bytes((len(tag) >> shift) & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\3\0\0" + size + tag + data


def plain_waves(folder: Path) -> Iterator[CorpusFile]:
    """WAV in every sample format and order of chunks that programs write."""

    def file(name: str, data: bytes, samples: Samples, rate: int) -> CorpusFile:
        path = folder / f"{name}.wav"
        path.write_bytes(data)
        return CorpusFile(name=name, kind="audio", path=path, samples=samples, rate=rate)

    for bits in (8, 16, 24, 32):
        sound = signal(f"wav {bits}", 0.6, 16000, 2 if bits == 24 else 1)
        yield file(f"wav-{bits}-bit", *wav(sound, 16000, bits), 16000)
    for bits in (32, 64):
        sound = signal(f"float {bits}", 0.5, 22050, 2)
        data = sound.T.astype(f"<f{bits // 8}").tobytes()
        header = wave_format(3, 2, 22050, bits)
        yield file(f"wav-float-{bits}", riff(header, chunk(b"data", data)), sound.astype(np.float32), 22050)
    for channels, bits, valid, mask in ((2, 16, 16, 3), (6, 24, 24, 0x3F), (8, 16, 16, 0x63F), (1, 32, 20, 4)):
        sound = signal(f"extensible {channels}", 0.4, 48000, channels)
        data, samples = pcm(sound, bits)
        extra = struct.pack("<HHIH", 22, valid, mask, 1) + PCM
        header = wave_format(0xFFFE, channels, 48000, bits, extra)
        yield file(f"wav-extensible-{channels}-of-{bits}", riff(header, chunk(b"data", data)), samples, 48000)
    for channels in (3, 4, 5, 7):
        yield file(f"wav-{channels}-channels", *wav(signal(f"ch {channels}", 0.3, 16000, channels), 16000), 16000)
    for rate in (8000, 11025, 12000, 24000, 32000, 44100, 48000, 88200, 96000, 192000):
        yield file(f"wav-{rate}-hz", *wav(signal(f"rate {rate}", 0.35, rate), rate), rate)

    header = wave_format(1, 1, 16000, 16)
    data, samples = pcm(signal("chunks", 0.5, 16000), 16)
    junk = chunk(b"LIST", b"INFOISFT\x07\0\0\0Editor\0\0") + chunk(b"bext", b"\0" * 603)
    whole = chunk(b"data", data)
    yield file("wav-list-before-data", riff(junk, header, chunk(b"junk", b"odd"), whole), samples, 16000)
    yield file("wav-list-after-data", riff(header, whole, junk), samples, 16000)
    for size in (0, UNKNOWN, 0x7FFFF024):
        streamed = riff(header, chunk(b"data", data, size), size=size)
        yield file(f"wav-streamed-size-{size}", streamed, samples, 16000)
    yield file("wav-riff-size-unknown", riff(header, whole, size=UNKNOWN), samples, 16000)
    sizes = chunk(b"ds64", struct.pack("<QQQI", 0, len(data), len(samples[0]), 0))
    yield file(
        "wav-rf64", riff(sizes, header, chunk(b"data", data, UNKNOWN), size=UNKNOWN, name=b"RF64"), samples, 16000
    )
    yield file("wav-fmt-of-18-bytes", riff(wave_format(1, 1, 16000, 16, b"\0\0"), whole), samples, 16000)


def odd_waves(folder: Path) -> Iterator[CorpusFile]:
    """Lengths and levels at the edges."""

    def file(name: str, sound: np.ndarray[Any, Any], rate: int = 16000, bits: int = 16) -> CorpusFile:
        path = folder / f"{name}.wav"
        data, samples = wav(sound, rate, bits)
        path.write_bytes(data)
        return CorpusFile(name=name, kind="audio", path=path, samples=samples, rate=rate)

    yield file("wav-shortest", signal("shortest", 0.05, 16000))
    yield file("wav-shortest-44100", signal("shortest", 0.0501, 44100))
    yield file("wav-30-s", signal("thirty", 30.0, 8000), 8000)
    yield file("wav-30.1-s", signal("thirty more", 30.1, 16000))
    yield file("wav-31-s-and-a-bit", signal("odd length", 31.00737, 16000))
    yield file("wav-silence", np.zeros((1, 12000)))
    yield file("wav-constant", np.full((1, 9000), 0.25))
    yield file("wav-one-bit-loud", np.where(signal("quiet", 0.5, 16000) > 0, 1, -1) / 32767)
    yield file("wav-clipped", np.clip(signal("clipped", 0.5, 16000) * 20, -1, 1))
    yield file("wav-impulse", np.eye(1, 7000, 3000))
    yield file("wav-opposite-channels", np.concatenate([signal("phase", 0.4, 16000), -signal("phase", 0.4, 16000)]))
    noise = np.random.default_rng(5).uniform(-0.9, 0.9, (1, 8000))
    yield file("wav-noise", noise)
    yield file("wav-24-bit-below-16", signal("below", 0.4, 16000) * 1e-5, bits=24)


LOSSLESS: Sequence[tuple[str, str, str, str, int, int, int, dict[str, Any]]] = (
    # name, file ending, container, codec, rate, channels, bits, more
    ("flac-16", "flac", "flac", "flac", 44100, 2, 16, {"sample_format": "s16"}),
    ("flac-24-96000", "flac", "flac", "flac", 96000, 2, 24, {"sample_format": "s32"}),
    ("flac-8-channels", "flac", "flac", "flac", 16000, 8, 16, {"sample_format": "s16"}),
    ("flac-piped", "flac", "flac", "flac", 48000, 1, 16, {"sample_format": "s16", "piped": True}),
    ("flac-in-ogg", "oga", "ogg", "flac", 48000, 1, 16, {"sample_format": "s16"}),
    ("flac-in-matroska", "mka", "matroska", "flac", 48000, 2, 16, {"sample_format": "s16"}),
    ("flac-in-mp4", "mp4", "mp4", "flac", 48000, 2, 16, {"sample_format": "s16"}),
    ("pcm-24-in-matroska", "mka", "matroska", "pcm_s24le", 48000, 1, 24, {}),
    ("pcm-in-mov", "mov", "mov", "pcm_s16le", 44100, 2, 16, {}),
    ("w64", "w64", "w64", "pcm_s16le", 44100, 2, 16, {}),
    ("aiff-16", "aiff", "aiff", "pcm_s16be", 44100, 2, 16, {}),
    ("aiff-24", "aif", "aiff", "pcm_s24be", 48000, 1, 24, {}),
    ("au", "au", "au", "pcm_s16be", 22050, 1, 16, {}),
    ("caf", "caf", "caf", "pcm_s16le", 44100, 2, 16, {}),
    ("alac-in-m4a", "m4a", "ipod", "alac", 44100, 2, 16, {"sample_format": "s16p"}),
    ("wavpack", "wv", "wv", "wavpack", 44100, 2, 16, {"sample_format": "s16p"}),
)
STRICT = {"strict": "-2"}
FRAGMENTS = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
LOSSY: Sequence[tuple[str, str, str, str, int, int, dict[str, Any]]] = (
    ("mp3-constant", "mp3", "mp3", "libmp3lame", 44100, 2, {"options": {"b": "96000"}}),
    ("mp3-variable", "mp3", "mp3", "libmp3lame", 48000, 2, {"options": {"q": "4"}}),
    ("mp3-mono-16000", "mp3", "mp3", "libmp3lame", 16000, 1, {}),
    ("mp3-8000", "mp3", "mp3", "libmp3lame", 8000, 1, {}),
    ("mp3-piped", "mp3", "mp3", "libmp3lame", 44100, 1, {"piped": True}),
    ("mp3-in-matroska", "mka", "matroska", "libmp3lame", 44100, 1, {}),
    ("mp3-in-wav", "wav", "wav", "libmp3lame", 44100, 1, {}),
    ("mp2", "mp2", "mp2", "mp2", 48000, 2, {}),
    ("vorbis", "ogg", "ogg", "vorbis", 44100, 2, {"options": STRICT}),
    ("opus", "opus", "ogg", "libopus", 48000, 1, {}),
    ("opus-stereo", "ogg", "ogg", "libopus", 48000, 2, {}),
    ("opus-24000", "opus", "ogg", "libopus", 24000, 1, {}),
    ("opus-recorder", "webm", "webm", "libopus", 48000, 1, {"container_options": {"live": "1"}, "piped": True}),
    ("opus-webm", "webm", "webm", "libopus", 48000, 2, {}),
    ("opus-in-mp4", "mp4", "mp4", "libopus", 48000, 1, {}),
    ("aac-m4a", "m4a", "ipod", "aac", 44100, 2, {}),
    ("aac-faststart", "m4a", "ipod", "aac", 44100, 1, {"container_options": {"movflags": "+faststart"}}),
    ("aac-fragmented", "mp4", "mp4", "aac", 48000, 2, {"container_options": FRAGMENTS, "piped": True}),
    ("aac-adts", "aac", "adts", "aac", 48000, 1, {}),
    ("aac-transport-stream", "ts", "mpegts", "aac", 48000, 1, {}),
    ("aac-flv", "flv", "flv", "aac", 44100, 1, {}),
    ("amr", "amr", "amr", "libopencore_amrnb", 8000, 1, {}),
    ("amr-3gp", "3gp", "3gp", "libopencore_amrnb", 8000, 1, {}),
    ("wma", "wma", "asf", "wmav2", 44100, 2, {"options": {"b": "96000"}}),
    ("ac3", "ac3", "ac3", "ac3", 48000, 2, {}),
    ("wav-a-law", "wav", "wav", "pcm_alaw", 8000, 1, {}),
    ("wav-mu-law", "wav", "wav", "pcm_mulaw", 8000, 1, {}),
    ("au-mu-law", "au", "au", "pcm_mulaw", 8000, 1, {}),
    ("wav-adpcm-ima", "wav", "wav", "adpcm_ima_wav", 22050, 1, {}),
    ("wav-adpcm-ms", "wav", "wav", "adpcm_ms", 22050, 2, {}),
)


def encoded_files(folder: Path) -> Iterator[CorpusFile]:
    """Everything that FFmpeg has an encoder for and people have files of."""
    for name, ending, container, codec, rate, channels, bits, more in LOSSLESS:
        path = folder / f"{name}.{ending}"
        _, samples = quantised(signal(name, 0.7, rate, channels), bits)
        encoded(path, container, codec, samples, rate, **({"sample_format": "s32" if bits > 16 else "s16"} | more))
        yield CorpusFile(name=name, kind="audio", path=path, samples=samples, rate=rate)
    for name, ending, container, codec, rate, channels, more in LOSSY:
        path = folder / f"{name}.{ending}"
        samples = signal(name, 1.2, rate, channels).astype(np.float32)
        encoded(path, container, codec, samples, rate, **more)
        near = {"vorbis": 0.8, "amr": 0.7, "amr-3gp": 0.7}.get(name, 0.9)
        yield CorpusFile(name=name, kind="audio", path=path, samples=samples, rate=rate, near=near)


def tagged_and_long(folder: Path, cover: bytes) -> Iterator[CorpusFile]:
    path = folder / "mp3-with-cover.mp3"
    samples = signal("cover", 1.2, 44100, 2).astype(np.float32)
    encoded(path, "mp3", "libmp3lame", samples, 44100)
    path.write_bytes(id3(path.read_bytes(), cover))
    yield CorpusFile(name="mp3-with-cover", kind="audio", path=path, samples=samples, rate=44100, near=0.9)

    path = folder / "flac-5-min.flac"
    _, samples = quantised(np.tile(signal("five minutes", 20.0, 8000), 15), 16)
    encoded(path, "flac", "flac", samples, 8000, sample_format="s16")
    yield CorpusFile(name="flac-5-min", kind="audio", path=path, samples=samples, rate=8000)
    path = folder / "opus-40-s.opus"
    samples = signal("forty seconds", 40.0, 16000).astype(np.float32)
    encoded(path, "ogg", "libopus", samples, 16000)
    yield CorpusFile(name="opus-40-s", kind="audio", path=path, samples=samples, rate=16000, near=0.9)


def audio_files(folder: Path, cover: bytes) -> Iterator[CorpusFile]:
    folder.mkdir(parents=True, exist_ok=True)
    yield from plain_waves(folder)
    yield from odd_waves(folder)
    yield from encoded_files(folder)
    yield from tagged_and_long(folder, cover)
