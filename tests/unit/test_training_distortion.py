"""What residual codes leave unsaid is measured by the codec's own codebooks."""

from __future__ import annotations

from itertools import pairwise, product

import torch
from tokenizers import Tokenizer

from training.distortion import Distortion
from training.parts import SHARPER
from training.tiny_config import tiny_config
from training.tokenizer import build_tokenizer
from training.train_talker import TalkerTrainee

GROUPS, CODES, LATENT = 3, 4, 2


def _codebooks() -> torch.Tensor:
    scale = torch.tensor([4.0, 1.0, 0.25])
    return torch.randn(GROUPS, CODES, LATENT, generator=torch.Generator().manual_seed(0)) * scale[:, None, None]


def _every_frame() -> torch.Tensor:
    return torch.tensor(list(product(range(CODES), repeat=GROUPS)))


def test_a_sure_draw_leaves_its_distance_after_each_group() -> None:
    codebooks, frames = _codebooks(), _every_frame()
    wanted, drawn = frames[[27]], frames[[30]]
    logits = 1e4 * torch.nn.functional.one_hot(drawn[:, 1:], CODES).float()
    values = [sum(codebooks[group, codes[0, group]] for group in range(GROUPS)) for codes in (wanted, drawn)]
    after_second = values[0] - codebooks[0, drawn[0, 0]] - codebooks[1, drawn[0, 1]]
    every = torch.stack([codebooks[group, frames[:, group]] for group in range(GROUPS)]).sum(0)
    expected = (after_second.square().sum() + (values[0] - values[1]).square().sum()) / every.var(0).sum()
    torch.testing.assert_close(Distortion(codebooks, frames)(drawn, logits, wanted), expected)


def test_its_gradient_leads_to_the_entry_that_is_nearest_to_what_is_left() -> None:
    codebooks, frames = _codebooks(), _every_frame()
    distortion, wanted, drawn = Distortion(codebooks, frames), frames[[5]], frames[[57]]  # a wrong first code
    logits = torch.zeros(1, GROUPS - 1, CODES, requires_grad=True)
    distortion(drawn, logits, wanted).backward()
    assert logits.grad is not None
    rest = sum(codebooks[group, wanted[0, group]] for group in range(GROUPS)) - codebooks[0, drawn[0, 0]]
    assert int(logits.grad[0, 0].argmin()) == int(torch.cdist(rest[None], codebooks[1]).argmin())


def test_drawn_in_turn_each_residual_code_stands_behind_the_drawn_ones() -> None:
    tokenizer: Tokenizer = build_tokenizer()
    torch.manual_seed(0)
    trainee = TalkerTrainee(tiny_config(tokenizer)).eval()
    hidden = torch.randn(5, trainee.talker.codec_head.in_features)
    with torch.no_grad():
        frames, logits = trainee.drawn_in_turn(hidden)
        whole = SHARPER * trainee.residual_logits(hidden, frames)
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
    assert len({tuple(row) for row in frames.tolist()}) > 1 and any(a != b for a, b in pairwise(frames[0].tolist()))
