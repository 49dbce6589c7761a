"""An audio or video file, opened so that its decoder can reach nothing but the bytes at hand."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import av.logging
from av.container import InputContainer
from av.error import EOFError as AvEndOfFile
from av.error import FFmpegError
from av.error import MemoryError as AvMemoryError
from av.packet import Packet

from triptych.errors import RequestError
from triptych.media.sniff import FileType

# The bytes come from memory, so FFmpeg needs no protocol at all; an empty list allows none.
OPTIONS = {"protocol_whitelist": "", "max_streams": "64"}
_UNKNOWN_SIZE = 0x7FFF0000  # as recorders and pipes write who cannot go back to fill in the size
_MAX_CHUNKS = 100  # looked at
_INDEXED = ("mov", "avi")  # formats whose header has the place and size of every packet

av.logging.set_level(av.logging.PANIC)  # what is wrong with a file is told to its sender, not to the log


@contextmanager
def open_container(data: bytes, file: FileType) -> Iterator[InputContainer]:
    """The file, read as what `sniff` says it is. Raises RequestError for a file whose beginning makes no sense."""
    try:
        container = av.open(
            io.BytesIO(_plain_wav(data) if file.name == "wav" else data),
            format=file.name,
            options=OPTIONS,
            metadata_errors="replace",
            io_open=_refuse,
        )
    except AvMemoryError as error:
        raise MemoryError from error
    except (FFmpegError, ValueError) as error:
        raise RequestError(
            f"this {file.name} file is damaged or cut off: nothing of it can be read ({_reason(error)})"
        ) from error
    try:
        yield container
    finally:
        container.close()


def _refuse(url: str, flags: int, options: dict[str, Any]) -> None:
    raise RequestError(f"the file names another one ({url[:80]!r}), which is not opened: send one that stands alone")


def packets(container: InputContainer, stream: Any, file: FileType) -> Iterator[Packet[Any]]:
    """The packets of a stream, the last one empty: it makes the decoder give what it still holds.

    Bytes that make no packet end a file that may be cut anywhere; in a file whose header says what follows they are
    damage, and raise RequestError.
    """
    demuxed = container.demux(stream)
    while True:
        try:
            packet = next(demuxed)
        except (StopIteration, AvEndOfFile):
            return
        except AvMemoryError as error:
            raise MemoryError from error
        except FFmpegError as error:
            if file.measured:
                raise damaged(file, error) from error
            yield Packet()  # the decoder's rest
            return
        yield packet


def decode(packet: Packet[Any], stream: Any, file: FileType) -> list[Any]:
    """The frames that a packet completes; none for a packet that is damaged, where `file` may be cut anywhere.

    Raises RequestError for one that is damaged in a file whose header says what follows.
    """
    try:
        return list(stream.codec_context.decode(packet if packet.size else None))
    except AvEndOfFile:
        return []
    except AvMemoryError as error:
        raise MemoryError from error
    except FFmpegError as error:
        if file.measured:
            raise damaged(file, error) from error
        return []


def damaged(file: FileType, error: Exception) -> RequestError:
    return RequestError(f"this {file.name} file is damaged: a part of it cannot be decoded ({_reason(error)})")


def is_cut_off(data: bytes, stream: Any, file: FileType, seconds: float) -> bool:
    """Whether a file ends before what its header promises, where it promises anything; `seconds` were decoded."""
    if not file.measured:
        return False
    if file.name in _INDEXED:
        return any(entry.pos + entry.size > len(data) for entry in stream.index_entries)
    if file.name == "wav":  # FFmpeg believes the file's own length instead
        place, size = _wav_chunk(data, b"data")
        rate = int.from_bytes(data[(form := _wav_chunk(data, b"fmt ")[0]) + 8 : form + 12], "little")
        return size < _UNKNOWN_SIZE and place + size - len(data) > 0.1 * rate
    promised = float(stream.duration * stream.time_base) if stream.duration else 0.0
    return seconds < promised - 0.1


def prepare(stream: Any, file: FileType) -> None:
    """Make a stream ready to be decoded by this thread alone. Raises RequestError for an unknown codec."""
    if stream.codec_context is None:
        raise RequestError(f"this {file.name} file is coded in a way that is not known here: send it in another codec")
    stream.codec_context.thread_count = 1


def _plain_wav(data: bytes) -> bytes:
    """A WAV file whose samples fill their places. Of "24 valid bits in 32", FFmpeg takes the 24 for the width; the
    bits that are not valid are zeros at the low end, so that all 32 say the same."""
    form, _ = _wav_chunk(data, b"fmt ")
    bits, valid = data[form + 14 : form + 16], data[form + 18 : form + 20]
    extensible = form and data[form : form + 2] == b"\xfe\xff"
    if not extensible or valid in (bits, b"\0\0") or int.from_bytes(bits, "little") % 8:
        return data
    return data[: form + 18] + bits + data[form + 20 :]


def _wav_chunk(data: bytes, name: bytes) -> tuple[int, int]:
    """Where the first chunk of that name begins, behind its head, and its size; zeros where there is none."""
    place = 12
    for _ in range(_MAX_CHUNKS):
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        if data[place : place + 4] == name:
            return place + 8, size
        place += 8 + size + size % 2
    return 0, 0


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
