"""A checkpoint folder that cannot be served is refused by the file and the key, before any weight is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triptych.errors import CheckpointError
from triptych.models.qwen3_omni.config import load_config
from triptych.models.registry import EMBEDDED, family, locate
from triptych.models.safetensors_index import tensor_index
from triptych.pipeline.launch import load_processor, plan

Config = dict[str, Any]


@pytest.fixture
def folder(nano: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(nano, tmp_path / "copy")


def _text(config: Config, **values: Any) -> None:
    config["thinker_config"]["text_config"].update(values)


def _talker(config: Config, **values: Any) -> None:
    config["talker_config"].update(values)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.update(model_type=["x"]), r"model_type \['x'\] is not served"),
        (lambda c: c.pop("thinker_config"), "key 'thinker_config' is missing"),
        (lambda c: c.update(thinker_config=[]), "thinker_config is not a JSON object"),
        (lambda c: c.update(talker_config=None), "talker_config is not a JSON object"),
        (lambda c: c.update(im_start_token_id="x"), "Expected `int`, got `str` - at `\\$.im_start_token_id`"),
        (lambda c: c.update(tts_bos_token_id=10**6), "tts_bos_token_id: 1000000 is not in the vocabulary, 0 to 1023"),
        (
            lambda c: _text(c, num_hidden_layers=0),
            r"thinker_config\.text_config\.num_hidden_layers: 0 is not at least 1",
        ),
        (lambda c: _text(c, hidden_size=-64), "hidden_size: -64 is not at least 1"),
        (lambda c: _text(c, num_attention_heads=0, head_dim=None), "num_attention_heads 0 give no head_dim"),
        (lambda c: _text(c, num_key_value_heads=3), "no multiple of num_key_value_heads 3"),
        (lambda c: _text(c, num_experts_per_tok=1000), "num_experts_per_tok 1000 is not between 1 and num_experts"),
        (lambda c: _text(c, rope_parameters=[1]), "rope_parameters is not a JSON object"),
        (lambda c: _talker(c, accept_hidden_layer=3), r"accept_hidden_layer: 3 is not between 1 and 2"),
        (lambda c: _talker(c, accept_hidden_layer=0), r"accept_hidden_layer: 0 is not between 1 and 2"),
        (lambda c: _talker(c, speaker_id={"a": 10**6}), r"talker_config\.speaker_id\.a: 1000000 is not in"),
        (lambda c: _talker(c, speaker_id={"a": "x"}), "Expected `int`, got `str`"),
        (lambda c: _talker(c, speaker_id=["a"]), "speaker_id is not a JSON object"),
        (
            lambda c: c["thinker_config"].update(audio_token_id=10**6),
            r"thinker_config\.audio_token_id: 1000000 is not in",
        ),
        (
            lambda c: c["thinker_config"]["audio_config"].update(n_window=0),
            r"audio_config\.n_window: 0 is not at least 1",
        ),
        (
            lambda c: c["thinker_config"]["vision_config"].update(spatial_merge_size=0),
            r"vision_config\.spatial_merge_size: 0 is not at least 1",
        ),
        (lambda c: _talker(c, codec_bos_id=10**6), r"talker_config\.codec_bos_id: 1000000 is not in"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_the_key(
    folder: Path, spoil: Callable[[Config], object], message: str
) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    spoil(config)
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as caught:
        plan(str(folder), platform="cpu")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "\N{BYTE ORDER MARK}x"])
def test_a_config_that_is_no_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        family(folder)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(folder)


@pytest.mark.parametrize(
    "text", ['{"eos_token_id": "x"}', '{"eos_token_id": [5, "x"]}', '{"eos_token_id": 1000000}', "{"]
)
def test_a_wrong_generation_config_is_refused(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"eos_token_id|generation_config\.json"):
        load_config(folder)


def test_without_an_end_of_sequence_a_turn_ends_with_its_marker(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": null}', encoding="utf-8")
    config = load_config(folder)
    assert config.eos_token_ids == (config.im_end_token_id,)


def test_a_tokenizer_without_the_tokens_of_the_config_is_refused(folder: Path) -> None:
    launch = plan(str(folder), platform="cpu")
    load_processor(launch)
    (folder / "tokenizer.json").unlink()  # vocab.json and merges.txt are there, but not the special tokens
    with pytest.raises(
        CheckpointError, match=r"no special token of the id \d+, as config\.json's im_start_token_id says"
    ):
        load_processor(launch)


def test_a_template_that_is_not_text_is_refused(folder: Path) -> None:
    launch = plan(str(folder), platform="cpu")
    template = folder / "chat_template.jinja"
    template.write_bytes(b"\xe4 {{ messages }}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8"):
        load_processor(launch)
    template.unlink()
    template.mkdir()
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read: Is a directory"):
        load_processor(launch)


def test_weights_that_git_lfs_has_not_fetched_are_named_so(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7114484\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        tensor_index(folder)


def test_a_link_to_weights_that_are_gone_is_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.symlink_to(folder / "gone")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: No such file"):
        tensor_index(folder)


@pytest.mark.parametrize("name", ["", "x" * 300, "~nobody-of-that-name/x", "tinyy"])
def test_a_name_that_is_no_model_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="checkpoint folder"):
        locate(name)


def test_a_folder_of_a_models_name_has_to_be_asked_for_as_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate("tiny") == EMBEDDED["tiny"]
    assert "that is ./tiny" in caplog.text
    assert locate("./tiny") == tmp_path / "tiny"
