"""Random-weight checkpoints in the published layout, which Transformers loads unchanged.

They stand in for the 30B model wherever weights do not matter: tests, benchmarks, a first try on a laptop. Every tensor
is drawn from its own generator, keyed by seed and name, so a seed gives the same values in every layout and sharding.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from triptych.errors import CheckpointError
from triptych.models.placement import Layout
from triptych.models.qwen3_omni.published import meta_model, published_name, split
from triptych.models.qwen3_omni.synthetic_cache import MARKER, VERSION, cached_folder
from triptych.models.qwen3_omni.synthetic_config import DIMENSIONS, Dimensions, Size, build_config
from triptych.models.qwen3_omni.synthetic_tokenizer import build_tokenizer, readable_ids, token_id, write_tokenizer

_ANCHOR = 6.0  # channel 0 of the residual stream, the same at every position of a checkpoint that ends by itself
_ANCHOR_RMS = 1.85  # of the whole stream before the final norm, measured: the norm divides the anchor by it


def make_checkpoint(
    folder: Path,
    size: Size,
    seed: int = 0,
    shards: int = 1,
    layout: Layout = "per_expert",
    force: bool = False,
) -> Path:
    """Write a checkpoint to `folder` and return it: complete, or not at all.

    A folder that this function made before is replaced; `force` replaces any folder. Raises CheckpointError when
    `folder` holds anything else or cannot be written, and ValueError when `shards` is not between 1 and 100.
    """
    if not 1 <= shards <= 100:
        raise ValueError(f"shards is {shards}; it must be between 1 and 100")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder")
    if folder.exists() and not force and not _is_replaceable(folder):
        raise CheckpointError(
            f"{folder} is not empty and holds no checkpoint made here; name another folder, or use --force to delete it"
        )
    staging = _stage(folder, size, seed, shards, layout)
    retired = folder.with_name(f".{folder.name}.{uuid4().hex}.old")
    try:
        if folder.exists():
            folder.rename(retired)
        staging.rename(folder)
    except OSError as error:
        raise CheckpointError(f"cannot put a checkpoint at {folder}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(retired, ignore_errors=True)
    return folder


def cached_checkpoint(size: Size) -> Path:
    """The checkpoint of a size in the user's cache folder, made on first use.

    Safe when several processes start at once: each makes its own copy aside and the first rename wins.
    """
    folder = cached_folder(size)
    if (folder / MARKER).exists():
        return folder
    staging = _stage(folder, size, 0, 1, "per_expert")
    try:
        staging.rename(folder)
    except OSError as error:
        if not (folder / MARKER).exists():
            raise CheckpointError(f"cannot put a checkpoint at {folder}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _is_replaceable(folder: Path) -> bool:
    """Whether `folder` may be written over: an empty one, or one that `make_checkpoint` made."""
    return (folder / MARKER).exists() or not any(folder.iterdir())


def _stage(folder: Path, size: Size, seed: int, shards: int, layout: Layout) -> Path:
    """Make the whole checkpoint in a fresh folder beside `folder`, which nothing looks at."""
    staging = folder.with_name(f".{folder.name}.{uuid4().hex}.partial")
    try:
        staging.mkdir(parents=True)
        _write(staging, size, seed, shards, layout)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(f"cannot write a checkpoint at {folder}: {error}") from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return staging


def _write(folder: Path, size: Size, seed: int, shards: int, layout: Layout) -> None:
    dimensions = DIMENSIONS[size]
    tokenizer = build_tokenizer(dimensions.vocab_size, seed)
    raw = build_config(dimensions, partial(token_id, tokenizer))
    _write_json(folder / "config.json", raw)
    _write_json(folder / "generation_config.json", _generation_config(tokenizer))
    _write_json(folder / "preprocessor_config.json", _preprocessor_config())
    write_tokenizer(tokenizer, folder)
    _write_weights(folder, dict(_weights(raw, dimensions, tokenizer, seed, layout)), shards)
    _write_json(folder / MARKER, {"size": size, "seed": seed, "shards": shards, "layout": layout, "version": VERSION})


def _weights(
    raw: dict[str, Any], dimensions: Dimensions, tokenizer: Tokenizer, seed: int, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    dtype: torch.dtype = getattr(torch, dimensions.dtype)
    for name, meta in meta_model(raw).state_dict().items():
        name = published_name(name)
        tensor = _draw(name, tuple(meta.shape), dimensions, seed)
        _shape_heads(name, tensor, raw, dimensions, tokenizer)
        if dimensions.end_logits is not None:
            _anchor(name, tensor)
        for part, value in split(name, tensor.to(dtype), layout):
            yield part, value.contiguous()


def _draw(name: str, shape: tuple[int, ...], dimensions: Dimensions, seed: int) -> Tensor:
    """Weights that keep variances near one: N(0, 1 / fan_in), with the exceptions below."""
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    noise = torch.randn(shape, generator=generator)
    if name.endswith((".scale", ".gamma")):
        return 0.5 + 0.1 * noise
    if "norm" in name.split(".")[-2] or name.endswith(("ln_q.weight", "ln_post.weight")):
        return 0.1 * noise if name.endswith(".bias") else 1 + 0.1 * noise
    if name == "code2wav.decoder.6.conv.bias":
        return 0.001 * noise
    if len(shape) == 1:  # biases, and the frequencies and magnitudes of the vocoder's periodic activations
        return 0.1 * noise
    if "codec_embedding" in name:  # 16 of them are summed into one row
        return 0.25 * noise
    if name.endswith(("embed_tokens.weight", "code_embedding.weight", "pos_embed.weight")):
        return noise
    if "head" in name:
        return noise * 3 / math.sqrt(shape[-1])
    if name == "code2wav.decoder.6.conv.weight":
        # Taps that sum to zero keep the waveform free of a constant offset.
        return (noise - noise.mean(-1, keepdim=True)) * dimensions.waveform_gain
    if name.startswith("code2wav.decoder.") and name.endswith(".conv2.conv.weight"):
        noise = 0.3 * noise  # a residual branch: 12 of them in a row would otherwise double the variance each
    return noise / math.sqrt(_fan_in(name, shape))


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    if name.startswith("code2wav.upsample.") and name.endswith(".0.conv.weight"):
        return shape[0]  # transposed (in, out, kernel), kernel = stride: one tap reaches each sample
    if name.startswith("code2wav.decoder.") and name.endswith("block.1.conv.weight"):
        return 2 * shape[0]  # transposed, kernel = 2 x stride
    return math.prod(shape[1:]) if ".conv" in name or "patch_embed" in name else shape[-1]


def _shape_heads(name: str, head: Tensor, raw: dict[str, Any], dimensions: Dimensions, tokenizer: Tokenizer) -> None:
    """Keep a random Thinker from writing special tokens and broken characters, and set how often both heads end."""
    if name == "thinker.lm_head.weight":
        head[~torch.tensor(readable_ids(tokenizer))] = 0.0
        end, which = [raw["im_end_token_id"]], 0
    elif name == "talker.codec_head.weight":
        end, which = [raw["talker_config"]["codec_eos_token_id"]], 1
    else:
        return
    head[end] = 0.0
    if dimensions.end_logits is not None:
        head[:, 0] = 0.0
        head[end, 0] = dimensions.end_logits[which] * _ANCHOR_RMS / _ANCHOR


def _anchor(name: str, tensor: Tensor) -> None:
    """Hold channel 0 of the residual streams at a constant, which a head then reads as the bias it does not have."""
    if name == "thinker.model.embed_tokens.weight":
        tensor[:, 0] = _ANCHOR
    elif name.startswith("talker.") and name.endswith("projection.linear_fc2.bias"):
        tensor[0] = _ANCHOR
    elif name.startswith("talker.") and name.endswith("projection.linear_fc2.weight"):
        tensor[0] = 0.0
    elif "codec_embedding" in name:
        tensor[:, 0] = 0.0
    elif name in ("thinker.model.norm.weight", "talker.model.norm.weight"):
        tensor[0] = 1.0
    elif name.startswith(("thinker.model.layers.", "talker.model.layers.")):
        if name.endswith("down_proj"):
            tensor[:, 0] = 0.0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0


def _write_weights(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    """One file, or `shards` files of about equal size, each holding neighbours, with their index."""
    if shards == 1:
        _save(tensors, folder / "model.safetensors")
        return
    total = sum(tensor.nbytes for tensor in tensors.values())
    weight_map: dict[str, str] = {}
    written = 0
    for name, tensor in tensors.items():
        shard = written * shards // total + 1
        weight_map[name] = f"model-{shard:05d}-of-{shards:05d}.safetensors"
        written += tensor.nbytes
    for file in sorted(set(weight_map.values())):
        members = {name: tensors[name] for name, where in weight_map.items() if where == file}
        _save(members, folder / file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    shutil.copymode(path.with_name("config.json"), path)  # safetensors leaves files that only their owner can read


def _generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "eos_token_id": [token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")],
        "pad_token_id": token_id(tokenizer, "<|endoftext|>"),
        "talker_max_new_tokens": 4096,
    }


def _preprocessor_config() -> dict[str, Any]:
    """The image processor's and the feature extractor's settings, in one file as published."""
    return {
        "processor_class": "Qwen3OmniMoeProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 300,
        "n_samples": 4_800_000,
        "nb_max_frames": 30000,
        "padding_side": "right",
        "padding_value": 0.0,
        "dither": 0.0,
        "return_attention_mask": True,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
