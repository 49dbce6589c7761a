"""Fixtures shared by the suite: one nano checkpoint, and Transformers' view of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.models.qwen3_omni.synthetic import make_checkpoint

# The suite shares its cores with the servers it starts; and the bits of a product depend on how it is split.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano random checkpoint in the published layout."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "nano", "nano")


@pytest.fixture(scope="session")
def hf_nano(nano: Path) -> Any:
    """The same checkpoint in Transformers, float32."""
    from transformers import Qwen3OmniMoeForConditionalGeneration

    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(nano, dtype=torch.float32).eval()
