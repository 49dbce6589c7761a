"""What a step of the Thinker or the Talker has to move and to compute, from the config alone. Imports no torch.

A step computes n_r new rows of each request r behind c_r rows that its KV cache holds, N = sum(n_r) in all, and draws
from S of them. Below, w is bytes of a weight, a bytes of an activation or cache element, h the hidden size, q and k the
widths of all query and of all key heads, V the vocabulary. A quantised backbone has a w of 1 for its projections; their
scales are left out.

    bytes of a step = w (layers(N) + [S > 0] V h) + a L 2 k (sum(c_r) + N) + a N h e
    FLOPs of a step = N row + 4 q L sum(n_r c_r + n_r (n_r + 1) / 2) + 2 S V h

L is the number of layers, `layers(N)` and `row` are those of `DecoderWork`, e the table rows that make one input row.
"""

from __future__ import annotations

from collections.abc import Callable

from triptych.engine.batch import ScheduledBatch
from triptych.models.qwen3_omni.config import DecoderConfig, TalkerConfig
from triptych.telemetry.work import Work


class DecoderWork:
    """The arithmetic of one decoder stack. `weight_bytes` and `element_bytes` are w and a.

    `projection_bytes` is w for the projections of the layers, where that is another.
    """

    def __init__(
        self, config: DecoderConfig, *, weight_bytes: int, element_bytes: int, projection_bytes: int | None = None
    ) -> None:
        self.config, self.weight_bytes, self.element_bytes = config, weight_bytes, element_bytes
        self.projection_bytes = weight_bytes if projection_bytes is None else projection_bytes
        self.queries = config.num_attention_heads * config.head_dim
        self.keys = config.num_key_value_heads * config.head_dim
        self._sparse = sum(map(config.is_sparse, range(config.num_hidden_layers)))

    def experts(self, rows: int) -> float:
        """Experts of one layer that `rows` rows touch: E (1 - (1 - T/E)^rows), T of E experts a row.

        That is the expectation for rows that choose independently and all experts alike. A router that prefers some
        touches fewer, so it is a bound from above; for a single row it is exact.
        """
        config = self.config
        if not config.num_experts:
            return 0.0
        return config.num_experts * (1 - (1 - config.num_experts_per_tok / config.num_experts) ** rows)

    def weights(self, rows: int) -> float:
        """`layers(rows)`: weights that one pass of `rows` rows reads, norms included, each once.

        A layer has h (q + 2 k) + q h of attention, 2 head_dim + 2 h of norms, and 3 h i of a dense feed-forward, or
        h E of a router, 3 h m for each expert touched and 3 h s + h of a shared one (i, m, s: intermediate sizes).
        """
        return self._projections(self.experts(rows)) + self._routers + self._norms

    def weight_traffic(self, rows: int) -> float:
        """Bytes of `weights(rows)`."""
        rest = self._routers + self._norms
        return self.projection_bytes * self._projections(self.experts(rows)) + self.weight_bytes * rest

    @property
    def row_flops(self) -> float:
        """`row`: FLOPs of one row in products with weights, two for each weight that it meets."""
        return 2.0 * (self._projections(self.config.num_experts_per_tok) + self._routers)

    def attention_flops(self, pairs: float) -> float:
        """4 q L for each pair of a row and a row that it sees: two products of 2 q FLOPs in each layer."""
        return 4.0 * self.queries * self.config.num_hidden_layers * pairs

    def cache_bytes(self, positions: float) -> float:
        """a L 2 k for the keys and values of each position that is read or written."""
        return 2.0 * self.keys * self.config.num_hidden_layers * self.element_bytes * positions

    def head(self, rows: int, heads: int = 1) -> Work:
        """`rows` rows, each times one of `heads` heads of V h weights."""
        size = self.config.vocab_size * self.config.hidden_size
        return Work(float(self.weight_bytes * size * heads), 2.0 * rows * size)

    @property
    def _norms(self) -> int:
        config = self.config
        return config.num_hidden_layers * 2 * (config.head_dim + config.hidden_size) + config.hidden_size

    @property
    def _routers(self) -> int:
        """Weights that choose experts, and that weigh the shared one."""
        config = self.config
        return self._sparse * config.hidden_size * (config.num_experts + bool(config.shared_expert_intermediate_size))

    def _projections(self, experts: float) -> float:
        """Weights of the other products in all layers, with so many experts of each sparse one."""
        config, hidden = self.config, self.config.hidden_size
        attention = hidden * (self.queries + 2 * self.keys) + self.queries * hidden
        dense = 3 * hidden * config.intermediate_size
        sparse = 3 * hidden * (experts * config.moe_intermediate_size + config.shared_expert_intermediate_size)
        layers = config.num_hidden_layers
        return layers * attention + self._sparse * sparse + (layers - self._sparse) * dense


def thinker_work(
    config: DecoderConfig, *, weight_bytes: int, element_bytes: int, projection_bytes: int | None = None
) -> Callable[[ScheduledBatch], Work]:
    """The work of a step of the Thinker, encoding of media apart (it has a time of its own)."""
    decoder = DecoderWork(
        config, weight_bytes=weight_bytes, element_bytes=element_bytes, projection_bytes=projection_bytes
    )
    return lambda batch: _step(decoder, batch, rows_per_input=1)


def talker_work(
    config: TalkerConfig, *, weight_bytes: int, element_bytes: int, projection_bytes: int | None = None
) -> Callable[[ScheduledBatch], Work]:
    """The work of a step of the Talker, the residual codes of the frames that it draws included.

    An input row is made of a row for text and one for each of G codebooks. With R = G - 1 residual codes, each of the
    S frames of a step takes R + 1 positions through the code predictor, the first two in one pass and then one at a
    time, so that its layers are read R times, and each of its R heads once:

        bytes = w (R layers + R V h) + a L 2 k S (R (R + 1) / 2 - 1 + R + 1) + a S R h
        FLOPs = S ((R + 1) row + 4 q L (R + 1) (R + 2) / 2 + 2 R V h)
    """
    decoder = DecoderWork(
        config.text, weight_bytes=weight_bytes, element_bytes=element_bytes, projection_bytes=projection_bytes
    )
    predictor = DecoderWork(config.code_predictor, weight_bytes=weight_bytes, element_bytes=element_bytes)

    def work(batch: ScheduledBatch) -> Work:
        step = _step(decoder, batch, rows_per_input=1 + config.num_code_groups)
        frames = sum(row.samples for row in batch.rows)
        return step + _residual_codes(predictor, config.num_code_groups - 1, frames) if frames else step

    return work


def _step(decoder: DecoderWork, batch: ScheduledBatch, *, rows_per_input: int) -> Work:
    """A step of the decoder and its head, as the formula of this module has it."""
    rows, drawn = batch.num_tokens, sum(row.samples for row in batch.rows)
    held = sum(row.start for row in batch.rows)
    pairs = sum(row.num_tokens * row.start + row.num_tokens * (row.num_tokens + 1) / 2 for row in batch.rows)
    layers = Work(
        decoder.weight_traffic(rows)
        + decoder.cache_bytes(held + rows)
        + decoder.element_bytes * rows * decoder.config.hidden_size * rows_per_input,
        decoder.row_flops * rows + decoder.attention_flops(pairs),
    )
    return layers + decoder.head(drawn) if drawn else layers


def _residual_codes(predictor: DecoderWork, residuals: int, frames: int) -> Work:
    positions = residuals + 1
    read = residuals * positions / 2 - 1  # position p of 2 to `residuals` sees the p before it
    layers = Work(
        residuals * predictor.weight_traffic(frames)
        + predictor.cache_bytes(frames * (read + positions))
        + predictor.element_bytes * frames * residuals * predictor.config.hidden_size,
        frames * (positions * predictor.row_flops + predictor.attention_flops(positions * (positions + 1) / 2)),
    )
    return layers + predictor.head(frames * residuals, heads=residuals)
