"""Prompts with media are laid out, and their rows placed, exactly as Transformers does it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from triptych.connectors.wire import FeatureRef, MediaItem
from triptych.media.contract import MediaFeatures
from triptych.models.qwen3_omni.bridge import ASSISTANT_ROWS, HEADER_ROWS, talker_prompt_token_ids, talker_spans
from triptych.models.qwen3_omni.config import OmniConfig, load_config
from triptych.models.qwen3_omni.media_layout import audio_rows, expand
from triptych.models.qwen3_omni.positions import mrope_positions
from triptych.pipeline.prepare import media_items

NOTHING = FeatureRef(segment="", dtype="uint8", shape=())
FPS = (0.3, 0.7, 1.0, 1.5, 2.0, 3.0, 7.0, 23.976, 29.97)


@pytest.fixture(scope="module")
def config(nano: Path) -> OmniConfig:
    return load_config(nano)


def image(rng: random.Random) -> MediaFeatures:
    grid = (1, 2 * rng.randint(1, 9), 2 * rng.randint(1, 9))
    return MediaFeatures(kind="image", digest=b"", features=NOTHING, grid=grid)


def audio(rng: random.Random) -> MediaFeatures:
    return MediaFeatures(kind="audio", digest=b"", features=NOTHING, num_mel_frames=rng.choice((5, 99, 100, 101, 730)))


def video(rng: random.Random) -> MediaFeatures:
    grid = (rng.randint(1, 7), 2 * rng.randint(1, 20), 2 * rng.randint(1, 4))
    return MediaFeatures(kind="video", digest=b"", features=NOTHING, grid=grid, second_per_grid=2 / rng.choice(FPS))


def sounding(rng: random.Random) -> MediaFeatures:
    silent = video(rng)
    length = max(1, round(100 * silent.grid[0] * silent.second_per_grid * rng.choice((0.1, 0.5, 1.0, 2.0))))
    sound = MediaFeatures(kind="audio", digest=b"", features=NOTHING, num_mel_frames=length)
    return MediaFeatures(
        kind="video",
        digest=b"",
        features=NOTHING,
        grid=silent.grid,
        second_per_grid=silent.second_per_grid,
        sound=sound,
    )


@dataclass
class Prompt:
    """A conversation as token ids, with its media."""

    config: OmniConfig
    template: list[int] = field(default_factory=list)
    parts: list[MediaFeatures] = field(default_factory=list)

    def turn(self, role: int, parts: Sequence[MediaFeatures | int]) -> None:
        """A turn whose numbers stand for so many tokens of text."""
        media = self.config.media
        pads = {"image": self.config.image_token_id, "video": self.config.video_token_id}
        self.template += [self.config.im_start_token_id, role, 10]
        for part in parts:
            if isinstance(part, int):
                self.template += range(20, 20 + part)
                continue
            self.parts.append(part)
            if part.kind == "audio":
                self.template += [media.audio_start_token_id, self.config.audio_token_id, media.audio_end_token_id]
            else:
                self.template += [media.vision_start_token_id, pads[part.kind], media.vision_end_token_id]
        self.template += [self.config.im_end_token_id, 10]

    def finish(self) -> tuple[tuple[int, ...], tuple[MediaItem, ...]]:
        header = [self.config.im_start_token_id, self.config.assistant_token_id, 10]
        ids, spans = expand([*self.template, *header], self.parts, self.config)
        return ids, media_items(self.parts, spans)


def conversation(config: OmniConfig, rng: random.Random, makers: Sequence[Any], *, users_only: bool) -> Prompt:
    prompt = Prompt(config)
    roles = [config.user_token_id]
    if rng.random() < 0.5:
        roles = [config.system_token_id, config.user_token_id, config.assistant_token_id, config.user_token_id]
    for role in roles:
        parts: list[MediaFeatures | int] = []
        for _ in range(rng.randint(0, 3)):
            if makers and (role == config.user_token_id or not users_only):
                parts.append(rng.choice(makers)(rng))
            if rng.random() < 0.7:
                parts.append(rng.randint(1, 6))
        prompt.turn(role, parts)
    return prompt


def hf_inputs(items: Sequence[MediaItem]) -> dict[str, Any]:
    """The arguments of `get_rope_index` for these media."""
    grids = {kind: [item.grid for item in items if item.kind == kind] for kind in ("image", "video")}
    seconds = [item.second_per_grid for item in items if item.kind == "video"]
    lengths = [item.num_mel_frames for item in items if item.kind == "audio"]
    return {
        "image_grid_thw": torch.tensor(grids["image"]) if grids["image"] else None,
        "video_grid_thw": torch.tensor(grids["video"]) if grids["video"] else None,
        "audio_seqlens": torch.tensor(lengths) if lengths else None,
        "second_per_grids": torch.tensor(seconds) if seconds else None,
    }


MIXES = {
    "text": ((), 5),
    "audio": ((audio,), 15),
    "image": ((image,), 20),
    "video": ((video,), 30),
    "sounding": ((sounding,), 60),
    "still": ((image, audio, video), 60),
    "moving": ((image, audio, sounding), 100),
}


@pytest.mark.parametrize("mix", MIXES)
def test_thinker_positions_equal_get_rope_index(config: OmniConfig, hf_nano: Any, mix: str) -> None:
    makers, count = MIXES[mix]
    for seed in range(count):
        rng = random.Random(f"{mix} {seed}")
        prompt = conversation(config, rng, makers, users_only=not makers)
        ids, items = prompt.finish()
        positions, delta = mrope_positions(ids, items, config)
        expected, _ = hf_nano.thinker.get_rope_index(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            use_audio_in_video=any(item.in_video for item in items),
            **hf_inputs(items),
        )
        np.testing.assert_array_equal(positions, expected[:, 0].numpy(), err_msg=f"{mix} {seed}")
        assert len(ids) + delta == expected[0, 0, -1].item() + 1


@pytest.fixture
def hf_talker(hf_nano: Any) -> Iterator[Any]:
    """Transformers' Talker. Its config lacks the `audio_config` that its own code reads for pictures beside sound."""
    hf_nano.talker.config.audio_config = hf_nano.thinker.config.audio_config
    yield hf_nano.talker
    del hf_nano.talker.config.audio_config


@pytest.mark.parametrize("mix", [*MIXES, "all"])
def test_talker_positions_equal_get_rope_index_wherever_it_works(config: OmniConfig, hf_talker: Any, mix: str) -> None:
    """`all` puts silent videos beside such with sound: Transformers may lose count there, and says so by an error."""
    makers, count = MIXES.get(mix, ((image, audio, video, sounding), 150))
    worked = 0
    for seed in range(count):
        rng = random.Random(f"{mix} {seed}")
        ids, items = conversation(config, rng, makers, users_only=True).finish()
        own, own_items = talker_prompt_token_ids(ids, config), talker_media(ids, items, config)
        positions, delta = mrope_positions(own, own_items, config, talker=True)
        assert len(own) + delta == positions[0, -1] + 1
        try:
            expected = talker_reference(hf_talker, own, own_items)
        except (IndexError, RuntimeError):
            assert mix == "all"
            continue
        worked += 1
        later = np.arange(len(own), expected.shape[1]) + delta
        found = np.concatenate([positions, np.broadcast_to(later.astype(np.float32), (3, len(later)))], axis=1)
        np.testing.assert_array_equal(found, expected, err_msg=f"{mix} {seed}")
    assert worked > count / 2


def talker_media(ids: Sequence[int], items: Sequence[MediaItem], config: OmniConfig) -> list[MediaItem]:
    spans = talker_spans(ids, items, config)
    return [msgspec.structs.replace(items[span.part], start=span.start, end=span.end) for span in spans]


def talker_reference(hf_talker: Any, ids: Sequence[int], items: Sequence[MediaItem]) -> Any:
    """As `generate` calls it: without `use_audio_in_video`, and not at all where there is no media."""
    rows = [*ids, *[9] * (ASSISTANT_ROWS - HEADER_ROWS)]
    if not items:
        return np.broadcast_to(np.arange(len(rows), dtype=np.float32), (3, len(rows)))
    expected, _ = hf_talker.get_rope_index(
        torch.tensor([rows]), attention_mask=torch.ones(1, len(rows), dtype=torch.long), **hf_inputs(items)
    )
    return expected[:, 0].numpy()


def hf_replacement(part: MediaFeatures, config: OmniConfig) -> str:
    """What Transformers puts in place of the placeholder of a part: I, A, V for rows, ( and ) around sound."""
    merge = config.media.spatial_merge_size
    processor = SimpleNamespace(
        image_token="I",
        audio_token="A",
        video_token="V",
        audio_bos_token="(",
        audio_eos_token=")",
        image_processor=SimpleNamespace(merge_size=merge),
        video_processor=SimpleNamespace(merge_size=merge),
    )
    of = Qwen3OmniMoeProcessor
    processor.replace_video_with_audio_token = of.replace_video_with_audio_token.__get__(processor)
    sound = part if part.kind == "audio" else part.sound
    audios = {"num_audio_tokens": [audio_rows(sound.num_mel_frames, config.media.n_window)] if sound else []}
    grids = {"image_grid_thw": np.array([part.grid]), "video_grid_thw": np.array([part.grid])}
    if part.kind == "image":
        return str(of.replace_image_token(processor, grids, 0))
    if part.kind == "audio":
        return str(of.replace_audio_token(processor, audios, 0))
    return str(
        of.replace_video_token(
            processor,
            grids | {"video_second_per_grid": [part.second_per_grid]},
            0,
            audios,
            [0 if sound else None],
            load_audio_from_video=True,
            position_id_per_seconds=float(config.media.position_id_per_seconds),
        )
    )


@pytest.mark.parametrize("maker", [image, audio, video, sounding])
def test_placeholders_are_repeated_as_transformers_does(config: OmniConfig, maker: Any) -> None:
    letters = {
        config.image_token_id: "I",
        config.audio_token_id: "A",
        config.video_token_id: "V",
        config.media.audio_start_token_id: "(",
        config.media.audio_end_token_id: ")",
    }
    for seed in range(100):
        part = maker(random.Random(seed))
        pads = {"image": config.image_token_id, "audio": config.audio_token_id, "video": config.video_token_id}
        ids, spans = expand([1, pads[part.kind], 2], [part], config)
        written = "".join(letters[token] for token in ids[1:-1])
        assert (ids[0], ids[-1]) == (1, 2)
        assert written == hf_replacement(part, config)
        sound = 1 if part.sound else 0
        assert [(span.start, span.end, span.in_video) for span in spans] == [
            (1 + sound, len(ids) - 1 - sound, False),
            (1 + sound, len(ids) - 1 - sound, True),
        ][: 1 + sound]


def test_audio_rows_equal_transformers() -> None:
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    for window in (50, 20):
        lengths = np.arange(1, 2000)
        expected = _get_feat_extract_output_lengths(lengths, window)
        assert [audio_rows(int(length), window) for length in lengths] == expected.tolist()


@pytest.mark.parametrize("kinds", ["image", "audio", "video", "sounding", "sounding image", "image audio"])
def test_positions_are_those_of_generate_through_the_answer(
    config: OmniConfig, hf_nano: Any, hf_talker: Any, kinds: str
) -> None:
    """The tall video of `sounding` reaches farther than the text behind it: the answer goes on after the text."""
    silent = MediaFeatures(kind="video", digest=b"", features=NOTHING, grid=(1, 40, 4), second_per_grid=0.7)
    clip = MediaFeatures(kind="audio", digest=b"", features=NOTHING, num_mel_frames=130)
    choice = {
        "image": MediaFeatures(kind="image", digest=b"", features=NOTHING, grid=(1, 4, 10)),
        "audio": clip,
        "video": MediaFeatures(kind="video", digest=b"", features=NOTHING, grid=(3, 4, 4), second_per_grid=0.7),
        "sounding": msgspec.structs.replace(silent, sound=msgspec.structs.replace(clip, num_mel_frames=30)),
    }
    prompt = Prompt(config)
    prompt.turn(config.system_token_id, [4])
    for kind in kinds.split():
        prompt.turn(config.user_token_id, [2, choice[kind], 1])
    ids, items = prompt.finish()
    own, own_items = talker_prompt_token_ids(ids, config), talker_media(ids, items, config)
    seen = generated_positions(hf_nano, ids, items)
    for found, (positions, delta) in (
        (seen["thinker"], mrope_positions(ids, items, config)),
        (seen["talker"], mrope_positions(own, own_items, config, talker=True)),
    ):
        later = np.arange(positions.shape[1], found.shape[1]) + delta
        expected = np.concatenate([positions, np.broadcast_to(later.astype(np.float32), (3, len(later)))], axis=1)
        assert found.shape[1] > positions.shape[1] + 2
        np.testing.assert_array_equal(found, expected)


def generated_positions(hf_nano: Any, ids: Sequence[int], items: Sequence[MediaItem]) -> dict[str, Any]:
    """The positions, float32 [3, rows], that reach each decoder while Transformers generates text and speech."""
    generator = torch.Generator().manual_seed(1)
    inputs: dict[str, Any] = {"use_audio_in_video": any(item.in_video for item in items)}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        grids = torch.tensor([item.grid for item in items if item.kind == kind])
        if len(grids):
            inputs[f"{kind}_grid_thw"] = grids
            inputs[pixels] = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 16 * 16, generator=generator)
    seconds = [item.second_per_grid for item in items if item.kind == "video"]
    if seconds:
        inputs["video_second_per_grid"] = torch.tensor(seconds)
    lengths = torch.tensor([item.num_mel_frames for item in items if item.kind == "audio"])
    if len(lengths):
        inputs["feature_attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        inputs["input_features"] = torch.randn(len(lengths), 128, int(lengths.max()), generator=generator)
    seen: dict[str, list[Any]] = {"thinker": [], "talker": []}
    hooks = [
        decoder.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: seen[name].append(kwargs["position_ids"][-3:, 0]), with_kwargs=True
        )
        for name, decoder in (("thinker", hf_nano.thinker.model.language_model), ("talker", hf_nano.talker.model))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf_nano.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            thinker_max_new_tokens=5,
            thinker_eos_token_id=None,
            talker_max_new_tokens=5,
            talker_eos_token_id=None,
            talker_do_sample=False,
            **inputs,
        )
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts, dim=-1).float().numpy() for name, parts in seen.items()}
