"""The stages together take every tensor of the published 30B checkpoint, each once, at the shape it has there."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.models.placement import Layout, Placement
from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.models.qwen3_omni.config import OmniConfig, parse_config
from triptych.models.qwen3_omni.encoders import PREFIXES, encoder_placements
from triptych.models.qwen3_omni.published import meta_model, published_name, published_shapes
from triptych.models.qwen3_omni.talker import Talker
from triptych.models.qwen3_omni.thinker import Thinker

LAYOUTS: tuple[Layout, ...] = ("per_expert", "fused")
SHARED = "thinker.model.embed_tokens.weight"  # the Thinker reads ids with it, the Talker projects it


@cache
def raw_config() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "data" / "qwen3_omni_30b_config.json"
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return raw


@cache
def shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    return published_shapes(raw_config(), layout)


@cache
def stages() -> dict[str, Callable[[Layout], Iterable[Placement]]]:
    config: OmniConfig = parse_config(raw_config())
    assert config.code2wav is not None
    with torch.device("meta"):
        return {
            "thinker": Thinker(config).placements,
            "talker": Talker(config).placements,
            "code2wav": Code2Wav(config.code2wav).placements,
            "encoders": lambda layout: encoder_placements(raw_config()),
        }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_published_tensor_is_taken_by_exactly_one_stage(layout: Layout) -> None:
    taken = Counter(place.source for placements in stages().values() for place in placements(layout))
    assert taken.pop(SHARED) == 2
    assert set(taken.values()) == {1}
    assert taken.keys() == shapes(layout).keys() - {SHARED}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_expects_the_published_shapes(layout: Layout) -> None:
    for placements in stages().values():
        for place in placements(layout):
            assert place.shape == shapes(layout)[place.source], place.source


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stage_takes_only_what_its_prefix_owns(layout: Layout) -> None:
    owned = {"thinker": ("thinker.",), "talker": ("talker.",), "code2wav": ("code2wav.",), "encoders": PREFIXES}
    for stage, placements in stages().items():
        names = {place.source for place in placements(layout)} - {SHARED}
        assert names
        assert all(name.startswith(owned[stage]) for name in names)
        if stage != "encoders":
            assert not any(name.startswith(PREFIXES) for name in names)


def test_published_names_are_those_of_the_released_checkpoint() -> None:
    """Spot checks against names seen in the release, so that a rename inside Transformers cannot go unnoticed."""
    per_expert, fused = shapes("per_expert"), shapes("fused")
    assert per_expert[SHARED] == (152064, 2048)
    assert per_expert["thinker.lm_head.weight"] == (152064, 2048)
    assert per_expert["thinker.model.layers.47.mlp.experts.127.up_proj.weight"] == (768, 2048)
    assert per_expert["thinker.audio_tower.conv2d1.weight"] == (480, 1, 3, 3)
    assert per_expert["thinker.visual.merger_list.2.mlp.2.weight"] == (2048, 4608)
    assert per_expert["talker.model.layers.19.mlp.shared_expert_gate.weight"] == (1, 1024)
    assert per_expert["talker.code_predictor.model.codec_embedding.14.weight"] == (2048, 1024)
    assert per_expert["code2wav.pre_transformer.layers.7.self_attn_layer_scale.scale"] == (1024,)
    assert fused["talker.model.layers.0.mlp.experts.gate_up_proj"] == (128, 768, 1024)
    # 48 x 128 Thinker and 20 x 128 Talker experts of three matrices each replace two stacked tensors a layer.
    assert len(per_expert) - len(fused) == (48 + 20) * (3 * 128 - 2)


def test_no_two_tensors_of_the_class_share_a_published_name() -> None:
    names = [published_name(name) for name in meta_model(raw_config()).state_dict()]
    assert len(names) == len(set(names))
    assert not any(re.match(r"thinker\.model\.(language_model|audio_tower|visual)\.", name) for name in names)
