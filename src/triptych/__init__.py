"""Triptych: a server for omni-modality models, and the same pipeline as a Python object.

`Omni` is loaded on first use, so that importing the package (or asking for its version) costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.pipeline.omni import Omni, OmniOutput

__version__ = "0.1.0"
__all__ = ["Omni", "OmniOutput", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("Omni", "OmniOutput"):
        from triptych.pipeline import omni

        return getattr(omni, name)
    raise AttributeError(f"module 'triptych' has no attribute {name!r}")
