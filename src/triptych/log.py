"""Logging set-up: called once by each entry point, never at import."""

from __future__ import annotations

import logging

LEVELS = ("debug", "info", "warning", "error")


def configure(level: str = "info", process: str = "server") -> None:
    """Send records to stderr at `level`, each with the name of its process. Raises ValueError on an unknown level."""
    if level.lower() not in LEVELS:
        raise ValueError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s",
        force=True,
    )
