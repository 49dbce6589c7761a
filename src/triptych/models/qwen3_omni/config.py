"""The parts of a Qwen3-Omni `config.json` that Triptych computes with, as frozen values.

Field names and defaults are those of `transformers`' `Qwen3OmniMoe*Config`, so a checkpoint means the same to both.
Read without importing transformers: every stage process starts with this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from triptych.errors import CheckpointError
from triptych.models.qwen3_omni.config_check import check_config

# The vocoder's shape as far as no config says it.
KERNEL_SIZE = 7
DILATIONS = (1, 3, 9)
UPSAMPLE_TAPS = 2  # kernel = taps * stride in the decoder; 1 in the upsampling before it
CONVNEXT_EXPANSION = 4


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer decoder: the Thinker's text model, the Talker, or the code predictor (`num_experts` 0)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    mrope_section: tuple[int, int, int] | None = None
    max_position_embeddings: int = 32768
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return (
            self.num_experts > 0 and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        )


class Code2WavConfig(msgspec.Struct, frozen=True, kw_only=True):
    codebook_size: int = 2048
    num_quantizers: int = 16
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 8
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 64
    sliding_window: int = 72
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 8000
    decoder_dim: int = 1536
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)
    upsampling_ratios: tuple[int, ...] = (2, 2)

    @property
    def samples_per_frame(self) -> int:
        product = 1
        for rate in (*self.upsampling_ratios, *self.upsample_rates):
            product *= rate
        return product


class TalkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    text: DecoderConfig
    code_predictor: DecoderConfig
    num_code_groups: int
    thinker_hidden_size: int
    accept_hidden_layer: int
    codec_eos_token_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    codec_pad_id: int
    codec_bos_id: int
    speaker_id: dict[str, int]
    position_id_per_seconds: float = 25.0


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the Thinker lays out images, clips and videos: `audio_config`, `vision_config` and the tokens around them.

    `has_audio` and `has_vision` say whether the checkpoint has those encoders.
    """

    has_audio: bool
    has_vision: bool
    audio_start_token_id: int
    audio_end_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    position_id_per_seconds: float
    num_mel_bins: int
    n_window: int  # half of the frames that the convolutions see at a time
    n_window_infer: int  # frames that attend to each other
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    deepstack_layers: int  # first layers of the text decoder that vision features are added behind


class OmniConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A whole checkpoint's config. `talker` and `code2wav` are None where the checkpoint has no speech."""

    thinker: DecoderConfig
    talker: TalkerConfig | None
    code2wav: Code2WavConfig | None
    dtype: str
    im_start_token_id: int
    im_end_token_id: int
    tts_pad_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int
    system_token_id: int
    user_token_id: int
    assistant_token_id: int
    audio_token_id: int
    image_token_id: int
    video_token_id: int
    media: MediaConfig
    eos_token_ids: tuple[int, ...]
    sample_rate: int = 24000

    def decoder(self, stage: str) -> DecoderConfig | None:
        """The decoder that a stage steps with a KV cache; None for Code2Wav, and where the checkpoint has no speech."""
        if stage == "thinker":
            return self.thinker
        return self.talker.text if stage == "talker" and self.talker is not None else None

    @property
    def default_speaker(self) -> str | None:
        """The voice used when a request names none: the first in the checkpoint."""
        return next(iter(self.talker.speaker_id), None) if self.talker else None


def load_config(model_dir: str | Path) -> OmniConfig:
    """Read `config.json` (and `generation_config.json` for the end-of-sequence ids) of a checkpoint folder.

    Raises CheckpointError naming the file and the key when something is missing or not a Qwen3-Omni checkpoint.
    """
    folder = Path(model_dir)
    raw = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    config = parse_config(raw, generation, str(folder / "config.json"))
    try:
        check_config(config)
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    return config


def parse_config(
    raw: dict[str, Any], generation: dict[str, Any] | None = None, origin: str = "config.json"
) -> OmniConfig:
    """The same from parsed JSON, without the checks of its numbers. `origin` names the source in errors."""
    if raw.get("model_type") != "qwen3_omni_moe":
        raise CheckpointError(f"{origin}: model_type {raw.get('model_type')!r} is not 'qwen3_omni_moe'")
    try:
        return _omni(raw, generation or {})
    except KeyError as error:
        raise CheckpointError(f"{origin}: key {error.args[0]!r} is missing") from error
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise CheckpointError(f"{origin}: {error}") from error


def _omni(raw: dict[str, Any], generation: dict[str, Any]) -> OmniConfig:
    thinker = _part(raw, "thinker_config")
    speaks = raw.get("enable_audio_output", True)
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = raw.get("im_end_token_id", 151645)
    return OmniConfig(
        thinker=_decoder(_part(thinker, "text_config"), theta=1_000_000.0, multimodal=True),
        talker=_talker(_part(raw, "talker_config")) if speaks else None,
        code2wav=_code2wav(_part(raw, "code2wav_config")) if speaks else None,
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        im_start_token_id=raw.get("im_start_token_id", 151644),
        im_end_token_id=raw.get("im_end_token_id", 151645),
        tts_pad_token_id=raw.get("tts_pad_token_id", 151671),
        tts_bos_token_id=raw.get("tts_bos_token_id", 151672),
        tts_eos_token_id=raw.get("tts_eos_token_id", 151673),
        system_token_id=raw.get("system_token_id", 8948),
        user_token_id=raw.get("user_token_id", 872),
        assistant_token_id=raw.get("assistant_token_id", 77091),
        audio_token_id=thinker.get("audio_token_id", 151646),
        image_token_id=thinker.get("image_token_id", 151655),
        video_token_id=thinker.get("video_token_id", 151656),
        media=_media(thinker),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
    )


def _media(thinker: dict[str, Any]) -> MediaConfig:
    audio, vision = _part(thinker, "audio_config", {}), _part(thinker, "vision_config", {})
    return MediaConfig(
        has_audio=bool(audio),
        has_vision=bool(vision),
        audio_start_token_id=thinker.get("audio_start_token_id", 151647),
        audio_end_token_id=thinker.get("audio_end_token_id", 151648),
        vision_start_token_id=thinker.get("vision_start_token_id", 151652),
        vision_end_token_id=thinker.get("vision_end_token_id", 151653),
        position_id_per_seconds=float(thinker.get("position_id_per_seconds", 25)),
        num_mel_bins=audio.get("num_mel_bins", 128),
        n_window=audio.get("n_window", 50),
        n_window_infer=audio.get("n_window_infer", 800),
        patch_size=vision.get("patch_size", 16),
        temporal_patch_size=vision.get("temporal_patch_size", 2),
        spatial_merge_size=vision.get("spatial_merge_size", 2),
        deepstack_layers=len(vision.get("deepstack_visual_indexes", (8, 16, 24))),
    )


def _talker(raw: dict[str, Any]) -> TalkerConfig:
    text = _decoder(_part(raw, "text_config"), theta=1_000_000.0, multimodal=True, norm_topk_prob=False)
    return TalkerConfig(
        # HF's Talker layers are sparse whatever these two keys say.
        text=msgspec.structs.replace(text, decoder_sparse_step=1, mlp_only_layers=()),
        code_predictor=_decoder(_part(raw, "code_predictor_config"), theta=10_000.0, multimodal=False),
        num_code_groups=raw.get("num_code_groups", 32),
        thinker_hidden_size=raw.get("thinker_hidden_size", 2048),
        accept_hidden_layer=raw.get("accept_hidden_layer", 18),
        codec_eos_token_id=raw.get("codec_eos_token_id", 4198),
        codec_nothink_id=raw.get("codec_nothink_id", 4203),
        codec_think_bos_id=raw.get("codec_think_bos_id", 4204),
        codec_think_eos_id=raw.get("codec_think_eos_id", 4205),
        codec_pad_id=raw.get("codec_pad_id", 4196),
        codec_bos_id=raw.get("codec_bos_id", 4197),
        speaker_id={name.lower(): index for name, index in _part(raw, "speaker_id", {}).items()},
        position_id_per_seconds=float(raw.get("position_id_per_seconds", 25)),
    )


def _decoder(raw: dict[str, Any], *, theta: float, multimodal: bool, norm_topk_prob: bool = True) -> DecoderConfig:
    _expect_silu(raw)
    rope = _part(raw, "rope_parameters", _part(raw, "rope_scaling", {}))
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"rope_type {rope.get('rope_type')!r} is not supported; only 'default' is")
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    values = {name: raw[name] for name in DecoderConfig.__struct_fields__ if raw.get(name) is not None}
    values |= {
        "num_experts": raw.get("num_experts", raw.get("num_local_experts", 128)) if multimodal else 0,
        "head_dim": raw.get("head_dim") or _head_dim(hidden, heads),
        "rope_theta": float(rope.get("rope_theta") or raw.get("rope_theta") or theta),
        "mrope_section": rope.get("mrope_section", (24, 20, 20)) if multimodal else None,
        "norm_topk_prob": raw.get("norm_topk_prob", norm_topk_prob),
    }
    values.setdefault("intermediate_size", 0)
    if values["num_experts"]:
        values.setdefault("num_experts_per_tok", 8)
    return msgspec.convert(values, DecoderConfig)


def _code2wav(raw: dict[str, Any]) -> Code2WavConfig:
    _expect_silu(raw)
    rope = _part(raw, "rope_parameters", {})
    values = {name: raw[name] for name in Code2WavConfig.__struct_fields__ if raw.get(name) is not None}
    hidden, heads = values.get("hidden_size", 1024), values.get("num_attention_heads", 16)
    values["head_dim"] = raw.get("head_dim") or _head_dim(hidden, heads)
    values["rope_theta"] = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    return msgspec.convert(values, Code2WavConfig)


def _part(raw: dict[str, Any], key: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """A mapping inside a mapping; `default` where it is missing, null or empty."""
    if default is not None and not raw.get(key):
        return default
    value = raw[key]
    if not isinstance(value, dict):
        raise ValueError(f"{key} is not a JSON object")
    return value


def _head_dim(hidden_size: Any, num_heads: Any) -> int:
    if not isinstance(hidden_size, int) or not isinstance(num_heads, int) or num_heads < 1:
        raise ValueError(f"hidden_size {hidden_size!r} and num_attention_heads {num_heads!r} give no head_dim")
    return hidden_size // num_heads


def _expect_silu(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is")
    if raw.get("attention_bias"):
        raise ValueError("attention_bias is not supported; Qwen3-Omni checkpoints have none")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value
