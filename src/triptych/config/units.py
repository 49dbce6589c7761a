"""Sizes and durations as people write and read them."""

from __future__ import annotations

import re

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of one element

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`"64 MiB"` -> 67108864. Raises ValueError naming what is allowed."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(
            f"{text!r} is not a size: write a number of bytes, or a number and KB, MB, GB, KiB, MiB or GiB"
        )
    return round(float(match[1]) * _FACTORS[match[2].lower()])


def format_bytes(count: int) -> str:
    """67108864 -> `"64.0 MiB"`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
