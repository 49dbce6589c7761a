"""The decoder stack that Thinker and Talker share: layers over a paged cache, built from one DecoderConfig."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from triptych.layers.attention import AttentionProjections, PagedAttention, RowMetadata, StepMetadata
from triptych.layers.compiled_decoder import DTYPES, CompiledDecoder, compiled_code
from triptych.layers.decoder import Attend, BetweenLayers, DecoderLayer
from triptych.layers.linear import GatedMLP
from triptych.layers.moe import SparseMoE
from triptych.layers.norm import RMSNorm
from triptych.layers.rotary import Rotary
from triptych.models.placement import Layout, Placement
from triptych.models.qwen3_omni.config import DecoderConfig

logger = logging.getLogger(__name__)


def build_layer(config: DecoderConfig, index: int) -> DecoderLayer:
    """Layer `index` of a decoder: dense, or a mixture of experts where the config says so."""
    if config.is_sparse(index):
        feed_forward: GatedMLP | SparseMoE = SparseMoE(
            hidden=config.hidden_size,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            intermediate=config.moe_intermediate_size,
            norm_topk_prob=config.norm_topk_prob,
            shared_intermediate=config.shared_expert_intermediate_size,
        )
    else:
        feed_forward = GatedMLP(config.hidden_size, config.intermediate_size)
    attention = AttentionProjections(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
    )
    return DecoderLayer(
        attention=attention, feed_forward=feed_forward, hidden=config.hidden_size, eps=config.rms_norm_eps
    )


class Backbone(nn.Module):
    """Decoder layers and the final norm. `forward` takes embeddings, so it serves ids and projected rows alike.

    On a CPU the layers have a twin in C. The two round differently, so a stage runs one or the other for all its steps:
    `compiled` is the twin where it is the one that runs, and then takes `RowMetadata`.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(build_layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.compiled: CompiledDecoder | None = None

    def prepare(self, row_tile: int, *, eager: bool = True, part: str = "Backbone") -> None:
        """Derive what the layers keep beside their weights; call once the weights are loaded.

        Not `eager`: for the compiled layers, where these weights have any and they can be compiled; the log calls it
        `part`.
        """
        self.rotary = Rotary(
            self.config.head_dim, self.config.rope_theta, self.config.mrope_section, self.norm.weight.device
        )
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        code = None if eager or not _can_be_compiled(layers, part) else compiled_code()
        if code is not None:
            self.compiled = CompiledDecoder(code, layers, self.norm)
            self.layers = nn.ModuleList()  # their weights are laid out anew
            self.itemsize = self.compiled.itemsize
            return
        self.norm.prepare()
        self.steps = prepared_layers(self.layers, row_tile)
        self.itemsize = layers[0].attention.into.itemsize  # of the projections, as a step reads them

    @property
    def by_row(self) -> bool:
        """Whether steps take `RowMetadata`: the compiled layers do."""
        return self.compiled is not None

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        caches: list[Tensor],
        metadata: StepMetadata,
        between: BetweenLayers | None = None,
    ) -> Tensor:
        """x [N, hidden], positions [3, N] -> normalised hidden states [N, hidden]."""
        if self.compiled is not None:
            assert isinstance(metadata, RowMetadata)
            return self.compiled(x, *self.rotary(positions, torch.float32), caches, metadata, between)
        assert not isinstance(metadata, RowMetadata)
        cos, signed_sin = self.rotary(positions, x.dtype)
        for layer, (step, cache) in enumerate(zip(self.steps, caches, strict=True)):
            x = step(x, cos, signed_sin, PagedAttention(cache, self.config.num_key_value_heads, metadata))
            if between is not None:
                x = between(layer, x)
        return self.norm.forward(x)


def _can_be_compiled(layers: list[DecoderLayer], part: str) -> bool:
    """Not in float16: said in the log."""
    dtype = layers[0].input_norm.weight.dtype
    if dtype not in DTYPES:
        logger.warning(
            "%s: its layers have no compiled form in %s; their eager twin runs, which is slower", part, dtype
        )
    return dtype in DTYPES


def projections(model: nn.Module) -> Iterator[str]:
    """Names of the weights of `model` that quantisation is for: products in the layers of a Backbone, routers apart."""
    for path, backbone in model.named_modules():
        if isinstance(backbone, Backbone):
            for inner, part in backbone.named_modules(prefix=path):
                yield from (f"{inner}.{name}" for name in getattr(part, "projections", ()))


Step = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]  # DecoderLayer.forward


def prepared_layers(layers: Iterable[nn.Module], row_tile: int) -> list[Step]:
    """Prepare every DecoderLayer of `layers`; returns their `forward`s, in order."""
    steps: list[Step] = []
    for layer in layers:
        assert isinstance(layer, DecoderLayer)
        layer.prepare(row_tile)
        steps.append(layer.forward)
    return steps


def layer_placements(config: DecoderConfig, source: str, target: str, layout: Layout) -> Iterator[Placement]:
    """Every tensor of `config`'s layers: HF names below `source` ("thinker.model"), ours below `target`."""
    hidden, dim = config.hidden_size, config.head_dim
    query, key = config.num_attention_heads * dim, config.num_key_value_heads * dim
    for index in range(config.num_hidden_layers):
        theirs, ours = f"{source}.layers.{index}", f"{target}.layers.{index}"
        for name, start, rows in (("q", 0, query), ("k", query, key), ("v", query + key, key)):
            yield Placement(
                f"{theirs}.self_attn.{name}_proj.weight", f"{ours}.attention.qkv", (rows, hidden), start=start
            )
        yield Placement(f"{theirs}.self_attn.o_proj.weight", f"{ours}.attention.out", (hidden, query))
        for name in ("q_norm", "k_norm"):
            yield Placement(f"{theirs}.self_attn.{name}.weight", f"{ours}.attention.{name}", (dim,))
        yield Placement(f"{theirs}.input_layernorm.weight", f"{ours}.input_norm.weight", (hidden,))
        yield Placement(f"{theirs}.post_attention_layernorm.weight", f"{ours}.post_norm.weight", (hidden,))
        if config.is_sparse(index):
            yield from _expert_placements(config, f"{theirs}.mlp", f"{ours}.feed_forward", layout)
        else:
            yield from _mlp_placements(hidden, config.intermediate_size, f"{theirs}.mlp", f"{ours}.feed_forward")
    yield Placement(f"{source}.norm.weight", f"{target}.norm.weight", (hidden,))


def _mlp_placements(hidden: int, width: int, theirs: str, ours: str) -> Iterator[Placement]:
    yield Placement(f"{theirs}.gate_proj.weight", f"{ours}.gate_up", (width, hidden))
    yield Placement(f"{theirs}.up_proj.weight", f"{ours}.gate_up", (width, hidden), start=width)
    yield Placement(f"{theirs}.down_proj.weight", f"{ours}.down", (hidden, width))


def _expert_placements(config: DecoderConfig, theirs: str, ours: str, layout: Layout) -> Iterator[Placement]:
    hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    yield Placement(f"{theirs}.gate.weight", f"{ours}.router", (experts, hidden))
    if layout == "fused":
        yield Placement(f"{theirs}.experts.gate_up_proj", f"{ours}.gate_up", (experts, 2 * width, hidden))
        yield Placement(f"{theirs}.experts.down_proj", f"{ours}.down", (experts, hidden, width))
    else:
        for expert in range(experts):
            name = f"{theirs}.experts.{expert}"
            yield Placement(f"{name}.gate_proj.weight", f"{ours}.gate_up", (width, hidden), index=expert)
            yield Placement(f"{name}.up_proj.weight", f"{ours}.gate_up", (width, hidden), start=width, index=expert)
            yield Placement(f"{name}.down_proj.weight", f"{ours}.down", (hidden, width), index=expert)
    if config.shared_expert_intermediate_size:
        yield from _mlp_placements(
            hidden, config.shared_expert_intermediate_size, f"{theirs}.shared_expert", f"{ours}.shared"
        )
        yield Placement(f"{theirs}.shared_expert_gate.weight", f"{ours}.shared_gate", (1, hidden))
