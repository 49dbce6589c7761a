"""The encoders: equal to Transformers', whole or in slices, alone or with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych.models.qwen3_omni.config import load_config
from triptych.models.qwen3_omni.encoders import PREFIXES, Encoders
from triptych.models.qwen3_omni.media_layout import audio_rows
from triptych.models.qwen3_omni.vision_encoder import Grid
from triptych.models.weights import load_weights

GRIDS: tuple[Grid, ...] = ((1, 2, 2), (1, 4, 6), (1, 34, 22), (1, 2, 60), (2, 6, 10), (5, 10, 4))
LENGTHS = (1, 5, 30, 99, 100, 101, 130, 199, 799, 800, 801, 900, 1630, 2400)
CHUNK, WINDOW = 100, 800


@pytest.fixture(scope="module")
def encoders(nano: Path) -> Encoders:
    raw = json.loads((nano / "config.json").read_text())
    with torch.device("meta"):
        built = Encoders(raw)
    load_weights(built, built.placements, nano, prefixes=PREFIXES, dtype=torch.float32)
    return built


@pytest.fixture(scope="module")
def hf(hf_nano: Any) -> Any:
    return hf_nano.thinker.model


def patches(grid: Grid, seed: int = 0) -> Tensor:
    t, h, w = grid
    return torch.randn(t * h * w, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(seed))


def mel(frames: int, seed: int = 0) -> Tensor:
    return torch.randn(128, frames, generator=torch.Generator().manual_seed(seed))


def vision(encoders: Encoders, x: Tensor, grids: list[Grid]) -> list[Tensor]:
    rows, deepstack = encoders.encode_vision(x, grids)
    return [rows, *deepstack]


def audio(encoders: Encoders, clip: Tensor) -> Tensor:
    return encoders.encode_audio([clip], chunk=min(CHUNK, clip.shape[1]))


def hf_audio(hf: Any, clips: list[Tensor]) -> Tensor:
    """Clips as the feature extractor hands them on: padded to the longest, with a mask."""
    longest = max(clip.shape[1] for clip in clips)
    mask = torch.tensor([[1] * clip.shape[1] + [0] * (longest - clip.shape[1]) for clip in clips])
    padded = torch.stack([torch.nn.functional.pad(clip, (0, longest - clip.shape[1])) for clip in clips])
    with torch.no_grad():
        rows: Tensor = hf.get_audio_features(padded, feature_attention_mask=mask).last_hidden_state
    return rows


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert ours.abs().max() > 0.1  # not equal because both are nothing
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_the_computed_tables_are_those_of_transformers(encoders: Encoders, hf: Any) -> None:
    assert encoders.audio_tower is not None and encoders.visual is not None
    positions = encoders.audio_tower.positions
    assert positions.shape == (13, 32)
    torch.testing.assert_close(
        positions, hf.audio_tower.positional_embedding.positional_embedding[:13], atol=1e-6, rtol=0
    )
    assert torch.equal(encoders.visual.frequencies, hf.visual.rotary_pos_emb.inv_freq)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_pictures_are_encoded_as_transformers_does(encoders: Encoders, hf: Any, grid: Grid) -> None:
    x, sizes = patches(grid), torch.tensor([grid])
    with torch.no_grad():
        found = hf.get_image_features(x, sizes) if grid[0] == 1 else hf.get_video_features(x, sizes)
    ours = vision(encoders, x, [grid])
    theirs = [found.pooler_output[0], *(layer[0] for layer in found.deepstack_features)]
    assert len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other)


def test_several_pictures_in_a_call_are_encoded_as_transformers_does(encoders: Encoders, hf: Any) -> None:
    x = torch.cat([patches(grid, seed) for seed, grid in enumerate(GRIDS)])
    with torch.no_grad():
        found = hf.get_video_features(x, torch.tensor(GRIDS))
    rows, *deepstack = vision(encoders, x, list(GRIDS))
    assert_close(rows, torch.cat(found.pooler_output))
    for mine, other in zip(deepstack, found.deepstack_features, strict=True):
        assert_close(mine, torch.cat(other))


@pytest.mark.parametrize("frames", LENGTHS)
def test_a_clip_is_encoded_as_transformers_does(encoders: Encoders, hf: Any, frames: int) -> None:
    assert_close(audio(encoders, mel(frames)), hf_audio(hf, [mel(frames)]))


def test_clips_of_a_second_and_more_are_encoded_as_transformers_does_several_at_once(
    encoders: Encoders, hf: Any
) -> None:
    clips = [mel(frames, seed=frames) for frames in LENGTHS if frames >= CHUNK]
    assert_close(encoders.encode_audio(clips, chunk=CHUNK), hf_audio(hf, clips))


def test_a_clip_below_one_chunk_gives_the_same_whatever_else_is_said(encoders: Encoders, hf: Any) -> None:
    """In Transformers it does not: beside a longer clip its chunk is padded, and the convolutions see the padding."""
    short, long = mel(30), mel(250, seed=1)
    alone, beside = hf_audio(hf, [short]), hf_audio(hf, [short, long])[:4]
    assert (alone - beside).abs().max() > 1e-3
    assert_close(audio(encoders, short), alone)
    assert_close(encoders.encode_audio([short, mel(30, seed=2)], chunk=30)[:4], alone)


def test_rows_are_as_many_as_the_prompt_reserves(encoders: Encoders, nano: Path) -> None:
    assert encoders.audio_tower is not None
    media = load_config(nano).media
    for frames in range(1, 1000):
        assert encoders.audio_tower.num_rows(frames) == audio_rows(frames, media.n_window)
    for frames in LENGTHS:
        assert len(audio(encoders, mel(frames))) == audio_rows(frames, media.n_window)


@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid[0] > 1], ids=str)
def test_a_video_cut_between_temporal_patches_is_the_whole_video(encoders: Encoders, grid: Grid) -> None:
    t, h, w = grid
    x = patches(grid)
    whole = vision(encoders, x, [grid])
    for length in range(1, t):
        counts = [min(length, t - start) for start in range(0, t, length)]
        parts = x.split([count * h * w for count in counts])  # type: ignore[no-untyped-call]
        cut = [vision(encoders, part, [(count, h, w)]) for part, count in zip(parts, counts, strict=True)]
        for mine, pieces in zip(whole, zip(*cut, strict=True), strict=True):
            assert_close(torch.cat(pieces), mine)


@pytest.mark.parametrize("frames", [frames for frames in LENGTHS if frames > WINDOW])
@pytest.mark.parametrize("windows", [1, 2])
def test_a_clip_cut_between_windows_is_the_whole_clip(encoders: Encoders, frames: int, windows: int) -> None:
    clip = mel(frames)
    parts = torch.split(clip, windows * WINDOW, dim=1)
    cut = torch.cat([encoders.encode_audio([part], chunk=CHUNK) for part in parts])
    assert_close(cut, audio(encoders, clip))
    assert_close(encoders.encode_audio(parts, chunk=CHUNK), cut)


def test_a_cut_elsewhere_is_not_the_whole_clip(encoders: Encoders) -> None:
    """So the tests above can fail."""
    clip = mel(1200)
    cut = torch.cat([encoders.encode_audio([part], chunk=CHUNK) for part in torch.split(clip, 400, dim=1)])
    assert (cut - audio(encoders, clip)).abs().max() > 1e-3


def test_pictures_beside_others_are_encoded_as_alone(encoders: Encoders) -> None:
    alone = [vision(encoders, patches(grid, seed), [grid]) for seed, grid in enumerate(GRIDS)]
    together = vision(encoders, torch.cat([patches(grid, seed) for seed, grid in enumerate(GRIDS)]), list(GRIDS))
    for mine, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert_close(mine, torch.cat(parts))


def test_clips_beside_others_are_encoded_as_alone(encoders: Encoders) -> None:
    clips = [mel(frames, seed=frames) for frames in LENGTHS if frames >= CHUNK]
    alone = torch.cat([audio(encoders, clip) for clip in clips])
    assert_close(encoders.encode_audio(clips, chunk=CHUNK), alone)


def test_what_is_encoded_twice_has_the_same_bits(encoders: Encoders) -> None:
    x, clip = patches((2, 6, 10)), mel(900)
    for first, again in zip(*(vision(encoders, x, [(2, 6, 10)]) for _ in range(2)), strict=True):
        assert torch.equal(first, again)
    assert torch.equal(audio(encoders, clip), audio(encoders, clip))


def test_bfloat16_stays_near_float32(nano: Path, encoders: Encoders) -> None:
    raw = json.loads((nano / "config.json").read_text())
    with torch.device("meta"):
        narrow = Encoders(raw)
    load_weights(narrow, narrow.placements, nano, prefixes=PREFIXES, dtype=torch.bfloat16)
    for mine, other in zip(*(vision(e, patches((2, 6, 10)), [(2, 6, 10)]) for e in (narrow, encoders)), strict=True):
        assert mine.dtype is torch.bfloat16
        torch.testing.assert_close(mine.float(), other, atol=0.1, rtol=0)
    torch.testing.assert_close(audio(narrow, mel(900)).float(), audio(encoders, mel(900)), atol=0.1, rtol=0)
