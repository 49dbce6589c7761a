"""Files of this machine that requests may name: regular files below one folder, wherever symbolic links lead."""

from __future__ import annotations

import os
import stat
from urllib.parse import unquote_to_bytes

from triptych.config.units import format_bytes
from triptych.errors import ConfigError, RequestError

MAX_PATH_BYTES = 4096  # what the kernel takes

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


class LocalFiles:
    """Reads `file:` URLs below a folder. What lies elsewhere gets one answer, whether it exists or not."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        """Raises ConfigError when `folder` is not a folder."""
        if not os.path.isdir(folder):
            raise ConfigError(f"{folder!r} is not a folder", "media.local_path")
        self._max_bytes = max_bytes
        self._written = os.fsencode(os.path.abspath(folder))
        self._root = os.path.realpath(self._written)

    def read(self, url: str) -> bytes:
        """The file's bytes. Blocks, as files do. Raises RequestError when it may not or cannot be read."""
        path = _path(url)
        below = _below(path, self._written)
        if below is None:
            below = _below(path, self._root)
        if below is not None:
            below = _below(os.path.realpath(os.path.join(self._root, below)), self._root)
        if below is None:
            raise RequestError("the file is not below the folder that requests may name (media.local_path)")
        try:
            return self._read(below)
        except FileNotFoundError:
            raise RequestError("there is no such file below media.local_path") from None
        except OSError as error:
            raise RequestError(f"the file cannot be read: {error.strerror}") from None

    def _read(self, below: bytes) -> bytes:
        """Walks down from the folder without following links, so that none put there meanwhile leads out of it."""
        *folders, name = below.split(b"/")
        place = os.open(self._root, _FOLDER)
        try:
            for folder in folders:
                inner = os.open(folder, _FOLDER, dir_fd=place)
                os.close(place)
                place = inner
            # Looked at before it is opened: opening a device can have effects.
            _check_regular(os.stat(name or b".", dir_fd=place, follow_symlinks=False))
            file = os.open(name, _FILE, dir_fd=place)
        finally:
            os.close(place)
        with open(file, "rb") as opened:
            found = os.fstat(file)
            _check_regular(found)
            if found.st_size > self._max_bytes:
                size, limit = format_bytes(found.st_size), format_bytes(self._max_bytes)
                message = f"the file has {size}, which is more than {limit} (media.max_bytes)"
                raise RequestError(message, code="media_too_large")
            data = opened.read(found.st_size + 1)
        if len(data) != found.st_size:
            raise RequestError("the file changed while it was read")
        return data


def _path(url: str) -> bytes:
    """The absolute path that a `file:` URL (RFC 8089) names, without needless slashes."""
    rest = url[len("file:") :]
    host = ""
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        rest = slash + rest
    if host.lower() not in ("", "localhost"):
        raise RequestError("a file: URL names no host; write file:///folder/name")
    if not rest.startswith("/"):
        raise RequestError("a file: URL holds an absolute path; write file:///folder/name")
    if "?" in rest or "#" in rest:
        raise RequestError("a file: URL has neither query nor fragment; write ? as %3F and # as %23")
    try:
        path = unquote_to_bytes(rest)
    except UnicodeEncodeError:
        raise RequestError("the file: URL holds characters that are not text") from None
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if len(path) > MAX_PATH_BYTES:
        raise RequestError(f"the path of a file: URL is at most {MAX_PATH_BYTES} bytes long")
    if b"\0" in path or b".." in parts:
        raise RequestError("the path of a file: URL holds neither '..' nor NUL")
    return b"/" + b"/".join(parts)


def _below(path: bytes, folder: bytes) -> bytes | None:
    """`path` as seen from `folder` ("" for the folder itself), or None where it is not below it."""
    if path == folder:
        return b""
    prefix = folder.rstrip(b"/") + b"/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise RequestError("the file is not a regular file, but a folder, pipe, socket, device or broken link")
