"""The smallest writers of Matroska, Ogg and MP4 that can also write what no encoder would."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from functools import cache

import av
import numpy as np

from tests.corpus.file import film

UNKNOWN_SIZE = b"\x01" + b"\xff" * 7


def box(name: bytes, *bodies: bytes, size: int | None = None) -> bytes:
    """An MP4 box; `size` lies about its length."""
    body = b"".join(bodies)
    return struct.pack(">I", len(body) + 8 if size is None else size) + name + body


def element(identifier: str, *bodies: bytes, size: bytes | None = None) -> bytes:
    """An EBML element; `size` lies about its length."""
    body = b"".join(bodies)
    return bytes.fromhex(identifier) + (struct.pack(">Q", len(body) | 1 << 56) if size is None else size) + body


def number(identifier: str, value: int) -> bytes:
    return element(identifier, value.to_bytes(8, "big"))


def matroska(
    blocks: Iterable[tuple[int, bytes]],
    *,
    codec: bytes = b"V_VP8",
    size: tuple[int, int] = (64, 48),
    flags: int = 0x80,
    scale: int = 1_000_000,
    duration: float | None = None,
) -> bytes:
    """A film of one track, each block in a cluster of its own at that time, in units of `scale` nanoseconds."""
    head = element("1A45DFA3", element("4282", b"webm"), number("4287", 2), number("4285", 2))
    told = b"" if duration is None else element("4489", struct.pack(">d", duration))
    info = element("1549A966", number("2AD7B1", scale), told)
    shape = element("E0", number("B0", size[0]), number("BA", size[1]))
    track = element("AE", number("D7", 1), number("73C5", 1), number("83", 1), element("86", codec), shape)
    clusters = b"".join(
        element("1F43B675", number("E7", time), element("A3", b"\x81\0\0" + bytes([flags]) + data))
        for time, data in blocks
    )
    return head + element("18538067", info, element("1654AE6B", track), clusters, size=UNKNOWN_SIZE)


@cache
def vp8_packets() -> tuple[bytes, ...]:
    """A few frames of 64 x 48, the first of them whole."""
    out = io.BytesIO()
    with av.open(out, "w", format="webm") as target:
        stream = target.add_stream("libvpx", rate=8, options={"deadline": "realtime", "cpu-used": "8"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        frames = [av.VideoFrame.from_ndarray(image, format="rgb24") for image in film("packets", 64, 48, 6)]
        packets = [packet for frame in [*frames, None] for packet in stream.encode(frame)]
    return tuple(bytes(packet) for packet in packets)


def crc(page: bytes) -> int:
    """Ogg's checksum: polynomial 0x04C11DB7, nothing reflected."""
    value = 0
    for byte in page:
        value = (value << 8) & 0xFFFFFFFF ^ crc_table()[value >> 24 ^ byte]
    return value


@cache
def crc_table() -> tuple[int, ...]:
    table = np.arange(256, dtype=np.uint64) << np.uint64(24)
    for _ in range(8):
        high = (table >> np.uint64(31)) & np.uint64(1)
        table = ((table << np.uint64(1)) & np.uint64(0xFFFFFFFF)) ^ high * np.uint64(0x04C11DB7)
    return tuple(int(value) for value in table)


def ogg_page(packets: list[bytes], granule: int, sequence: int, kind: int = 0) -> bytes:
    """One page of whole packets, each below 255 bytes. `kind`: 2 opens the stream, 4 ends it."""
    table = bytes(len(packet) for packet in packets)
    head = struct.pack("<4sBBqIII", b"OggS", 0, kind, granule, 7, sequence, 0) + bytes([len(table)]) + table
    page = head + b"".join(packets)
    return page[:22] + struct.pack("<I", crc(page)) + page[26:]


def silent_opus(hours: float) -> bytes:
    """Two bytes for each 120 ms: six frames of 20 ms that all say nothing."""
    quiet = [bytes([0xFF, 0x06])] * 255
    pages = [
        ogg_page([b"OpusHead" + struct.pack("<BBHIhB", 1, 1, 0, 48000, 0, 0)], 0, 0, 2),
        ogg_page([b"OpusTags" + struct.pack("<I", 0) + struct.pack("<I", 0)], 0, 1),
    ]
    count = max(1, round(hours * 3600 / (255 * 0.12)))
    pages += [ogg_page(quiet, (n + 1) * 255 * 5760, n + 2, 4 if n + 1 == count else 0) for n in range(count)]
    return b"".join(pages)
