"""What the codec's decoder is held to: the phones that the teacher says, and from the codes that the Talker writes."""

from __future__ import annotations

import torch

from training.alignment import PHONES
from training.codec import Codec
from training.phone_ear import PhoneEar, clarity_loss, labels


def test_each_hop_has_the_phone_that_is_said_at_its_middle() -> None:
    phones = [("pau", 0.02), ("ah", 0.04), ("z", 0.06)]
    said = [PHONES[phone] for phone in labels(phones, -0.01, 9)]
    assert said == ["pau", "pau", "pau", "ah", "ah", "z", "z", "pau", "pau"]


def test_an_ear_hears_no_difference_between_equal_waveforms_and_more_between_less_alike_ones() -> None:
    torch.manual_seed(0)
    ear = PhoneEar().eval().requires_grad_(False)
    speech = 0.2 * torch.randn(2, 9600)
    near = (speech + 0.01 * torch.randn_like(speech)).requires_grad_()
    loss = clarity_loss(ear, near[:, :-555], speech[:, :-555])
    assert float(clarity_loss(ear, speech, speech)) < 1e-6
    assert 0 < float(loss.detach()) < float(clarity_loss(ear, torch.randn_like(speech), speech))
    loss.backward()
    assert near.grad is not None and float(near.grad.abs().sum()) > 0


def test_entries_are_what_the_quantizer_made_of_its_own_codes() -> None:
    torch.manual_seed(0)
    quantizer = Codec().quantizer.eval()
    quantizer.codebooks.normal_()
    latents = torch.randn(1, 32, 7)
    depth = torch.full((1,), len(quantizer.codebooks))
    quantised, _, _ = quantizer(latents, depth)
    torch.testing.assert_close(quantizer.entries(quantizer.encode(latents[0].T)), quantised[0].T)
