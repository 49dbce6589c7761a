"""Shared memory segments: files that only memory holds, written once by one process and read by another.

A segment is called `triptych-<token>-<process>-<n>`. The token names the server and begins with its pid
(`<pid>x<random>`), `process` is the stage process that made it, and `n` is `<pid namespace>.<pid>.<count>`, so that a
process that was started again never reuses the name of a segment whose announcement may still be on its way.

The reader unlinks a segment as soon as it has mapped it (`take`); the kernel frees the memory with the last mapping.
What nobody maps is unlinked by its writer, and what a dead writer left by the `sweep` of whoever outlives it. A segment
that many read (`map_readonly`) is unlinked by the process that holds it for them.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from urllib.parse import quote

logger = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview


def _directory() -> str:
    shared = "/dev/shm"
    return shared if sys.platform == "linux" and os.access(shared, os.W_OK) else tempfile.gettempdir()


def _pid_namespace() -> int:
    """Containers may share /dev/shm without sharing process ids: a pid says nothing outside its namespace."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0  # no Linux: there is only one


DIRECTORY = _directory()
MEDIA = "media"  # stands for the process in the names of segments with decoded media
_NAMESPACE = _pid_namespace()
_TOKEN = r"[1-9]\d{0,8}x[^-/]+"
_NUMBER = r"\d+\.\d+\.\d+"
_STALE = re.compile(rf"triptych-([1-9]\d{{0,8}})x[^-]+-.+-{_NAMESPACE}\.\d+\.\d+")


class SegmentWriter:
    """Makes the segments of one process."""

    def __init__(self, token: str, process: str) -> None:
        self._prefix = f"{_prefix(token, process)}{_NAMESPACE}.{os.getpid()}."
        self._counter = itertools.count()

    def reserve(self) -> str:
        """A name that no other segment has or will have, for `write`."""
        return f"{self._prefix}{next(self._counter)}"

    def write(self, pieces: Iterable[tuple[int, Buffer]]) -> str:
        """Make a segment under a new name and return that; see `write`."""
        name = self.reserve()
        write(name, pieces)
        return name


def write(name: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
    """Make a segment that holds each piece at its offset, in bytes.

    Raises OSError, with nothing left behind, when there is no room (ENOSPC) or no file descriptor.
    """
    # Written, not mapped: a full filesystem is then an error of `write` and not a SIGBUS.
    fd = os.open(_path(name), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        for offset, piece in pieces:
            rest = memoryview(piece).cast("B")
            while rest:
                written = os.pwrite(fd, rest, offset)
                rest, offset = rest[written:], offset + written
    except OSError:
        unlink(name)
        raise
    finally:
        os.close(fd)


def take(name: str) -> mmap.mmap:
    """Map a segment and unlink it. Writes go to private copies of its pages. Raises OSError, or ValueError if empty."""
    try:
        return _map(name)
    finally:
        unlink(name)


def map_readonly(name: str, process: str) -> mmap.mmap:
    """Map a segment of that process that somebody else holds, and leave it where it is.

    Writes go to private copies of its pages, so what others see never changes; a mapping outlives the segment's name.
    Raises ValueError for a name that is not one of a segment of `process` or for an empty segment, OSError
    (FileNotFoundError) for a segment that is gone.
    """
    if re.fullmatch(rf"triptych-{_TOKEN}-{re.escape(quote(process, safe=''))}-{_NUMBER}", name) is None:
        raise ValueError(f"{name!r} is not the name of a shared memory segment of {process!r}")
    return _map(name)


def _map(name: str) -> mmap.mmap:
    fd = os.open(_path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def exists(name: str) -> bool:
    return os.path.exists(_path(name))


def unlink(name: str) -> None:
    """Remove a segment, if it is still there."""
    try:
        os.unlink(_path(name))
    except FileNotFoundError:
        return  # its reader was first
    except OSError as error:
        logger.error("shared memory %s cannot be removed: %s", name, error)


def is_segment(name: str, token: str, process: str) -> bool:
    """Whether this is the name of a segment of that process, and so not of any other file."""
    return re.fullmatch(re.escape(_prefix(token, process)) + _NUMBER, name) is not None


def token_of(run_dir: str) -> str:
    """The token of the server whose run directory this is: the directory's name, without the program's."""
    return os.path.basename(os.path.normpath(run_dir)).removeprefix("triptych-")


def sweep(token: str, process: str | None = None) -> None:
    """Remove every segment of a server, or of one process of it. Readers that have mapped one keep what they have."""
    of_process = ".+-" if process is None else re.escape(f"{quote(process, safe='')}-")
    _remove(re.compile(re.escape(f"triptych-{token}-") + of_process + _NUMBER))


def sweep_server(token: str) -> None:
    """Remove every segment of the server process that a token names, once that is gone: also those of its media, whose
    token is another."""
    pid, _, _ = token.partition("x")
    _remove(re.compile(rf"triptych-{re.escape(pid)}x[^-]+-.+-{_NAMESPACE}\.\d+\.\d+"))


def sweep_stale() -> None:
    """Remove the segments of servers whose pid is gone: they were killed together with all their processes."""
    for name in os.listdir(DIRECTORY):
        match = _STALE.fullmatch(name)
        if match is not None and not _is_alive(int(match[1])):
            logger.info("removing shared memory that a dead server left: %s", name)
            unlink(name)


def _remove(pattern: re.Pattern[str]) -> None:
    for name in os.listdir(DIRECTORY):
        if pattern.fullmatch(name):
            unlink(name)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it is someone else's, and runs
    return True


def _prefix(token: str, process: str) -> str:
    return f"triptych-{token}-{quote(process, safe='')}-"  # a name may hold a slash; a file name may not


def _path(name: str) -> str:
    return f"{DIRECTORY}/{name}"
