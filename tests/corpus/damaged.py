"""Files of which a reader may take what is left, or refuse them: both are right, anything else is not."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from tests.corpus.audio import chunk, riff, wave_format
from tests.corpus.containers import matroska, vp8_packets
from tests.corpus.file import Made
from tests.corpus.video import patched
from triptych.media.contract import MediaKind


def damaged(good: Mapping[str, bytes]) -> Iterator[Made]:
    """Cut late, spoilt at a few places, lying about what does not matter."""
    kinds: dict[str, MediaKind] = {
        "wav-16-bit": "audio",
        "flac-16": "audio",
        "mp3-constant": "audio",
        "vorbis": "audio",
        "opus-recorder": "audio",
        "aac-fragmented": "audio",
        "jpeg-progressive": "image",
        "webp-lossy": "image",
        "gif-animated": "image",
        "mp4-faststart": "video",
        "webm-vp8-recorder": "video",
        "avi-mpeg4": "video",
        "transport-stream": "video",
    }
    for name, kind in kinds.items():
        data = good[name]
        if kind != "image":
            yield f"{name}-cut-late", kind, data[: int(len(data) * 0.7)], ""
        generator = np.random.default_rng(list(name.encode()))
        spoilt = np.frombuffer(data, np.uint8).copy()
        places = generator.integers(16, len(spoilt), max(4, len(spoilt) // 400))
        spoilt[places] ^= generator.integers(1, 256, len(places), np.uint8)
        yield f"{name}-spoilt", kind, spoilt.tobytes(), ""
    packets = vp8_packets()
    wide = packets[0][:6] + struct.pack("<HH", 16383, 16383) + packets[0][10:]
    yield "webm-16383x16383-told-small", "video", matroska([(0, packets[0]), (100, wide)]), ""
    yield "webm-told-400-hours", "video", matroska([(0, packets[0])], duration=1.44e9), ""
    yield "webm-time-backwards", "video", matroska([(900 - 100 * n, data) for n, data in enumerate(packets)]), ""
    yield "webm-one-time", "video", matroska([(5, data) for data in packets]), ""
    yield "webm-laced", "video", matroska([(0, b"\xff" + b"\xff" * 300 + packets[0])], flags=0x82), ""
    yield "webm-laced-ebml", "video", matroska([(0, b"\xff" + b"\x80" * 300 + packets[0])], flags=0x86), ""
    yield "webm-million-fps", "video", matroska([(n, data) for n, data in enumerate(packets)], scale=1000), ""
    yield "webm-told-large", "video", matroska([(0, packets[0])], size=(60000, 60000)), ""
    mp4 = good["mp4-faststart"]
    yield "mp4-time-scale-1", "video", patched(mp4, b"mdhd", 12, struct.pack(">I", 1)), ""
    yield "mp4-time-scale-0", "video", patched(mp4, b"mdhd", 12, struct.pack(">I", 0)), ""
    yield "mp4-sample-count-lie", "video", patched(mp4, b"stsz", 8, b"\xff" * 4), ""
    yield "mp4-time-table-lie", "video", patched(mp4, b"stts", 4, b"\xff" * 4), ""
    yield "mp4-external-data", "video", external(mp4), ""
    yield "wav-size-lie", "audio", patched(good["wav-16-bit"], b"data", 0, struct.pack("<I", 2**31 - 5)), ""
    loud = np.full(8000, 3e38, "<f4")
    yield "wav-float-loud", "audio", riff(wave_format(3, 1, 16000, 32), chunk(b"data", loud.tobytes())), ""
    second = riff(wave_format(1, 1, 1, 8), chunk(b"data", b"\x90" * 60))
    yield "wav-1-hz", "audio", second, ""
    yield "mp3-of-two-rates", "audio", good["mp3-mono-16000"] + good["mp3-constant"], ""
    yield "opus-of-two-streams", "audio", good["opus"] + good["opus-stereo"], ""
    yield "transport-stream-of-two-sizes", "video", good["transport-stream"] + good["transport-stream-small"], ""
    frames = patched(good["png-animated"], b"acTL", 0, struct.pack(">II", 2**31 - 1, 0))
    at = frames.index(b"acTL")
    yield (
        "png-animated-forever",
        "image",
        (frames[: at + 12] + struct.pack(">I", zlib.crc32(frames[at : at + 12])) + frames[at + 16 :]),
        "",
    )
    yield "jpeg-with-junk-behind", "image", good["jpeg-420"] + bytes(3000), ""


def external(mp4: bytes) -> bytes:
    """The film's data said to lie in /etc/passwd."""
    at = mp4.index(b"url ") - 4
    return mp4[: at + 4] + b"alis" + mp4[at + 8 : at + 11] + b"\0" + mp4[at + 12 :]
