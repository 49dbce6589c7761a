"""What the Talker's residual codes are held to: how they sound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from training import listening
from training.codec import Codec
from training.listening import LEAD, SHAPES, Crops, Listening, crops
from training.phone_ear import PhoneEar
from training.rows import SpeechExample
from training.speech_store import Recording, SpeechStore, build_store
from training.talker_batch import Batch
from training.teacher import FRAME, Speech
from training.tiny_config import CODES, QUANTIZERS

END = 10_000


@pytest.fixture
def store(tmp_path: Path) -> SpeechStore:
    """Utterances of 10 to 42 frames, whose samples tell the utterance and the frame."""

    def speak(sentence: str, voice: str) -> Speech:
        count = len(sentence)
        return Speech(np.repeat((np.arange(count) + 100 * count) / 32768, FRAME).astype(np.float32), [])

    return build_store(tmp_path / "speech", [("a" * length, "slt") for length in range(10, 43, 2)], speak)


def example(store: SpeechStore, index: int) -> SpeechExample:
    """Frames that tell the same in their first code."""
    count = store.utterances[index].samples // FRAME
    frames = [[at + 100 * count] * 2 for at in range(count)]
    return SpeechExample([0], [[0, 0]], frames, 1, recording=Recording(store, index))


def test_crops_are_the_frames_and_the_samples_of_the_same_speech(store: SpeechStore) -> None:
    leads = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        examples = [example(store, int(index)) for index in rng.permutation(len(store))[:12]]
        found = crops(examples, rng)
        assert found is not None and tuple(found.places.shape) in SHAPES
        targets = torch.tensor([frame[0] for each in examples for frame in [*each.frames, [END, END]]])
        said = found.waveforms.view(*found.places.shape, FRAME) * 32768
        assert torch.equal(said.round().long(), targets[found.places].unsqueeze(-1).expand_as(said))
        begins = targets[found.places[:, 0]] % 100 == 0
        assert begins.all() if found.lead == 0 else found.lead == LEAD
        leads.append(found.lead)
    assert set(leads) == {0, LEAD}


def test_answers_too_short_for_crops_have_none(store: SpeechStore) -> None:
    assert crops([example(store, 0)] * 11, np.random.default_rng(0)) is None
    places = crops([example(store, 0)] * 12, np.random.default_rng(0))
    assert places is not None and places.places.shape == (12, 9) and places.lead == 0
    assert Batch([example(store, 0)] * 2, END, 0).targets[:, 0].tolist() == [*range(1000, 1010), END] * 2


def test_an_example_that_nobody_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match="without a recording"):
        crops([SpeechExample([0], [[0, 0]], [[1, 1]] * 30, 1)] * 6, np.random.default_rng(0))


def test_the_drawn_codes_are_heard_and_the_expected_ones_learn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    codec, ear = Codec().eval(), PhoneEar().eval().requires_grad_(False)
    codec.quantizer.codebooks.normal_()
    monkeypatch.setattr(listening, "load_codec", lambda work: (codec, 0))
    monkeypatch.setattr(listening, "train_ear", lambda work: ear)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    hear = Listening(tmp_path)
    frames, count = torch.randint(CODES, (2 * 6 + 3, QUANTIZERS)), 2 * 6
    codec.fold()
    with torch.no_grad():
        said = codec.decoder(frames[:count].view(2, 6, QUANTIZERS).transpose(1, 2))[:, 0]
    place = Crops(torch.arange(count).view(2, 6), torch.nn.functional.pad(said, (0, 555)), 0)
    logits = torch.zeros(len(frames), QUANTIZERS - 1, CODES, requires_grad=True)
    same = hear(frames, logits, place)
    assert same["clarity"].item() < 1e-3 and same["spectral"].item() < 1e-3  # whatever they were drawn from
    other = frames.clone()
    other[0] = (other[0] + 1) % CODES
    sound = hear(other, logits, place)
    assert sound["clarity"].item() > 0.01
    (sound["clarity"] + sound["spectral"]).backward()
    assert logits.grad is not None
    moved = logits.grad.abs().sum((1, 2))
    assert bool((moved[:count] > 0).any()) and not bool(moved[count:].any())
