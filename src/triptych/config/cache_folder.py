"""Where Triptych keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

from triptych.errors import ConfigError


def cache_folder() -> Path:
    """`triptych` in the user's cache folder, as XDG has it. Raises ConfigError for a user without a home."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(configured):
        return Path(configured) / "triptych"
    try:
        return Path.home() / ".cache" / "triptych"
    except RuntimeError as error:
        raise ConfigError("this user has no home folder; set the variable XDG_CACHE_HOME") from error
