"""What a file is, told by its first bytes alone: never by its name, its extension or the type that its sender claims.

Only what is listed here is ever given to a decoder, and the decoder is then told which format to read instead of being
left to find out. So nothing that names other files or addresses (playlists such as HLS, DASH, concat or SDP), and no
format that is a program or a drawing (SVG, PostScript, PDF, subtitles), reaches code that would follow it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from triptych.errors import RequestError

# What is said of a file that has a stranger's signature, so that its sender knows what to change.
_STRANGERS: tuple[tuple[bytes, str], ...] = (
    (b"%PDF", "a PDF document"),
    (b"%!PS", "a PostScript file"),
    (b"<svg", "an SVG drawing"),
    (b"<?xml", "an XML file"),
    (b"<!DOCTYPE", "a web page"),
    (b"<!doctype", "a web page"),
    (b"<html", "a web page"),
    (b"#EXTM3U", "a playlist"),
    (b"ffconcat", "a playlist"),
    (b"WEBVTT", "a subtitle file"),
    (b"MThd", "a MIDI file"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"{", "a JSON document"),
)
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


@dataclass(frozen=True, slots=True)
class FileType:
    """`name` is the format in Pillow, or the demuxer in FFmpeg. None of them calls another program."""

    name: str
    holds: Literal["image", "media"]
    # The header of such a file says how much follows, so that a file that ends early is known to be cut off. The
    # others are written to be cut anywhere and played from anywhere, as browsers, radios and phones write them.
    measured: bool = False


def sniff(data: bytes) -> FileType | None:
    """The type of a file, or None if it is not one that is read here. An animated GIF is a `media` as well; see
    `as_media`."""
    head = data[:64]
    image = _image(head)
    return FileType(image, "image") if image else _media(data)


def as_image(data: bytes) -> FileType:
    """Raises RequestError (without its `param`) that says what the file is instead."""
    found = sniff(data)
    if found is None or found.holds != "image":
        allowed = "JPEG, PNG, WebP, GIF, AVIF, BMP, TIFF, JPEG 2000, ICO or PPM"
        raise RequestError(f"this is not an image that can be read but {describe(data)}; send {allowed}")
    return found


def as_media(data: bytes, wanted: str) -> FileType:
    """`wanted` is "audio" or "video". Raises RequestError (without its `param`) that says what the file is instead."""
    found = sniff(data)
    if wanted == "video" and found is not None and found.name == "GIF":
        return FileType("gif", "media")
    if found is None or found.holds != "media":
        allowed = (
            "WAV, FLAC, MP3, Ogg, Opus, M4A, WebM or AAC" if wanted == "audio" else "MP4, WebM, Matroska, AVI or GIF"
        )
        raise RequestError(f"this is not {wanted} that can be read but {describe(data)}; send {allowed}")
    return found


def describe(data: bytes) -> str:
    """What to call a file in an error."""
    if not data:
        return "an empty file"
    found = sniff(data)
    if found is not None:
        return f"{'an image' if found.holds == 'image' else 'an audio or video file'} ({found.name})"
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS:
        return "a HEIF image (HEIC), which phones can export as JPEG"
    head = data[:256].lstrip()
    for signature, name in _STRANGERS:
        if head.startswith(signature):
            return name
    return f"a file of unknown type that begins with {data[:8].hex(' ')}"


def _image(head: bytes) -> str | None:
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"  # or MPO: a JPEG file with more pictures behind the first
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"):
        return "AVIF"
    if head[4:8] == b"ftyp" and head[8:12] in (b"mif1", b"msf1") and b"avif" in head[16:]:
        return "AVIF"
    if head.startswith(b"BM") and head[14:18] in (
        b"\x0c\0\0\0",
        b"\x28\0\0\0",
        b"\x34\0\0\0",
        b"\x38\0\0\0",
        b"\x6c\0\0\0",
        b"\x7c\0\0\0",
        b"\x40\0\0\0",
    ):
        return "BMP"
    if head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return "TIFF"
    if head.startswith(b"\0\0\1\0"):
        return "ICO" if 0 < int.from_bytes(head[4:6], "little") <= 64 and head[9:10] == b"\0" else None
    if head.startswith((b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51")):
        return "JPEG2000"
    if head[:1] == b"P" and head[1:2] in b"123456f" and head[2:3] in b" \t\r\n" and len(head) > 6:
        return "PPM"
    return None


def _media(data: bytes) -> FileType | None:
    head = data[:64]
    if head.startswith((b"RIFF", b"RF64", b"RIFX", b"BW64")) and head[8:12] == b"WAVE":
        return FileType("wav", "media", measured=True)
    if head.startswith(b"RIFF") and head[8:12] in (b"AVI ", b"AVIX"):
        return FileType("avi", "media", measured=True)
    if head.startswith(b"riff\x2e\x91\xcf\x11"):
        return FileType("w64", "media", measured=True)
    if head.startswith(b"fLaC"):
        return FileType("flac", "media", measured=True)
    if head.startswith(b"OggS"):
        return FileType("ogg", "media")
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return FileType("matroska", "media")
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"):
        return None if head[4:8] == b"ftyp" and head[8:12] in _HEIF_BRANDS else FileType("mov", "media", measured=True)
    if head.startswith(b"FORM") and head[8:12] in (b"AIFF", b"AIFC"):
        return FileType("aiff", "media", measured=True)
    if head.startswith(b"caff"):
        return FileType("caf", "media", measured=True)
    if head.startswith((b".snd", b"dns.")):
        return FileType("au", "media", measured=True)
    for signature, name in (
        (b"#!AMR", "amr"),
        (b"FLV\x01", "flv"),
        (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "asf"),
        (b"wvpk", "wv"),
        (b"\0\0\1\xba", "mpeg"),
        (b"\0\0\1\xb3", "mpegvideo"),
    ):
        if head.startswith(signature):
            return FileType(name, "media")
    if _has_sync(data, 0, 188) or _has_sync(data, 4, 192):
        return FileType("mpegts", "media")
    return _frames(data)


def _has_sync(data: bytes, first: int, packet: int) -> bool:
    """Whether a transport stream's packets begin where they should: 0x47 each time, as far as the file goes."""
    places = range(first, min(len(data), first + 5 * packet), packet)
    return len(places) >= 2 and all(data[place] == 0x47 for place in places)


def _frames(data: bytes) -> FileType | None:
    """Files without a header: MPEG audio (MP3), ADTS (AAC) or AC-3 frames one behind another, maybe after ID3 tags."""
    start = 0
    while data[start : start + 3] == b"ID3" and start + 10 <= len(data):
        size = 0
        for byte in data[start + 6 : start + 10]:
            size = size << 7 | byte & 0x7F
        start += size + (20 if data[start + 5] & 0x10 else 10)
    while start < len(data) and data[start] == 0 and start < 1 << 16:
        start += 1  # encoders pad tags
    head = data[start : start + 4]
    if start and head == b"fLaC":
        return FileType("flac", "media", measured=True)
    if len(head) == 4 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        return FileType("aac", "media")
    if len(head) == 4 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and _is_mpeg_audio(head):
        return FileType("mp3", "media")
    if head.startswith(b"\x0b\x77"):
        # Both kinds share their sync word; the version that E-AC-3 carries is in the sixth byte.
        return FileType("eac3" if data[start + 5 : start + 6] > b"\x57" else "ac3", "media")
    return None


def _is_mpeg_audio(head: bytes) -> bool:
    """Version, layer, bit rate and sampling rate of a frame header are none of the reserved ones."""
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    return version != 1 and layer != 0 and head[2] >> 4 not in (0, 15) and head[2] >> 2 & 3 != 3
