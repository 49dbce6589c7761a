"""Synthetic checkpoints: Transformers loads them unchanged, a seed fixes them, and a half-made one is never seen."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration
from typer.testing import CliRunner

from triptych.cli.checkpoint import app
from triptych.errors import CheckpointError
from triptych.models.placement import Layout
from triptych.models.qwen3_omni import synthetic
from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.models.qwen3_omni.config import load_config, parse_config
from triptych.models.qwen3_omni.encoders import PREFIXES, Encoders
from triptych.models.qwen3_omni.published import published_shapes
from triptych.models.qwen3_omni.synthetic import cached_checkpoint, make_checkpoint
from triptych.models.qwen3_omni.synthetic_config import DIMENSIONS, SIZES, SPEAKERS, Size, build_config
from triptych.models.qwen3_omni.synthetic_tokenizer import SPECIAL_TOKENS, build_tokenizer, readable_ids, token_id
from triptych.models.qwen3_omni.talker import Talker
from triptych.models.qwen3_omni.thinker import Thinker
from triptych.models.safetensors_index import tensor_index
from triptych.models.weights import load_weights


def raw_config(size: Size) -> dict[str, Any]:
    dimensions = DIMENSIONS[size]
    return build_config(dimensions, partial(token_id, build_tokenizer(dimensions.vocab_size, 0)))


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        values |= load_file(file)
    return values


@pytest.mark.parametrize(("layout", "shards"), [("per_expert", 1), ("per_expert", 3), ("fused", 1)])
def test_transformers_loads_it_with_nothing_missing_or_left_over(tmp_path: Path, layout: Layout, shards: int) -> None:
    folder = make_checkpoint(tmp_path / "made", "nano", layout=layout, shards=shards)
    model, report = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32


def test_it_holds_exactly_the_published_tensors(nano: Path) -> None:
    raw = json.loads((nano / "config.json").read_text())
    found = {name: tensor.shape for name, tensor in tensor_index(nano).items()}
    assert found == published_shapes(raw, "per_expert")


def test_every_stage_and_the_encoders_load_it(nano: Path) -> None:
    config, raw = load_config(nano), json.loads((nano / "config.json").read_text())
    assert config.code2wav is not None
    with torch.device("meta"):
        stages: list[Thinker | Talker | Code2Wav] = [Thinker(config), Talker(config), Code2Wav(config.code2wav)]
    for stage in stages:
        load_weights(stage, stage.placements, nano, prefixes=stage.prefixes, dtype=torch.float32)
    encoders = Encoders(raw)
    load_weights(encoders, encoders.placements, nano, prefixes=PREFIXES, dtype=torch.float32)
    for name, tensor in encoders.state_dict().items():
        assert torch.equal(tensor, tensors_of(nano)[f"thinker.{name}"])


def test_a_stage_loads_when_the_files_of_the_others_are_gone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "made", "nano", shards=12)
    for file in {tensor.file for name, tensor in tensor_index(folder).items() if name.startswith("code2wav.")}:
        file.unlink()
    config = load_config(folder)
    with torch.device("meta"):
        thinker = Thinker(config)
    load_weights(thinker, thinker.placements, folder, prefixes=thinker.prefixes, dtype=torch.float32)


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, again = (make_checkpoint(tmp_path / name, "nano") for name in ("first", "again"))
    other = make_checkpoint(tmp_path / "other", "nano", seed=1)
    assert digests(first) == digests(again)
    assert digests(first)["model.safetensors"] != digests(other)["model.safetensors"]


def test_layout_and_sharding_do_not_change_the_values(tmp_path: Path) -> None:
    single = tensors_of(make_checkpoint(tmp_path / "a", "nano"))
    sharded = tensors_of(make_checkpoint(tmp_path / "b", "nano", shards=4))
    fused = tensors_of(make_checkpoint(tmp_path / "c", "nano", layout="fused"))
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)
    stacked = fused["talker.model.layers.1.mlp.experts.gate_up_proj"]
    for expert, matrix in enumerate(stacked):
        name = f"talker.model.layers.1.mlp.experts.{expert}"
        parts = torch.cat([single[f"{name}.gate_proj.weight"], single[f"{name}.up_proj.weight"]])
        assert torch.equal(matrix, parts)


def test_shards_are_of_about_equal_size(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "made", "nano", shards=3)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize("size", SIZES)
def test_every_size_makes_1920_samples_a_frame_and_fits_its_own_config(size: Size) -> None:
    config = parse_config(raw_config(size))
    assert config.talker is not None and config.code2wav is not None
    assert config.code2wav.samples_per_frame == 1920
    assert 0 < config.talker.accept_hidden_layer <= config.thinker.num_hidden_layers
    assert tuple(config.talker.speaker_id) == SPEAKERS
    assert config.talker.code_predictor.hidden_size == config.talker.text.hidden_size
    for decoder in (config.thinker, config.talker.text):
        assert decoder.mrope_section is not None and sum(decoder.mrope_section) == decoder.head_dim // 2
    text, codebook = config.talker.text, config.talker.code_predictor.vocab_size
    ids = (config.talker.codec_eos_token_id, config.talker.codec_pad_id, *config.talker.speaker_id.values())
    assert text.vocab_size - 1024 == codebook
    assert all(codebook <= token < text.vocab_size for token in ids)


def test_the_benchmark_checkpoint_is_the_one_that_peers_were_measured_with() -> None:
    parameters = sum(math.prod(shape) for shape in published_shapes(raw_config("bench"), "fused").values())
    assert round(parameters / 1e6, 1) == 20.4


def test_a_checkpoint_without_ends_leaves_the_length_to_the_limits(tmp_path: Path) -> None:
    values = tensors_of(make_checkpoint(tmp_path / "bench", "bench"))
    config = load_config(tmp_path / "bench")
    assert config.talker is not None
    assert not values["thinker.lm_head.weight"][list(config.eos_token_ids)].any()
    assert not values["talker.codec_head.weight"][config.talker.codec_eos_token_id].any()
    hidden = torch.randn(64, config.thinker.hidden_size)
    logits = hidden @ values["thinker.lm_head.weight"][300:4000].float().T
    assert 2.7 < logits.std() < 3.3


# What the nano one says


def test_text_ends_by_itself_after_a_few_dozen_tokens(nano: Path, hf_nano: Any) -> None:
    config = load_config(nano)
    ids = torch.randint(256, 1000, (8, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = hf_nano.thinker(input_ids=ids).logits
    chance = logits.softmax(-1)[..., list(config.eos_token_ids)].sum(-1).mean()
    assert 0.01 < chance < 0.08


def test_speech_ends_by_itself_after_a_few_dozen_frames(nano: Path, hf_nano: Any) -> None:
    config = load_config(nano)
    assert config.talker is not None
    generator = torch.Generator().manual_seed(0)
    talker = hf_nano.talker
    with torch.inference_mode():
        text = talker.text_projection(hf_nano.thinker.model.language_model.embed_tokens.weight[256:512])
        codes = torch.randint(0, 256, (16, 256), generator=generator)
        tables = [talker.model.codec_embedding, *talker.code_predictor.model.codec_embedding]
        rows = text + sum(table(row) for table, row in zip(tables, codes, strict=True))
        hidden = talker.model(inputs_embeds=rows.view(8, 32, -1)).last_hidden_state
        logits = talker.codec_head(hidden)
        kept = (logits[..., [*range(256), config.talker.codec_eos_token_id]] / 0.9).topk(50)
        chance = (kept.values.softmax(-1) * (kept.indices == 256)).sum(-1).mean()
    assert 0.01 < chance < 0.08


def test_the_waveform_is_neither_silent_nor_clipped(hf_nano: Any) -> None:
    codes = torch.randint(0, 256, (1, 16, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wav = hf_nano.code2wav(codes)
    assert wav.shape[-1] == 20 * 1920 - 555
    assert 0.03 < wav.square().mean().sqrt() < 0.3
    assert wav.abs().max() < 1
    assert wav.mean().abs() < 0.02


# The tokenizer


def test_transformers_and_tokenizers_agree_on_the_tokenizer(nano: Path) -> None:
    ours, theirs = Tokenizer.from_file(str(nano / "tokenizer.json")), AutoTokenizer.from_pretrained(nano)
    text = "<|im_start|>user\nThe river's 42 lanterns: naïve, 你好 🙂?\n\n  x<|im_end|>\n<tts_pad>"
    assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert len(theirs) == ours.get_vocab_size() == load_config(nano).thinker.vocab_size


@pytest.mark.parametrize("vocab_size", [1024, 4160])
def test_vocabulary_is_bytes_then_merges_then_special_tokens(vocab_size: int) -> None:
    tokenizer = build_tokenizer(vocab_size, seed=5)
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(vocab_size))
    assert [tokenizer.id_to_token(vocab_size - len(SPECIAL_TOKENS) + at) for at in range(13)] == list(SPECIAL_TOKENS)
    assert all(len(str(tokenizer.id_to_token(at))) == 1 for at in range(256))
    assert sum(readable_ids(tokenizer)) > 0.8 * vocab_size


def test_roles_and_the_generation_prompt_have_the_length_the_talker_counts_on(nano: Path) -> None:
    tokenizer, config = Tokenizer.from_file(str(nano / "tokenizer.json")), load_config(nano)
    newline = tokenizer.encode("\n").ids
    assert len(newline) == 1
    roles = {"system": config.system_token_id, "user": config.user_token_id, "assistant": config.assistant_token_id}
    for role, token in roles.items():
        assert tokenizer.encode(f"<|im_start|>{role}\n").ids == [config.im_start_token_id, token, *newline]


def test_a_vocabulary_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 300 is too small"):
        build_tokenizer(300, 0)


def test_the_chat_template_places_media_and_text(nano: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(nano)
    parts = [{"type": kind} for kind in ("image", "audio", "video")] + [{"type": "text", "text": " see?"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|vision_end|><|audio_start|><|audio_pad|><|audio_end|>"
        "<|vision_start|><|video_pad|><|vision_end|> see?<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_chat_template_refuses_a_part_it_does_not_know(nano: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(nano)
    with pytest.raises(Exception, match="'smell' is not one of text, image, audio, video"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "smell"}]}], tokenize=False)


# Complete or not at all


def test_an_interrupted_make_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic, "_write_weights", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path / "made", "nano")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_make_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "made", "nano")
    before = digests(folder)

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(synthetic, "_write_weights", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        make_checkpoint(folder, "nano", seed=1)
    assert digests(folder) == before
    assert list(tmp_path.iterdir()) == [folder]


def test_only_its_own_or_empty_folders_are_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    first = digests(make_checkpoint(folder, "nano"))
    assert digests(make_checkpoint(folder, "nano", seed=1)) != first
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="precious is not empty"):
        make_checkpoint(precious, "nano")
    assert (precious / "thesis.tex").exists()
    make_checkpoint(precious, "nano", force=True)
    assert not (precious / "thesis.tex").exists()
    with pytest.raises(CheckpointError, match="is a file"):
        make_checkpoint(folder / "config.json", "nano")


@pytest.mark.parametrize("shards", [0, 101])
def test_a_number_of_shards_out_of_range_is_refused(tmp_path: Path, shards: int) -> None:
    with pytest.raises(ValueError, match=f"shards is {shards}"):
        make_checkpoint(tmp_path / "made", "nano", shards=shards)


def test_two_processes_can_fill_the_cache_at_once(tmp_path: Path) -> None:
    script = (
        "from triptych.models.qwen3_omni.synthetic import cached_checkpoint\n"
        "print('ready', flush=True); input(); print(cached_checkpoint('nano'))"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    answers = {child: child.communicate("\n", timeout=60) for child in children}
    folders = {out.strip() for out, _ in answers.values()}
    assert [child.returncode for child in children] == [0, 0], answers.values()
    assert len(folders) == 1
    folder = Path(folders.pop())
    assert list(folder.parent.iterdir()) == [folder]
    load_config(folder)


def test_the_cache_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cached_checkpoint("nano")
    assert folder.is_relative_to(tmp_path)
    monkeypatch.setattr(synthetic, "_write", lambda *_: pytest.fail("made twice"))
    assert cached_checkpoint("nano") == folder


# The command


def test_the_command_makes_what_its_options_ask_for(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    done = CliRunner().invoke(app, ["make", str(folder), "--seed", "3", "--layout", "fused", "--shards", "2"])
    assert done.exit_code == 0, done.output
    assert str(folder) in done.output
    expected = make_checkpoint(tmp_path / "expected", "nano", seed=3, layout="fused", shards=2)
    assert digests(folder) == digests(expected)


def test_the_command_refuses_a_folder_with_other_files_until_forced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    refused = CliRunner().invoke(app, ["make", str(tmp_path)])
    assert isinstance(refused.exception, CheckpointError)
    assert "--force" in str(refused.exception)
    assert CliRunner().invoke(app, ["make", str(tmp_path), "--force"]).exit_code == 0
