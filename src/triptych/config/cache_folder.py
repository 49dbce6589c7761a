"""Where Triptych keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`triptych` in the user's cache folder, as XDG has it."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return root / "triptych"
