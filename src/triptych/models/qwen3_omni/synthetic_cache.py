"""Where the small checkpoints are kept, and how the server process gets one without importing torch."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from triptych.config.cache_folder import cache_folder
from triptych.errors import CheckpointError
from triptych.models.qwen3_omni.synthetic_config import Size

VERSION = 2  # raise it whenever the bytes of a checkpoint change, so that cached ones are made anew
MARKER = "triptych.json"
DEADLINE_S = 600
TIDY_S = 5

_MAKE = "import sys; from triptych.models.qwen3_omni.synthetic import cached_checkpoint; cached_checkpoint(sys.argv[1])"


def cached_folder(size: Size) -> Path:
    """Where the checkpoint of a size is, or will be, in the user's cache folder."""
    return cache_folder() / "checkpoints" / f"{size}-v{VERSION}"


def ensure_checkpoint(size: Size) -> Path:
    """The checkpoint of a size, made by a child process on first use. Raises CheckpointError when that fails."""
    folder = cached_folder(size)
    if not (folder / MARKER).exists():
        status, errors = _run([sys.executable, "-c", _MAKE, size])
        if status != 0:
            reason = (errors.strip() or f"exit status {status}").splitlines()[-1]
            name = f"{CheckpointError.__module__}.{CheckpointError.__name__}: "
            raise CheckpointError(f"cannot make the checkpoint {size!r}: {reason.removeprefix(name)}")
    return folder


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Exit status and standard error of a command. Interrupted, the command is interrupted as well and may tidy up."""
    # In a process group of its own: Ctrl-C in a terminal would reach it twice, and the second cut its tidying short.
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    )
    try:
        _, errors = child.communicate(timeout=DEADLINE_S)
        return child.returncode, errors
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"making a checkpoint took more than {DEADLINE_S} s") from error
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            try:
                child.communicate(timeout=TIDY_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()
