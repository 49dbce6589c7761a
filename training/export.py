"""Assemble the trained parts into a checkpoint folder in the published layout."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.checkpoints import load_state, weights_of
from training.evaluate_codec import load_codec
from training.parts import SHARPER, text_embedding
from training.tiny_config import PREPROCESSOR, tiny_config
from training.tokenizer import build_tokenizer
from triptych.models.qwen3_omni.published import meta_model, published_name, split
from triptych.models.qwen3_omni.synthetic_cache import MARKER
from triptych.models.qwen3_omni.synthetic_tokenizer import token_id, write_tokenizer

STORED = torch.float16  # half the size; config.json says float32, so every loader computes in that
RESIDUAL_HEADS = "talker.code_predictor.lm_head."
_HEAD_ROOM = 60_000.0  # float16 ends at 65,504


def trained_tensors(work: Path) -> dict[str, Tensor]:
    """Every trained tensor by the class's name. Raises FileNotFoundError where a stage was never trained."""
    codec, _ = load_codec(work)
    tensors = {f"code2wav.{name}": tensor for name, tensor in codec.decoder.state_dict().items()}
    for name, part in _trained(work, "talker").items():
        if name.startswith("talker."):  # the heads of its auxiliary losses have done their work
            tensors[name] = part * SHARPER if name.startswith(RESIDUAL_HEADS) else part
    if (work / "senses" / "state.pt").exists():  # the whole Thinker, under the class's names
        return tensors | {f"thinker.{name}": part for name, part in _trained(work, "senses").items()}
    for name, part in _trained(work, "thinker").items():
        tensors[f"thinker.{name.replace('model.', 'model.language_model.', 1)}"] = part
    for stage, place in (("eyes", "visual"), ("ears", "audio_tower")):
        if (work / stage / "state.pt").exists():
            tensors |= {f"thinker.model.{place}.{name}": part for name, part in _trained(work, stage).items()}
    return tensors


def _trained(work: Path, stage: str) -> dict[str, Tensor]:
    path = work / stage / "state.pt"
    state = load_state(path)
    if state is None:
        raise FileNotFoundError(f"{path} does not exist; train the {stage} first")
    return weights_of(state)


def export(work: Path, folder: Path) -> None:
    """Write the checkpoint of everything trained under `work` to `folder`, which is replaced.

    Encoders are zeros where the senses were not trained. Raises ValueError where a trained tensor has no place or the
    wrong shape, or does not fit the stored type.
    """
    tokenizer = build_tokenizer()
    raw = tiny_config(tokenizer)
    trained = trained_tensors(work)
    thinker = raw["thinker_config"]["text_config"]
    trained["thinker.model.language_model.embed_tokens.weight"] = text_embedding(
        thinker["vocab_size"], thinker["hidden_size"]
    )
    stored: dict[str, Tensor] = {}
    for name, place in meta_model(raw).state_dict().items():
        tensor = trained.pop(name, None)
        if tensor is None:
            if not name.startswith(
                ("thinker.model.audio_tower.", "thinker.model.visual.", "talker.hidden_projection.")
            ):
                raise ValueError(f"no stage has trained {name}")
            tensor = torch.zeros(place.shape)
        if tensor.shape != place.shape:
            raise ValueError(f"{name} was trained as {list(tensor.shape)}, config.json asks for {list(place.shape)}")
        if not bool((tensor.abs() < _HEAD_ROOM).all()):
            raise ValueError(f"{name} holds values that {STORED} does not")
        for part, value in split(published_name(name), tensor.to(STORED), "per_expert"):
            stored[part] = value.contiguous()
    if trained:
        raise ValueError(f"the checkpoint has no place for {', '.join(sorted(trained)[:5])}")
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    _write_json(staging / "config.json", raw)
    _write_json(staging / "generation_config.json", _generation(tokenizer))
    _write_json(staging / MARKER, {"profile": "tiny_voice_cpu"})
    write_tokenizer(tokenizer, staging)
    _write_json(staging / "preprocessor_config.json", preprocessor_config())
    shutil.copyfile(Path(__file__).parent / "model_card.md", staging / "README.md")
    save_file(stored, staging / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(staging / "config.json", staging / "model.safetensors")  # safetensors writes for the owner alone
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)


def _generation(tokenizer: Any) -> dict[str, Any]:
    return {
        "eos_token_id": [token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")],
        "pad_token_id": token_id(tokenizer, "<|endoftext|>"),
        "talker_max_new_tokens": 1024,
    }


def preprocessor_config() -> dict[str, Any]:
    """The settings of the image processor and the feature extractor. Pictures stay small, as in training."""
    return {
        "processor_class": "Qwen3OmniMoeProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": PREPROCESSOR.num_mel_bins,
        "sampling_rate": PREPROCESSOR.sampling_rate,
        "hop_length": PREPROCESSOR.hop_length,
        "n_fft": PREPROCESSOR.n_fft,
        "chunk_length": 30,
        "n_samples": 480_000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "dither": 0.0,
        "return_attention_mask": True,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PREPROCESSOR.patch_size,
        "temporal_patch_size": PREPROCESSOR.temporal_patch_size,
        "merge_size": PREPROCESSOR.merge_size,
        "min_pixels": PREPROCESSOR.image_min_pixels,
        "max_pixels": PREPROCESSOR.image_max_pixels,
        "image_mean": list(PREPROCESSOR.image_mean),
        "image_std": list(PREPROCESSOR.image_std),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    export(arguments.work, arguments.out)
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
