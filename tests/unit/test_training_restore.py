"""An exported checkpoint gives the trainers back what it was made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from training.export import export
from training.restore import restore
from triptych.models.registry import EMBEDDED


def test_what_is_restored_exports_as_the_same_checkpoint(tmp_path: Path) -> None:
    work, again = tmp_path / "work", tmp_path / "again"
    restore(EMBEDDED["tiny"], work)
    export(work, again)
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "preprocessor_config.json",
        "triptych.json",
    ):
        assert (again / name).read_bytes() == (EMBEDDED["tiny"] / name).read_bytes(), name
    shipped, exported = (load_file(folder / "model.safetensors") for folder in (EMBEDDED["tiny"], again))
    assert shipped.keys() == exported.keys()
    for name, tensor in shipped.items():
        if name == "code2wav.code_embedding.weight":  # folded anew from the codebooks
            torch.testing.assert_close(exported[name], tensor, rtol=2e-3, atol=2e-3)
        else:
            assert torch.equal(exported[name], tensor), name
    with pytest.raises(FileExistsError, match="would be lost"):
        restore(EMBEDDED["tiny"], work)
