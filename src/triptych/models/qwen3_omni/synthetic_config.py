"""The `config.json` of the synthetic checkpoints, in three sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Size = Literal["nano", "bench", "mini"]
SIZES: tuple[Size, ...] = ("nano", "bench", "mini")
SPEAKERS = ("chelsie", "ethan", "aiden")


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_expert: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimensions:
    """What distinguishes one size from another.

    `audio_tower` and `vision_tower` are (width, layers). `waveform_gain` scales the vocoder's last convolution so that
    the waveform's rms is about 0.1. `end_logits` are those of the Thinker's and the Talker's end tokens, chosen so that
    each step ends with a probability of about 3%; None: the end tokens never come. All measured.
    """

    dtype: Literal["float32", "bfloat16"]
    vocab_size: int
    codebook_size: int
    context: int
    thinker: Decoder
    accept_hidden_layer: int
    talker: Decoder
    talker_vocab_size: int
    code_predictor: Decoder
    code2wav: Decoder
    decoder_dim: int
    audio_tower: tuple[int, int]
    vision_tower: tuple[int, int]
    waveform_gain: float
    end_logits: tuple[float, float] | None = None


DIMENSIONS: dict[Size, Dimensions] = {
    "nano": Dimensions(
        dtype="float32",
        vocab_size=1024,
        codebook_size=256,
        context=16384,
        thinker=Decoder(
            hidden=64,
            layers=3,
            heads=4,
            kv_heads=2,
            head_dim=16,
            intermediate=128,
            experts=4,
            experts_per_token=2,
            expert_width=32,
        ),
        accept_hidden_layer=2,
        talker=Decoder(
            hidden=64,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=16,
            intermediate=96,
            experts=4,
            experts_per_token=2,
            expert_width=32,
            shared_expert=48,
        ),
        talker_vocab_size=256 + 1024,
        code_predictor=Decoder(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96),
        code2wav=Decoder(hidden=64, layers=2, heads=4, kv_heads=4, head_dim=16, intermediate=96),
        decoder_dim=32,
        audio_tower=(32, 2),
        vision_tower=(32, 3),
        waveform_gain=0.012,
        end_logits=(6.5, 5.5),
    ),
    "bench": Dimensions(
        dtype="bfloat16",
        vocab_size=4160,
        codebook_size=2048,
        context=32768,
        thinker=Decoder(
            hidden=256,
            layers=4,
            heads=4,
            kv_heads=2,
            head_dim=64,
            intermediate=512,
            experts=8,
            experts_per_token=2,
            expert_width=128,
        ),
        accept_hidden_layer=2,
        talker=Decoder(
            hidden=128,
            layers=4,
            heads=2,
            kv_heads=1,
            head_dim=64,
            intermediate=256,
            experts=8,
            experts_per_token=2,
            expert_width=64,
            shared_expert=128,
        ),
        talker_vocab_size=3072,
        code_predictor=Decoder(hidden=128, layers=5, heads=2, kv_heads=1, head_dim=64, intermediate=256),
        code2wav=Decoder(hidden=64, layers=4, heads=4, kv_heads=4, head_dim=16, intermediate=128),
        decoder_dim=96,
        audio_tower=(64, 2),
        vision_tower=(64, 4),
        waveform_gain=0.0064,
    ),
    "mini": Dimensions(
        dtype="bfloat16",
        vocab_size=4160,
        codebook_size=2048,
        context=32768,
        thinker=Decoder(
            hidden=512,
            layers=8,
            heads=8,
            kv_heads=2,
            head_dim=64,
            intermediate=1024,
            experts=16,
            experts_per_token=4,
            expert_width=256,
        ),
        accept_hidden_layer=4,
        talker=Decoder(
            hidden=256,
            layers=6,
            heads=4,
            kv_heads=2,
            head_dim=64,
            intermediate=512,
            experts=16,
            experts_per_token=4,
            expert_width=128,
            shared_expert=256,
        ),
        talker_vocab_size=3072,
        code_predictor=Decoder(hidden=256, layers=5, heads=4, kv_heads=2, head_dim=64, intermediate=512),
        code2wav=Decoder(hidden=256, layers=8, heads=4, kv_heads=4, head_dim=64, intermediate=512),
        decoder_dim=384,
        audio_tower=(128, 2),
        vision_tower=(128, 4),
        waveform_gain=0.0031,
    ),
}


def build_config(size: Dimensions, token_id: Callable[[str], int]) -> dict[str, Any]:
    """The parsed `config.json`, its fields as in the published checkpoints. `token_id` maps a token to its id."""
    audio_start, vision_start = token_id("<|audio_start|>"), token_id("<|vision_start|>")
    media = {
        "audio_token_id": token_id("<|audio_pad|>"),
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "audio_start_token_id": audio_start,
        "audio_end_token_id": token_id("<|audio_end|>"),
        "vision_start_token_id": vision_start,
        "vision_end_token_id": token_id("<|vision_end|>"),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": size.dtype,
        "enable_audio_output": True,
        "im_start_token_id": token_id("<|im_start|>"),
        "im_end_token_id": token_id("<|im_end|>"),
        "system_token_id": token_id("system"),
        "user_token_id": token_id("user"),
        "assistant_token_id": token_id("assistant"),
        "tts_pad_token_id": token_id("<tts_pad>"),
        "tts_bos_token_id": token_id("<tts_text_bos>"),
        "tts_eos_token_id": token_id("<tts_text_eod>"),
        "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker",
            "user_token_id": token_id("user"),
            **media,
            "audio_config": _audio(size),
            "vision_config": _vision(size),
            "text_config": {
                "model_type": "qwen3_omni_moe_text",
                "vocab_size": size.vocab_size,
                **_mixture(size.thinker, size.context),
            },
        },
        "talker_config": {
            "model_type": "qwen3_omni_moe_talker",
            "accept_hidden_layer": size.accept_hidden_layer,
            "thinker_hidden_size": size.thinker.hidden,
            "num_code_groups": 16,
            "spatial_merge_size": 2,
            **media,
            **_codec_ids(size.codebook_size),
            "text_config": {
                "model_type": "qwen3_omni_moe_talker_text",
                "vocab_size": size.talker_vocab_size,
                **_mixture(size.talker, size.context),
            },
            "code_predictor_config": {
                "model_type": "qwen3_omni_moe_talker_code_predictor",
                "vocab_size": size.codebook_size,
                "num_code_groups": 16,
                "rope_theta": 1_000_000,
                "max_position_embeddings": size.context,
                **_decoder(size.code_predictor),
            },
        },
        "code2wav_config": _code2wav(size),
    }


def _decoder(size: Decoder) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }


def _mixture(size: Decoder, context: int) -> dict[str, Any]:
    side = size.head_dim // 2
    spatial = side * 5 // 16  # the published 20 of 64
    return {
        **_decoder(size),
        "num_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "moe_intermediate_size": size.expert_width,
        "shared_expert_intermediate_size": size.shared_expert,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": context,
        "rope_theta": 1_000_000,
        "rope_scaling": {
            "rope_type": "default",
            "interleaved": True,
            "mrope_section": [side - 2 * spatial, spatial, spatial],
        },
    }


def _codec_ids(codebook_size: int) -> dict[str, Any]:
    """Control tokens above the codebook, at the published distances from it."""
    return {
        "codec_pad_id": codebook_size + 100,
        "codec_bos_id": codebook_size + 101,
        "codec_eos_token_id": codebook_size + 102,
        "codec_nothink_id": codebook_size + 107,
        "codec_think_bos_id": codebook_size + 108,
        "codec_think_eos_id": codebook_size + 109,
        "speaker_id": {name: codebook_size + 253 + index for index, name in enumerate(SPEAKERS)},
    }


def _code2wav(size: Dimensions) -> dict[str, Any]:
    decoder = _decoder(size.code2wav)
    del decoder["head_dim"]
    return {
        **decoder,
        "codebook_size": size.codebook_size,
        "num_quantizers": 16,
        "sliding_window": 72,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000,
        "max_position_embeddings": 8000,
        "layer_scale_initial_scale": 0.01,
        "decoder_dim": size.decoder_dim,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }


def _audio(size: Dimensions) -> dict[str, Any]:
    hidden, layers = size.audio_tower
    return {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "num_mel_bins": 128,
        "d_model": hidden,
        "encoder_layers": layers,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 2 * hidden,
        "activation_function": "gelu",
        "downsample_hidden_size": hidden,
        "output_dim": size.thinker.hidden,
        "max_source_positions": 1500,
        "n_window": 50,
        "n_window_infer": 800,
        "conv_chunksize": 500,
    }


def _vision(size: Dimensions) -> dict[str, Any]:
    hidden, layers = size.vision_tower
    return {
        "model_type": "qwen3_omni_moe_vision_encoder",
        "depth": layers,
        "hidden_size": hidden,
        "num_heads": 2,
        "intermediate_size": 2 * hidden,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "out_hidden_size": size.thinker.hidden,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1, 2],
    }
