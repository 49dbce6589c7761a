"""The Talker: text rows in, codec frames out (HF `Qwen3OmniMoeTalkerForConditionalGeneration`).

An input row of text is a pure function of ids: `text_table[text id]` plus the sum of code embeddings. So text crosses
the stage boundary as ids, and a row lost to preemption is computed again from them. A row of media is the projection of
the Thinker's hidden state there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triptych.errors import CheckpointError
from triptych.layers.linear import ROW_TILE
from triptych.layers.product import take_product
from triptych.models.placement import Layout, Placement
from triptych.models.qwen3_omni.backbone import Backbone, layer_placements
from triptych.models.qwen3_omni.code_predictor import CodePredictor, Draw
from triptych.models.qwen3_omni.config import OmniConfig

SUPPRESSED_TAIL = 1024  # the last ids of the codec vocabulary are markers: never drawn, the end marker excepted
# How residual codes are drawn, as HF's Talker does: not request parameters, part of the model.
RESIDUAL_TOP_K = 50
RESIDUAL_TOP_P = 0.8
_PROJECTION_ROWS = 4096  # ids projected at a time while the table is built
_HIDDEN_TILE = 64  # hidden states projected at a time, always as many: a row never depends on what comes with it


class ResizeMLP(nn.Module):
    """Linear, SiLU, linear, with biases: Thinker width to Talker width (HF `Qwen3OmniMoeTalkerResizeMLP`)."""

    def __init__(self, source: int, inner: int, target: int) -> None:
        super().__init__()
        self.fc1 = nn.Parameter(torch.empty(inner, source), requires_grad=False)
        self.fc1_bias = nn.Parameter(torch.empty(inner), requires_grad=False)
        self.fc2 = nn.Parameter(torch.empty(target, inner), requires_grad=False)
        self.fc2_bias = nn.Parameter(torch.empty(target), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.fc1, self.fc1_bias)), self.fc2, self.fc2_bias)


class Talker(nn.Module):
    """Decoder stack, codec head, code predictor and the tables its rows are made of.

    Build it on the meta device, load it, then call `prepare`, which projects the Thinker's embedding into `text_table`
    and drops what is needed no more. Raises CheckpointError where the checkpoint has no Talker.
    """

    prefixes: tuple[str, ...] = ("talker.", "thinker.model.embed_tokens.")

    def __init__(self, config: OmniConfig) -> None:
        super().__init__()
        if config.talker is None:
            raise CheckpointError("this checkpoint has no Talker (enable_audio_output is false)")
        self.talker_config = talker = config.talker
        self.config = text = talker.text
        self.text_vocab, self.thinker_hidden = config.thinker.vocab_size, talker.thinker_hidden_size
        self.num_code_groups = talker.num_code_groups
        self.thinker_embedding = nn.Parameter(torch.empty(self.text_vocab, self.thinker_hidden), requires_grad=False)
        self.text_projection = ResizeMLP(self.thinker_hidden, text.intermediate_size, text.hidden_size)
        self.hidden_projection = ResizeMLP(self.thinker_hidden, text.intermediate_size, text.hidden_size)
        self.codec_embedding = nn.Parameter(torch.empty(text.vocab_size, text.hidden_size), requires_grad=False)
        self.backbone = Backbone(text)
        self.codec_head = nn.Parameter(torch.empty(text.vocab_size, text.hidden_size), requires_grad=False)
        self.code_predictor = CodePredictor(talker.code_predictor, talker.num_code_groups)
        self.register_buffer("text_table", None, persistent=False)
        self.register_buffer("code_table", None, persistent=False)
        self.text_table: Tensor
        self.code_table: Tensor

    @property
    def suppressed(self) -> list[int]:
        """Codec ids that are never drawn."""
        end, eos = self.config.vocab_size, self.talker_config.codec_eos_token_id
        return [token for token in range(end - SUPPRESSED_TAIL, end) if token != eos]

    def placements(self, layout: Layout) -> Iterator[Placement]:
        text = self.config
        yield Placement(
            "thinker.model.embed_tokens.weight", "thinker_embedding", (self.text_vocab, self.thinker_hidden)
        )
        for name in ("text_projection", "hidden_projection"):
            inner = text.intermediate_size
            yield Placement(f"talker.{name}.linear_fc1.weight", f"{name}.fc1", (inner, self.thinker_hidden))
            yield Placement(f"talker.{name}.linear_fc1.bias", f"{name}.fc1_bias", (inner,))
            yield Placement(f"talker.{name}.linear_fc2.weight", f"{name}.fc2", (text.hidden_size, inner))
            yield Placement(f"talker.{name}.linear_fc2.bias", f"{name}.fc2_bias", (text.hidden_size,))
        codec = (text.vocab_size, text.hidden_size)
        yield Placement("talker.model.codec_embedding.weight", "codec_embedding", codec)
        yield Placement("talker.codec_head.weight", "codec_head", codec)
        yield from layer_placements(text, "talker.model", "backbone", layout)
        yield from self.code_predictor.placements(layout)

    def prepare(self, *, row_tile: int = ROW_TILE, eager: bool = True) -> None:
        """Project the text table, lay the code tables out as one, derive what the layers need.

        Not `eager`: with compiled code where there is some and it can be compiled.
        """
        self.backbone.prepare(row_tile, eager=eager, part="Talker")
        self.code_predictor.prepare(row_tile, eager=eager)
        self.head = take_product(self, "codec_head")
        self.widen = take_product(self.hidden_projection, "fc1")
        self.narrow = take_product(self.hidden_projection, "fc2")
        with torch.inference_mode():
            pieces = torch.split(self.thinker_embedding, _PROJECTION_ROWS)
            self.text_table = torch.cat([self.text_projection(piece) for piece in pieces])
            hidden = self.config.hidden_size
            nothing = self.codec_embedding.new_zeros(1, hidden)
            residual = self.code_predictor.tables.view(-1, hidden)
            self.code_table = torch.cat((self.codec_embedding, residual, nothing))
            # The tables that were joined go on as views of the whole.
            codec, residuals = torch.tensor_split(self.code_table[:-1], (self.config.vocab_size,))
            self.codec_embedding = nn.Parameter(codec, requires_grad=False)
            self.code_predictor.use_tables(residuals.view_as(self.code_predictor.tables))
        self.thinker_embedding = nn.Parameter(self.thinker_embedding.new_empty(0), requires_grad=False)

    @property
    def no_code(self) -> int:
        """The row of `code_table` that adds nothing."""
        return self.config.vocab_size + (self.num_code_groups - 1) * self.talker_config.code_predictor.vocab_size

    def code_rows(self, codes: list[int]) -> list[int]:
        """The rows of `code_table` that one frame's codes (codebook 0 first) stand for."""
        width, base = self.talker_config.code_predictor.vocab_size, self.config.vocab_size
        return [codes[0], *(base + index * width + code for index, code in enumerate(codes[1:]))]

    def embed(self, text_ids: Tensor, code_rows: Tensor) -> Tensor:
        """text_ids [N], code_rows [N, num_code_groups] into `code_table` -> [N, hidden]."""
        codes = F.embedding(code_rows, self.code_table).sum(dim=1)
        return codes.add_(F.embedding(text_ids, self.text_table))

    def project_hidden(self, hidden: Tensor) -> Tensor:
        """The Thinker's hidden states [n, thinker_hidden] -> media rows of the prompt [n, hidden]."""
        projection, tiles = self.hidden_projection, []
        for tile in torch.split(F.pad(hidden, (0, 0, 0, -hidden.shape[0] % _HIDDEN_TILE)), _HIDDEN_TILE):
            inner = F.silu(self.widen(tile).add_(projection.fc1_bias))
            tiles.append(self.narrow(inner).add_(projection.fc2_bias))
        return torch.cat(tiles)[: hidden.shape[0]]

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> codebook-0 logits [S, codec vocab] in float32."""
        return self.head(hidden).float()

    def residual_codes(self, hidden: Tensor, first: Tensor, draw: Draw) -> Tensor:
        """hidden [n or more, hidden] and codebook-0 codes [n] -> residual codes [n, num_code_groups - 1]."""
        codes: Tensor = self.code_predictor(hidden, F.embedding(first, self.codec_embedding), draw)
        return codes
