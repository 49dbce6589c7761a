"""What travels between two stage processes: small typed messages, and arrays as raw bytes.

A handoff is a `Put` followed by one frame with the payload, or a `Put` alone when the payload lies in a segment; every
other message is one frame. Nothing that arrives can run code, and no size is believed before it is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from mmap import mmap
from typing import Annotated

import msgspec
import numpy as np

from triptych.connectors.contract import Array, Arrays
from triptych.errors import ConnectorError

ALIGNMENT = 64  # bytes; where an array starts within a payload

_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_DTYPES = {name: np.dtype(name) for name in _NAMES}
_NAME_OF = {dtype.str: name for name, dtype in _DTYPES.items()}

Count = Annotated[int, msgspec.Meta(ge=0)]


class ArrayHeader(msgspec.Struct, array_like=True, frozen=True):
    """One array of a payload: C-contiguous, native byte order, `offset` bytes into it."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    offset: Count

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


class Put(msgspec.Struct, tag="put", array_like=True, frozen=True):
    """Source to target: one handoff. `segment` names the shared memory of its payload; "" when the payload follows."""

    edge: str
    request_id: str
    seq: Count
    final: bool
    arrays: tuple[ArrayHeader, ...]
    segment: str = ""


class Credit(msgspec.Struct, tag="credit", array_like=True, frozen=True):
    """Target to source: how many handoffs of each request have been released since the last one."""

    edge: str
    counts: dict[str, Count]


class Refuse(msgspec.Struct, tag="refuse", array_like=True, frozen=True):
    """Target to source: it takes no more of this request."""

    edge: str
    request_id: str


class Withdraw(msgspec.Struct, tag="withdraw", array_like=True, frozen=True):
    """Source to target: no more comes of this request, and what has not been read is void."""

    edge: str
    request_id: str


Message = Put | Credit | Refuse | Withdraw

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """Raises ConnectorError on anything but a message."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConnectorError(f"a message of {len(frame)} bytes cannot be read: {error}") from error


def lay_out(arrays: Arrays) -> tuple[tuple[ArrayHeader, ...], int]:
    """Headers for the arrays, one after the other, and the size of their payload in bytes.

    Raises ConnectorError on a dtype that cannot travel.
    """
    headers = []
    end = 0
    for name, array in arrays.items():
        dtype = _NAME_OF.get(array.dtype.str)
        if dtype is None:
            raise ConnectorError(f"array {name!r} is {array.dtype}; what can travel: {', '.join(_NAMES)}")
        start = -(-end // ALIGNMENT) * ALIGNMENT
        headers.append(ArrayHeader(name, dtype, array.shape, start))
        end = start + array.nbytes
    return tuple(headers), end


def pieces(headers: tuple[ArrayHeader, ...], arrays: Arrays) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of every array that holds any. One that is not C-contiguous is copied."""
    for header in headers:
        array = arrays[header.name]
        if array.nbytes:
            yield header.offset, np.ascontiguousarray(array).data.cast("B")


def join(headers: tuple[ArrayHeader, ...], arrays: Arrays) -> bytes:
    """The payload as one piece of bytes."""
    payload = b""
    for offset, piece in pieces(headers, arrays):
        payload += bytes(offset - len(payload)) + piece
    return payload


def view(headers: tuple[ArrayHeader, ...], payload: bytearray | mmap) -> dict[str, Array]:
    """The arrays of a payload, without a copy. Raises ConnectorError where a header does not fit the payload."""
    arrays: dict[str, Array] = {}
    for header in headers:
        dtype = _DTYPES.get(header.dtype)
        if dtype is None:
            raise ConnectorError(f"array {header.name!r} has dtype {header.dtype!r}; allowed: {', '.join(_NAMES)}")
        if header.nbytes and header.offset + header.nbytes > len(payload):
            raise ConnectorError(
                f"array {header.name!r}, {header.dtype} {list(header.shape)} from byte {header.offset} on, "
                f"does not fit a payload of {len(payload)} bytes"
            )
        try:
            if header.nbytes:
                arrays[header.name] = np.ndarray(header.shape, dtype, payload, header.offset)
            else:
                arrays[header.name] = np.empty(header.shape, dtype)
        except (ValueError, TypeError) as error:
            raise ConnectorError(f"array {header.name!r} cannot be {list(header.shape)}: {error}") from error
    return arrays
