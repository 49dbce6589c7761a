"""The speech codec. Its decoder is Transformers' own `Qwen3OmniMoeCode2Wav`; its encoder lives in training only."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from training.spectra import MELS, log_mel
from training.teacher import FRAME
from training.tiny_config import CODES, DECODER, HIDDEN, QUANTIZERS

LATENT = 32
CONTEXT = 3  # frames that the encoder sees on both sides of what is decoded
_DECAY = 0.98  # of the codebooks' moving averages
_DEAD_STEPS = 60  # an entry unused for so long is moved to where data is


class _ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of [B, C, T]."""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = super().forward(x.transpose(1, 2))
        return normed.transpose(1, 2)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            _ChannelNorm(width), nn.Conv1d(width, width, 3, padding=1), nn.GELU(), nn.Conv1d(width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class Encoder(nn.Module):
    """Log-mel [B, 80, 8 T] at 100 Hz -> latents [B, 32, T] at 12.5 Hz."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(MELS, width, 5, padding=2)]
        for _ in range(3):
            layers += [_Residual(width), nn.GELU(), nn.Conv1d(width, width, 4, 2, 1)]
        layers += [_Residual(width), _Residual(width), _ChannelNorm(width), nn.Conv1d(width, LATENT, 1)]
        self.net = nn.Sequential(*layers)

    def forward(self, mel: Tensor) -> Tensor:
        latents: Tensor = self.net(mel)
        return latents


def entries_of(codebooks: Tensor, codes: Tensor) -> Tensor:
    """What codes [N, quantizers] stand for by codebooks [quantizers, entries, latent]: [N, latent]."""
    return torch.stack([book[codes[:, index]] for index, book in enumerate(codebooks)]).sum(0)


class ResidualQuantizer(nn.Module):
    """Residual vector quantisation with codebooks that follow the data as moving averages.

    Zeghidour et al., "SoundStream" (2021): straight-through gradient, quantizer dropout, unused entries replaced.
    """

    codebooks: Tensor
    counts: Tensor
    sums: Tensor
    unused: Tensor
    started: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codebooks", torch.zeros(QUANTIZERS, CODES, LATENT))
        self.register_buffer("counts", torch.ones(QUANTIZERS, CODES))
        self.register_buffer("sums", torch.zeros(QUANTIZERS, CODES, LATENT))
        self.register_buffer("unused", torch.zeros(QUANTIZERS, CODES))
        self.register_buffer("started", torch.zeros(QUANTIZERS))

    def nearest(self, rows: Tensor, index: int) -> Tensor:
        """Rows [N, 32] -> the nearest entry of one codebook [N]."""
        book = self.codebooks[index]
        return (book.square().sum(1) - 2 * rows @ book.T).argmin(1)

    @torch.no_grad()
    def encode(self, latents: Tensor) -> Tensor:
        """Latents [N, 32] -> codes [N, quantizers]."""
        rest, codes = latents, []
        for index in range(QUANTIZERS):
            chosen = self.nearest(rest, index)
            rest = rest - self.codebooks[index][chosen]
            codes.append(chosen)
        return torch.stack(codes, 1)

    def entries(self, codes: Tensor) -> Tensor:
        """Codes [N, quantizers] -> what they stand for, [N, 32]."""
        return entries_of(self.codebooks, codes)

    def forward(self, latents: Tensor, depth: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Latents [B, 32, T] quantised by the first `depth` [B] codebooks; commitment loss; entries used of each."""
        batch, _, frames = latents.shape
        rows = latents.transpose(1, 2).reshape(-1, LATENT)
        rest, total = rows.detach(), torch.zeros_like(rows)
        depths, used = depth.repeat_interleave(frames), []
        for index in range(QUANTIZERS):
            active = depths > index
            if self.training and not self.started[index]:
                self._start(index, rest)
            chosen = self.nearest(rest, index)
            if self.training and bool(active.any()):
                entries = self.codebooks[index][chosen]
                self._follow(index, chosen[active], rest[active])
            else:
                entries = self.codebooks[index][chosen]
            entries = entries * active[:, None]
            total, rest = total + entries, rest - entries
            used.append(len(chosen.unique()))
        commitment = F.mse_loss(rows, total)
        straight = rows + (total - rows).detach()
        return straight.reshape(batch, frames, LATENT).transpose(1, 2), commitment, used

    def _start(self, index: int, rows: Tensor) -> None:
        picked = rows[torch.randint(len(rows), (CODES,))]
        self.codebooks[index] = picked + 1e-3 * torch.randn_like(picked)
        self.sums[index], self.counts[index], self.started[index] = self.codebooks[index], 1.0, 1.0

    @torch.no_grad()
    def _follow(self, index: int, chosen: Tensor, rows: Tensor) -> None:
        counts = torch.bincount(chosen, minlength=CODES).float()
        sums = torch.zeros(CODES, LATENT).index_add_(0, chosen, rows)
        self.counts[index].mul_(_DECAY).add_(counts, alpha=1 - _DECAY)
        self.sums[index].mul_(_DECAY).add_(sums, alpha=1 - _DECAY)
        self.codebooks[index] = self.sums[index] / (self.counts[index][:, None] + 1e-4)
        self.unused[index] = torch.where(counts > 0, 0.0, self.unused[index] + 1)
        dead = torch.nonzero(self.unused[index] > _DEAD_STEPS).flatten()
        if len(dead):
            picked = rows[torch.randint(len(rows), (len(dead),))]
            self.codebooks[index][dead], self.sums[index][dead] = picked, 0.3 * picked
            self.counts[index][dead], self.unused[index][dead] = 0.3, 0.0


class Codec(nn.Module):
    """Encoder, quantizer, and the decoder that is shipped."""

    def __init__(self) -> None:
        super().__init__()
        config = Qwen3OmniMoeCode2WavConfig(**DECODER)
        config._attn_implementation = "sdpa"
        self.encoder, self.quantizer = Encoder(), ResidualQuantizer()
        self.projection = nn.Linear(LATENT, HIDDEN, bias=False)
        self.decoder = Qwen3OmniMoeCode2Wav(config)
        for module in self.decoder.modules():  # PyTorch's own initialisation: the class's is for pretrained weights
            if isinstance(module, nn.Conv1d | nn.ConvTranspose1d | nn.Linear):
                module.reset_parameters()
        with torch.no_grad():
            for name, parameter in self.decoder.named_parameters():
                if name.endswith("gamma") or "layer_scale" in name:
                    parameter.fill_(0.1)
        self.decoder.code_embedding.weight.requires_grad_(False)

    def transform(self, latents: Tensor) -> Tensor:
        """Quantised latents [B, 32, T] -> the decoder transformer's output [B, hidden, T]."""
        rows = self.projection(latents.transpose(1, 2))
        hidden: Tensor = self.decoder.pre_transformer(inputs_embeds=rows).last_hidden_state
        return hidden.transpose(1, 2)

    def upsample(self, hidden: Tensor) -> Tensor:
        """[B, hidden, T] -> waveform [B, 1920 T - 555], not yet clamped."""
        for blocks in self.decoder.upsample:
            for block in blocks:
                hidden = block(hidden)
        for block in self.decoder.decoder:
            hidden = block(hidden)
        return hidden[:, 0]

    def digest(self) -> str:
        """What the codes depend on, the encoder and the codebooks, as a short digest."""
        digest = hashlib.sha256()
        for part in (*self.encoder.state_dict().values(), self.quantizer.codebooks):
            digest.update(part.numpy().tobytes())
        return digest.hexdigest()[:12]

    @torch.no_grad()
    def fold(self) -> Qwen3OmniMoeCode2Wav:
        """Write codebooks and projection into the decoder's code table, and return the decoder.

        The decoder takes the mean over quantizers, so a row is the projected entry times their number.
        """
        table = QUANTIZERS * self.projection(self.quantizer.codebooks)
        self.decoder.code_embedding.weight.copy_(table.reshape(-1, HIDDEN))
        return self.decoder

    @torch.no_grad()
    def encode(self, waveform: Tensor) -> Tensor:
        """One waveform [samples], whole frames -> codes [T, quantizers]."""
        silence = CONTEXT * FRAME  # around every crop in training
        latents = self.encoder(log_mel(F.pad(waveform[None], (silence, silence))))
        return self.quantizer.encode(latents[0, :, CONTEXT:-CONTEXT].T)
