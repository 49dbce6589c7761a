"""Where the small checkpoints are kept, and how the server process gets one without importing torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from triptych.errors import CheckpointError
from triptych.models.qwen3_omni.synthetic_config import Size

VERSION = 1  # raise it whenever the bytes of a checkpoint change, so that cached ones are made anew
MARKER = "triptych.json"
DEADLINE_S = 600

_MAKE = "import sys; from triptych.models.qwen3_omni.synthetic import cached_checkpoint; cached_checkpoint(sys.argv[1])"


def cached_folder(size: Size) -> Path:
    """Where the checkpoint of a size is, or will be, in the user's cache folder."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return root / "triptych" / "checkpoints" / f"{size}-v{VERSION}"


def ensure_checkpoint(size: Size) -> Path:
    """The checkpoint of a size, made by a child process on first use. Raises CheckpointError when that fails."""
    folder = cached_folder(size)
    if not (folder / MARKER).exists():
        command = [sys.executable, "-c", _MAKE, size]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise CheckpointError(f"making the checkpoint {size!r} took more than {DEADLINE_S} s") from error
        if done.returncode != 0:
            reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise CheckpointError(f"cannot make the checkpoint {size!r}: {reason}")
    return folder
