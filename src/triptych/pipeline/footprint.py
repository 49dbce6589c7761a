"""What a stage holds in memory beside its KV cache, from config and shapes alone. Imports no torch.

Weights and state are exact up to a MiB of derived vectors and the allocator's rounding; tests hold them to the stages.
The workspace, what one step allocates and frees, is an estimate: it depends on the kernels that torch chooses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from triptych.config.schema import StageConfig, StageKind
from triptych.config.units import DTYPE_BYTES
from triptych.engine.encoder_cache import AHEAD_BYTES
from triptych.models.qwen3_omni.config import Code2WavConfig, DecoderConfig, OmniConfig, TalkerConfig

# Which part of a stage a tensor belongs to: the first prefix that fits.
_PARTS: dict[StageKind, tuple[tuple[str, str], ...]] = {
    "thinker": (
        ("thinker.model.embed_tokens.", "embedding table"),
        ("thinker.model.", "backbone"),
        ("thinker.lm_head.", "text head"),
        ("thinker.audio_tower.", "audio encoder"),
        ("thinker.visual.", "vision encoder"),
    ),
    "talker": (
        ("talker.model.codec_embedding.", "code tables"),
        ("talker.code_predictor.model.codec_embedding.", "code tables"),
        ("talker.code_predictor.", "code predictor"),
        ("talker.codec_head.", "codec head"),
        ("talker.model.", "backbone"),
        ("talker.", "projections"),
    ),
    "code2wav": (("code2wav.", "vocoder"),),
}
_PROJECTION = re.compile(r"\.layers\.[0-9]+\..*_proj(\.weight)?$")  # of a backbone: what `projections` names
_ENCODERS = ("audio encoder", "vision encoder")
# The numbers of these modules, which come with torch: layers.linear and models.qwen3_omni.code2wav.
_ROW_TILE = 4
_KERNEL_REACH = 6
_DILATIONS = (1, 3, 9)
_SORTED_BYTES = 24  # of one logit on its way through the sampler: float32, and sorted with its index
_VOCODER_BUFFERS = 6  # of the widest layer, alive at once


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of one part, with what a reader should know of it."""

    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """`taken` counts in the stage's share of a CUDA device before its KV cache does; `state` comes on top.

    `workspace` is an estimate of what the largest step needs for itself. `longest_decode` is that of a decode step of
    `max_num_seqs` of which one has the longest context: all are padded to it, but by compiled layers.
    """

    taken: tuple[Item, ...]
    state: tuple[Item, ...]
    workspace: int
    longest_decode: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """How many numbers the parameters of a part are; those of projections in its layers, and their outputs, apart."""

    others: int = 0
    projected: int = 0
    outputs: int = 0

    def nbytes(self, itemsize: int, *, quantized: bool = False) -> int:
        """With projections in eight bits, and a scale for each output, where they are `quantized`."""
        if quantized:
            return self.projected + (self.outputs + self.others) * itemsize
        return (self.projected + self.others) * itemsize


Parts = Mapping[str, Part]  # by name


def weight_parts(shapes: Mapping[str, tuple[int, ...]]) -> dict[StageKind, Parts]:
    """The parameters of every stage by part, from the tensors of a checkpoint."""
    return {stage: _parts(shapes, rules) for stage, rules in _PARTS.items()}


def _parts(shapes: Mapping[str, tuple[int, ...]], rules: Sequence[tuple[str, str]]) -> Parts:
    found: dict[str, Part] = {}
    for name, shape in shapes.items():
        part = next((part for prefix, part in rules if name.startswith(prefix)), None)
        if part is None:
            continue
        so_far, count = found.get(part, Part()), math.prod(shape)
        if _PROJECTION.search(name):
            outputs = so_far.outputs + math.prod(shape[:-1])
            found[part] = replace(so_far, projected=so_far.projected + count, outputs=outputs)
        else:
            found[part] = replace(so_far, others=so_far.others + count)
    return {part: found[part] for part in dict.fromkeys(part for _, part in rules) if part in found}


def footprint(
    stage: StageConfig, config: OmniConfig, parts: Parts, *, on_cpu: bool, chunk_frames: int = 25
) -> Footprint:
    """What one replica of a resolved stage holds. `chunk_frames` is the longest chunk that Code2Wav decodes at once."""
    if stage.stage == "thinker":
        return _thinker(stage, config.thinker, parts, on_cpu)
    if stage.stage == "talker":
        assert config.talker is not None
        return _talker(stage, config.talker, config.thinker.vocab_size, parts, on_cpu)
    assert config.code2wav is not None
    return _code2wav(stage, config.code2wav, parts, on_cpu, chunk_frames)


def _thinker(stage: StageConfig, decoder: DecoderConfig, parts: Parts, on_cpu: bool) -> Footprint:
    itemsize = DTYPE_BYTES[stage.dtype]
    taken = [
        # On a CPU encoders are float32.
        _weights(stage, name, part, 4 if on_cpu and name in _ENCODERS else itemsize)
        for name, part in parts.items()
    ]
    if any(part in parts for part in _ENCODERS):
        rows = max(stage.encoder_cache_bytes, AHEAD_BYTES)
        taken.append(Item("encoded media", rows, "at most, by encoder_cache_bytes"))
    return Footprint(
        taken=tuple(taken),
        state=(_sampling(stage, decoder),),
        workspace=_step(stage, decoder, on_cpu),
        longest_decode=_longest_decode(stage, decoder, on_cpu),
    )


def _talker(stage: StageConfig, talker: TalkerConfig, text_vocab: int, parts: Parts, on_cpu: bool) -> Footprint:
    itemsize, hidden = DTYPE_BYTES[stage.dtype], talker.text.hidden_size
    table = text_vocab * hidden * itemsize
    tables = parts.get("code tables", Part())
    held = {**parts, "code tables": replace(tables, others=tables.others + hidden)}  # one more row, which adds nothing
    predictor = talker.code_predictor
    position = predictor.num_hidden_layers * 2 * predictor.num_key_value_heads * predictor.head_dim
    frames = sum(_batch_sizes(stage)) * talker.num_code_groups * position * itemsize
    # The Thinker's embedding is read to be projected, and the table stands twice for a moment.
    loading = text_vocab * talker.thinker_hidden_size * itemsize + table
    return Footprint(
        taken=(
            *(_weights(stage, name, part, itemsize) for name, part in held.items()),
            Item("projected text table", table),
        ),
        state=(
            _sampling(stage, talker.text),
            Item("frame caches", frames, "at most: the code predictor's, one for each batch size"),
        ),
        workspace=max(_step(stage, talker.text, on_cpu), loading),
        longest_decode=_longest_decode(stage, talker.text, on_cpu),
    )


def _code2wav(stage: StageConfig, vocoder: Code2WavConfig, parts: Parts, on_cpu: bool, chunk_frames: int) -> Footprint:
    itemsize = 4 if on_cpu else DTYPE_BYTES[stage.dtype]  # on a CPU it is float32
    stream = _stream_values(vocoder) * itemsize + 8  # and how many frames it has had
    batch = 1 if stage.batch_invariant else stage.max_num_seqs
    values = chunk_frames * max(_widths(vocoder)) * batch
    return Footprint(
        taken=tuple(_weights(stage, name, part, itemsize) for name, part in parts.items()),
        state=(
            Item("streams", (stage.max_num_seqs + 1) * stream, f"{stage.max_num_seqs} and one spare, {stream:,} each"),
        ),
        workspace=values * _VOCODER_BUFFERS * itemsize,
    )


def _weights(stage: StageConfig, name: str, part: Part, itemsize: int) -> Item:
    quantized = stage.quantization is not None and name == "backbone"
    note = f"projections in {stage.quantization}" if quantized else ""
    return Item(name, part.nbytes(itemsize, quantized=quantized), note)


def _stream_values(vocoder: Code2WavConfig) -> int:
    """Numbers that Code2Wav keeps of one stream: the last inputs of every layer that mixes time."""
    heads = vocoder.num_key_value_heads * 2 * (vocoder.sliding_window - 1) * vocoder.head_dim
    widths = [vocoder.decoder_dim >> index for index in range(len(vocoder.upsample_rates) + 1)]
    # Depthwise convolutions of the upsampling, then the decoder's first and last one.
    convolved = vocoder.hidden_size * (len(vocoder.upsampling_ratios) + 1) + widths[-1]
    # A block's transposed convolution keeps one input, its residual units as many as they are dilated.
    blocks = sum(widths[:-1]) + _KERNEL_REACH * sum(_DILATIONS) * sum(widths[1:])
    return vocoder.num_hidden_layers * heads + _KERNEL_REACH * convolved + blocks


def _widths(vocoder: Code2WavConfig) -> Iterable[int]:
    """Values of one frame behind every upsampling of the decoder."""
    steps = math.prod(vocoder.upsampling_ratios)
    yield steps * vocoder.decoder_dim
    for index, rate in enumerate(vocoder.upsample_rates, 1):
        steps *= rate
        yield steps * (vocoder.decoder_dim >> index)


def _sampling(stage: StageConfig, decoder: DecoderConfig) -> Item:
    """Penalties by token in float32, two tables of them; the Talker also keeps what is never drawn."""
    tables = 2 * stage.max_num_seqs + (stage.stage == "talker")
    return Item("sampling", tables * decoder.vocab_size * 4, "at most: penalties, made when a request asks for them")


def _batch_sizes(stage: StageConfig) -> range:
    """Every number of rows that a decode step can have."""
    tile = _ROW_TILE if stage.batch_invariant else 1
    return range(tile, stage.max_num_seqs + tile, tile)


def _longest_decode(stage: StageConfig, decoder: DecoderConfig, on_cpu: bool) -> int:
    """Keys and values of one layer, gathered for `max_num_seqs` contexts of `max_model_len`; 0 where none are."""
    if _is_compiled(stage, on_cpu):
        return 0
    values = 2 * decoder.num_key_value_heads * decoder.head_dim
    return stage.max_num_seqs * stage.max_model_len * values * DTYPE_BYTES[stage.dtype]


def _step(stage: StageConfig, decoder: DecoderConfig, on_cpu: bool) -> int:
    """The largest of what a step of `max_num_batched_tokens` rows holds at once: attention, feed-forward or logits."""
    itemsize, rows, hidden = DTYPE_BYTES[stage.dtype], stage.max_num_batched_tokens, decoder.hidden_size
    logits = stage.max_num_seqs * decoder.vocab_size * (itemsize + _SORTED_BYTES)
    if _is_compiled(stage, on_cpu):
        # Rows in float32 as they come, normalised and as they go; the rest is for a few at a time.
        return rows * hidden * (itemsize + 3 * 4) + logits
    turning = (decoder.num_attention_heads + decoder.num_key_value_heads) * decoder.head_dim
    values = decoder.num_key_value_heads * decoder.head_dim
    # Queries and keys are normalised in float32, and turned beside that.
    attention = rows * ((2 * turning + values) * itemsize + turning * 8)
    feed_forward = rows * (3 * decoder.intermediate_size + hidden) * itemsize
    if decoder.num_experts:
        width, tile = decoder.moe_intermediate_size, _ROW_TILE if stage.batch_invariant else 1
        # On a CPU the experts take turns, and one may get every row; on CUDA all pairs of row and expert stand at once.
        pairs = rows if on_cpu else rows * decoder.num_experts_per_tok
        padded = pairs + (1 if on_cpu else min(decoder.num_experts, pairs)) * (tile - 1)
        feed_forward = padded * (2 * hidden + 2 * width + max(hidden, width)) * itemsize
    if stage.quantization is not None and not (on_cpu and stage.dtype == "bfloat16"):  # there int8 is read as it lies
        attention += _widest_attention(decoder) * itemsize
        feed_forward += _widest_feed_forward(decoder, on_cpu) * itemsize
    return 3 * rows * hidden * itemsize + max(attention, feed_forward, logits)


def _is_compiled(stage: StageConfig, on_cpu: bool) -> bool:
    """Whether the layers of a backbone are compiled code, if there is a compiler."""
    return on_cpu and not stage.enforce_eager and stage.dtype != "float16"


def _widest_attention(decoder: DecoderConfig) -> int:
    """Numbers of the largest weight of attention, which a step widens where it is kept in eight bits."""
    return decoder.hidden_size * (decoder.num_attention_heads + 2 * decoder.num_key_value_heads) * decoder.head_dim


def _widest_feed_forward(decoder: DecoderConfig, on_cpu: bool) -> int:
    """The same of feed-forward: an expert on a CPU, all of a layer on CUDA."""
    width = max(decoder.intermediate_size, decoder.shared_expert_intermediate_size)
    experts = 1 if on_cpu else decoder.num_experts
    return 2 * decoder.hidden_size * max(width, experts * decoder.moe_intermediate_size)
