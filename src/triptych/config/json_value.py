"""A value that came as JSON, in a message to who sent it: in JSON's words, and no longer than a message may be."""

from __future__ import annotations

import json
import reprlib
from typing import Any

LONGEST_SHOWN = 80  # characters of a string


class _Short(reprlib.Repr):
    """Looks at no more of a value than it shows: a body may be large."""

    def repr_NoneType(self, x: None, level: int) -> str:
        return "null"

    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_float(self, x: float, level: int) -> str:
        return json.dumps(x)

    def repr_str(self, x: str, level: int) -> str:
        short = x if len(x) <= LONGEST_SHOWN else f"{x[:LONGEST_SHOWN]}..."
        return json.dumps(short, ensure_ascii=False)


_SHORT = _Short()
_SHORT.maxlevel = 2
_SHORT.maxother = LONGEST_SHOWN


def shown(value: Any) -> str:
    """`value` as JSON, with dots for what is left out."""
    return _SHORT.repr(value)


def cut(name: str) -> str:
    """As `shown`, for a name without quotes."""
    return name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}..."
