"""What the numbers of a checkpoint's config must have to do with each other, whatever its weights are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from triptych.models.qwen3_omni.config import Code2WavConfig, DecoderConfig, OmniConfig, TalkerConfig

_MAY_BE_ZERO = (
    "intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def check_config(config: OmniConfig) -> None:
    """Raise ValueError, with the dotted key, for a type, a size or a token id that no checkpoint can have."""
    try:
        msgspec.convert(msgspec.to_builtins(config), type(config))  # types: the parser passes values on as they are
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    _check_decoder(config.thinker, "thinker_config.text_config")
    vocab = config.thinker.vocab_size
    for name in ("im_start", "im_end", "tts_pad", "tts_bos", "tts_eos", "system", "user", "assistant"):
        _check_id(getattr(config, f"{name}_token_id"), vocab, f"{name}_token_id")
    for token_id in config.eos_token_ids:
        _check_id(token_id, vocab, "eos_token_id of generation_config.json")
    _check_media(config)
    if config.talker is not None:
        _check_talker(config.talker)
        layers = config.thinker.num_hidden_layers
        if not 1 <= config.talker.accept_hidden_layer < layers:
            raise ValueError(
                f"talker_config.accept_hidden_layer: {config.talker.accept_hidden_layer} is not between 1 and "
                f"{layers - 1}: it names a state between two of the Thinker's {layers} layers"
            )
    if config.code2wav is not None:
        _check_sizes(config.code2wav, "code2wav_config")


def _check_media(config: OmniConfig) -> None:
    """The numbers that lay media out, as far as the checkpoint has the encoders for it."""
    media, vocab = config.media, config.thinker.vocab_size
    ids, sizes = [], []
    if media.has_audio:
        ids += [("audio_token", config.audio_token_id), ("audio_start_token", media.audio_start_token_id)]
        ids.append(("audio_end_token", media.audio_end_token_id))
        sizes += [f"audio_config.{name}" for name in ("num_mel_bins", "n_window", "n_window_infer")]
    if media.has_vision:
        ids += [("image_token", config.image_token_id), ("video_token", config.video_token_id)]
        sizes += [f"vision_config.{name}" for name in ("patch_size", "temporal_patch_size", "spatial_merge_size")]
    for name, token_id in ids:
        _check_id(token_id, vocab, f"thinker_config.{name}_id")
    for name in sizes:
        if (value := getattr(media, name.rpartition(".")[2])) < 1:
            raise ValueError(f"thinker_config.{name}: {value} is not at least 1")


def _check_talker(talker: TalkerConfig) -> None:
    _check_decoder(talker.text, "talker_config.text_config")
    _check_decoder(talker.code_predictor, "talker_config.code_predictor_config")
    if talker.num_code_groups < 2:
        raise ValueError(f"talker_config.num_code_groups: {talker.num_code_groups} is not at least 2")
    vocab = talker.text.vocab_size
    for name in ("codec_eos_token", "codec_nothink", "codec_think_bos", "codec_think_eos", "codec_pad", "codec_bos"):
        _check_id(getattr(talker, f"{name}_id"), vocab, f"talker_config.{name}_id")
    for voice, speaker_id in talker.speaker_id.items():
        _check_id(speaker_id, vocab, f"talker_config.speaker_id.{voice}")


def _check_decoder(decoder: DecoderConfig, path: str) -> None:
    _check_sizes(decoder, path)
    if decoder.num_attention_heads % decoder.num_key_value_heads:
        raise ValueError(
            f"{path}: num_attention_heads {decoder.num_attention_heads} is no multiple of num_key_value_heads "
            f"{decoder.num_key_value_heads}"
        )
    if decoder.num_experts and not 1 <= decoder.num_experts_per_tok <= decoder.num_experts:
        raise ValueError(
            f"{path}: num_experts_per_tok {decoder.num_experts_per_tok} is not between 1 and num_experts "
            f"{decoder.num_experts}"
        )


def _check_sizes(part: DecoderConfig | Code2WavConfig, path: str) -> None:
    for name in part.__struct_fields__:
        value = getattr(part, name)
        least = 0 if name in _MAY_BE_ZERO else 1
        if type(value) is int and value < least:
            raise ValueError(f"{path}.{name}: {value} is not at least {least}")


def _check_id(token_id: int, vocab_size: int, path: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"{path}: {token_id} is not in the vocabulary, 0 to {vocab_size - 1}")
