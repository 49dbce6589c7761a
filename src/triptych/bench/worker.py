"""A measurement in a process of its own, since the one that benchmarks loads no torch."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from contextlib import suppress

from triptych.errors import TriptychError


async def run_worker(
    module: str, request: bytes, seconds: float, *, doing: str, failed: str, env: Mapping[str, str] | None = None
) -> bytes:
    """The last line that `python -m module REQUEST` prints, with `env` added to its environment. Always ended.

    Raises TriptychError: `doing` took more than `seconds`, or what it `failed` at with the last line of its errors.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, request.decode()),
        stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=os.environ | (env or {}),
    )  # fmt: skip
    try:
        async with asyncio.timeout(seconds):
            out, errors = await process.communicate()
    except TimeoutError:
        raise TriptychError(f"{doing} took more than {seconds:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        said = errors.decode("utf-8", "replace").strip().splitlines() or [f"status {process.returncode}"]
        raise TriptychError(f"{failed}: {said[-1]}")
    return out.splitlines()[-1]
