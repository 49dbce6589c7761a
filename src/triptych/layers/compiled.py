"""C code of this package, compiled for the machine at hand when a stage loads, and kept in the user's cache folder.

Nothing is compiled while requests are served, and nothing twice: a library is named by its source, by the compiler and
what that takes the processor for, and by what came out.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from triptych.config.cache_folder import cache_folder
from triptych.errors import ConfigError

logger = logging.getLogger(__name__)

_SHARED = Path(__file__).parent
# The code orders its sums itself: nothing here lets the compiler reorder them. For some processors (Zen 2 and on) gcc
# fuses products with sums in some loops and not in others, and a row would have other bits by which of them it went
# through: the parameter has it fuse them all.
_FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"),
    *("--param", "avoid-fma-max-bits=0"),
)
_DEADLINE_S = 120


@functools.cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """The library of a C file; None, said once in the log, where there is no compiler or it fails."""
    try:
        return _load(source)
    except (OSError, ValueError, subprocess.SubprocessError, ConfigError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        reason = (said.strip() or str(error)).splitlines()[0]
        logger.warning("%s is not compiled, its eager twin runs, which is slower: %s", source.name, reason)
        return None


def _load(source: Path) -> ctypes.CDLL:
    compiler = _compiler()
    folder = cache_folder() / "compiled"
    stem = f"{source.stem}-{_key(compiler, source)}"
    for library in folder.glob(f"{stem}-*.so"):
        if library.stem == f"{stem}-{_digest(library)}":
            return ctypes.CDLL(str(library))
        logger.warning("%s is damaged, it is compiled again", library)
        library.unlink(missing_ok=True)
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    # Made beside and moved: another process may be at the same.
    with tempfile.TemporaryDirectory(dir=folder) as made:
        fresh = Path(made) / "fresh.so"
        _run([*compiler, *_FLAGS, f"-I{_SHARED}", "-o", str(fresh), str(source), "-lm"])
        library = fresh.replace(folder / f"{stem}-{_digest(fresh)}.so")
    logger.info("%s: compiled by %s in %.1f s", source.name, shlex.join(compiler), time.monotonic() - started)
    return ctypes.CDLL(str(library))


def _digest(library: Path) -> str:
    """Is part of a library's name: to load one that is cut short would kill the process."""
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def _compiler() -> list[str]:
    """The command, which in the variable CC may have arguments."""
    if named := shlex.split(os.environ.get("CC", "")):
        if shutil.which(named[0]) is None:
            raise FileNotFoundError(
                f"the variable CC names {named[0]!r}, which is not there; name another, or unset it"
            )
        return named
    for name in ("cc", "gcc", "clang"):
        if (found := shutil.which(name)) is not None:
            return [found]
    raise FileNotFoundError("there is no C compiler; install gcc or clang, or name one in the variable CC")


def _key(compiler: list[str], source: Path) -> str:
    """All that decides what the library does; the compiler's macros tell its version and the processor's features."""
    macros = _run([*compiler, *_FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    headers = dict.fromkeys((*sorted(_SHARED.glob("*.h")), *sorted(source.parent.glob("*.h"))))
    texts = (*_FLAGS, macros, *(header.read_text() for header in headers), source.read_text())
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_DEADLINE_S
    ).stdout
