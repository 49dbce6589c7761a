"""What tests of the engine's theorems run over."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "compiled"])
def eager(request: pytest.FixtureRequest) -> bool:
    """`enforce_eager` of every stage."""
    return bool(request.param)
