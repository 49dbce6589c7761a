"""From a part of a message to the bytes of its file, wherever they are."""

from __future__ import annotations

import asyncio
import binascii
import io
import re
import ssl
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote_to_bytes

from triptych.config.schema import MediaConfig
from triptych.config.units import format_bytes
from triptych.errors import RequestError
from triptych.media.address import Resolver
from triptych.media.contract import MediaPart
from triptych.media.fetch import Fetcher
from triptych.media.local import LocalFiles

MAX_READS = 4  # files of this machine that are read at once; each may hold max_bytes
MAX_PERCENT_ENCODED = 1 << 20  # characters of a data: URL that is not base64
_PIECE = 1 << 20  # characters of base64 decoded at a stretch, while no other thread runs
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{1,30}):")  # one letter is the drive of a Windows path
_BASE64_ESCAPES = {"%2B": "+", "%2b": "+", "%2F": "/", "%2f": "/", "%3D": "=", "%3d": "="}


class MediaSource:
    """Reads the files of parts, for all requests of a server. `resolve` and `tls` are the Fetcher's."""

    def __init__(
        self, config: MediaConfig, *, resolve: Resolver | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Raises ConfigError when `local_path` or `allowed_domains` cannot be used."""
        self._config = config
        self._fetcher = Fetcher(config, resolve, tls) if config.fetch else None
        self._local = LocalFiles(config.local_path, config.max_bytes) if config.local_path else None
        # Threads of their own, as the fetcher has: a slow file system delays nothing but files.
        self._threads = ThreadPoolExecutor(MAX_READS, thread_name_prefix="read")
        allowed = ["data:"]
        if config.fetch:
            allowed += ["https:", "http:"] if config.allow_http else ["https:"]
        if config.local_path:
            allowed.append("file:")
        self._allowed = ", ".join(allowed)

    async def read(self, part: MediaPart) -> bytes:
        """The file of one part, at least one byte and at most `max_bytes`. What it holds is not looked at.

        Raises RequestError with the part's `param` and the code `media_too_large`, `invalid_base64` or
        `invalid_media_url`; CapacityError when too much is being fetched.
        """
        try:
            data = await self._read(part)
            if not data:
                raise RequestError(f"the {part.kind} is empty: its file has no bytes")
            if len(data) > self._config.max_bytes:
                raise _too_large(self._config.max_bytes)
            return data
        except RequestError as error:
            raise RequestError(str(error), part.param, error.code or "invalid_media_url") from None

    async def close(self) -> None:
        """Let go of what fetching and reading need. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._fetcher is not None:
            self._fetcher.close()

    async def _read(self, part: MediaPart) -> bytes:
        if part.data or not part.url:
            return part.data
        match = _SCHEME.match(part.url)
        scheme = match[1].lower() if match else ""
        if scheme == "data":
            return await asyncio.to_thread(decode_data_url, part.url, self._config.max_bytes)
        if scheme in ("http", "https"):
            if self._fetcher is None:
                raise RequestError("URLs are not fetched here (media.fetch is off); send the file as a data: URL")
            return await self._fetcher.fetch(part.url)
        if scheme == "file":
            if self._local is None:
                raise RequestError(
                    "files are not read here (media.local_path is empty, --allowed-local-media-path sets it); "
                    f"allowed: {self._allowed}"
                )
            return await self._read_local(self._local, part.url)
        raise RequestError(self._unknown(part.url, scheme))

    async def _read_local(self, local: LocalFiles, url: str) -> bytes:
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, local.read, url)
        except TimeoutError:
            limit = f"{self._config.fetch_timeout_s:g} s (media.fetch_timeout_s)"
            raise RequestError(f"reading the file took longer than {limit}") from None

    def _unknown(self, url: str, scheme: str) -> str:
        shown = repr(url if len(url) <= 60 else f"{url[:60]}...")
        if scheme:
            return f"scheme {scheme!r} of {shown} is not supported; allowed: {self._allowed}"
        if url.startswith(("/", "./", "../", "~", "\\")) or url[1:2] == ":":
            how = "write file:///folder/name" if self._local else f"allowed: {self._allowed}"
            return f"{shown} is a path, not a URL; {how}"
        return f"{shown} is not a URL; allowed: {self._allowed}; write base64 as data:image/png;base64,..."


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """The bytes in a `data:` URL (RFC 2397); what it says of their type is ignored. Raises RequestError."""
    head, comma, text = url.partition(",")
    if not comma:
        raise RequestError("a data: URL needs a comma before its data: data:image/png;base64,...")
    if head.rpartition(";")[2].strip().lower() == "base64":
        if "%" in text:
            for escape, character in _BASE64_ESCAPES.items():
                text = text.replace(escape, character)
        return decode_base64(text, max_bytes)
    if len(text) > MAX_PERCENT_ENCODED:
        limit = format_bytes(MAX_PERCENT_ENCODED)
        raise RequestError(f"a data: URL of more than {limit} must be base64: data:image/png;base64,...")
    if not text.isascii():
        raise RequestError("the data of a data: URL is ASCII; write other bytes as %XX, or all as base64")
    data = unquote_to_bytes(text)
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    return data


def decode_base64(text: str, max_bytes: int) -> bytes:
    """Strict base64: the standard alphabet, padded, no white space. Raises RequestError, also beyond `max_bytes`."""
    if len(text) // 4 * 3 - text.count("=", -2) > max_bytes:
        raise _too_large(max_bytes)
    try:
        if text.find("=", 0, max(0, len(text) - 2)) >= 0:
            raise binascii.Error("padding inside")
        data = io.BytesIO()
        for start in range(0, len(text), _PIECE):
            data.write(binascii.a2b_base64(text[start : start + _PIECE], strict_mode=True))
    except ValueError:  # binascii.Error is one
        hint = "use the standard alphabet (A-Z a-z 0-9 + /), pad with =, and leave out white space and line breaks"
        raise RequestError(f"the data is not valid base64; {hint}", code="invalid_base64") from None
    return data.getvalue()


def _too_large(max_bytes: int) -> RequestError:
    message = f"the file is larger than {format_bytes(max_bytes)} (media.max_bytes)"
    return RequestError(message, code="media_too_large")
