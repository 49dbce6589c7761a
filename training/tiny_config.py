"""The sizes of the tiny voice's checkpoint, and its `config.json`."""

from __future__ import annotations

from functools import partial
from typing import Any

from tokenizers import Tokenizer

from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig
from triptych.models.qwen3_omni.synthetic_config import Decoder, Dimensions, build_config
from triptych.models.qwen3_omni.synthetic_tokenizer import token_id

QUANTIZERS, CODES = 6, 512
HIDDEN = 128
DECODER: dict[str, Any] = {
    "codebook_size": CODES,
    "num_quantizers": QUANTIZERS,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "sliding_window": 72,
    "max_position_embeddings": 8000,
    "decoder_dim": 192,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
}
# The checkpoint's voices -> the teacher's. The first is the default; the names are two of the published checkpoint's.
SPEAKERS = {"chelsie": "slt", "ethan": "rms"}
DIMENSIONS = Dimensions(
    dtype="float32",
    vocab_size=0,  # the tokenizer's
    codebook_size=CODES,
    context=16384,
    thinker=Decoder(
        hidden=192,
        layers=4,
        heads=6,
        kv_heads=2,
        head_dim=32,
        intermediate=384,
        experts=4,
        experts_per_token=2,
        expert_width=192,
    ),
    accept_hidden_layer=2,
    talker=Decoder(
        hidden=192,
        layers=4,
        heads=6,
        kv_heads=2,
        head_dim=32,
        intermediate=384,
        experts=4,
        experts_per_token=2,
        expert_width=192,
        shared_expert=192,
    ),
    talker_vocab_size=CODES + 1024,
    code_predictor=Decoder(hidden=192, layers=3, heads=6, kv_heads=2, head_dim=32, intermediate=512),
    code2wav=Decoder(hidden=0, layers=0, heads=0, kv_heads=0, head_dim=0, intermediate=0),  # DECODER says
    decoder_dim=0,
    audio_tower=(128, 5),
    vision_tower=(128, 4),
    waveform_gain=0.0,
)
# Every picture is seen at one size; the frames of a video are as large as the family's processor makes them at least.
PREPROCESSOR = PreprocessorConfig(
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    rescale_factor=1 / 255,
    image_min_pixels=96 * 96,
    image_max_pixels=96 * 96,
    frame_min_pixels=128 * 32 * 32,
    frame_max_pixels=768 * 32 * 32,
    fps=2.0,
    min_frames=4,
    max_frames=768,
    cap_pixels_per_frame=False,
    max_video_tokens=128_000,
    sampling_rate=16_000,
    num_mel_bins=128,
    n_fft=400,
    hop_length=160,
)


def tiny_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The parsed `config.json` for a tokenizer of this domain."""
    raw = build_config(DIMENSIONS, partial(token_id, tokenizer))
    raw["thinker_config"]["text_config"]["vocab_size"] = tokenizer.get_vocab_size()
    raw["thinker_config"]["audio_config"]["downsample_hidden_size"] = 48  # most of the encoder's work
    talker = raw["talker_config"]
    talker["num_code_groups"] = talker["code_predictor_config"]["num_code_groups"] = QUANTIZERS
    talker["speaker_id"] = {name: CODES + 253 + index for index, name in enumerate(SPEAKERS)}
    raw["code2wav_config"] |= DECODER
    return raw
