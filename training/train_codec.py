"""Train the codec. Resumable: every step draws its randomness from its own number, and state is saved whole.

Encoder and codebooks learn in the first half of the schedule. From then on codes stay what they are, so the Talker can
be trained while the decoder goes on alone.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.checkpoints import resume, save_step, seed_step
from training.code_bank import Frames
from training.codec import CONTEXT, Codec
from training.log import TrainingLog
from training.own_frames import own_frames
from training.phone_ear import clarity_loss, train_ear
from training.schedule import cosine, half_precision, set_rate, step_generator
from training.spectra import log_mel, spectral_loss
from training.speech import by_heart_store, speech_store, unseen_store
from training.speech_store import SpeechStore
from training.teacher import FRAME
from training.tiny_config import QUANTIZERS

FRAMES, BATCH = 20, 6  # one step hears 9.6 s
PEAK_RATE = 1e-3
ENCODER_SHARE = 0.5  # of the schedule, in which encoder and codebooks learn too
SHALLOW = 0.5  # of the crops then have their first few codebooks alone, so that early ones carry most
CLOSED = 0.15  # of the crops then, answers of closed lists
CLARITY = 0.3  # weight of what the phone ear hears
OPENINGS, LEAD = 0.3, 4  # of the batches, those of first frames; in the others so many frames are not heard
ONSET, ONSET_SAMPLES = 20.0, FRAME // 16  # weight of how the first 5 ms differ: a tick there is no spectrum, and short
SEED = 1


class Crops:
    """Random crops of recordings: the mel features around them, and the waveform to be matched.

    A `closed` share of them is of the second corpus, if there is one.
    """

    def __init__(self, corpora: Sequence[SpeechStore], closed: float) -> None:
        self.recordings = [(store, place) for store in corpora for place in range(len(store))]
        chances = []
        for store, share in zip(corpora, (1.0,) if len(corpora) == 1 else (1 - closed, closed), strict=True):
            lengths = np.array([utterance.samples for utterance in store.utterances], dtype=np.float64)
            chances.append(share * lengths / lengths.sum())
        self.chances = np.concatenate(chances)

    def batch(self, step: int) -> tuple[Tensor, Tensor, list[tuple[int, int]], int]:
        """Mel [B, 80, 8 (FRAMES + 2 CONTEXT)], waveforms [B, 1920 FRAMES]; silence where an utterance is shorter.

        And of which recording each crop is, and its first frame; and how many frames only lead up to what is heard:
        none where all crops begin with their utterance, as served ones do.
        """
        rng = step_generator(SEED, step)
        opening = rng.random() < OPENINGS
        mels, waveforms, places = [], [], []
        for index in rng.choice(len(self.recordings), BATCH, p=self.chances):
            store, place = self.recordings[index]
            frames = store.utterances[place].samples // FRAME
            first = 0 if opening else int(rng.integers(0, max(1, frames - FRAMES + 1)))
            start, end = first - CONTEXT, first + FRAMES + CONTEXT
            whole = torch.from_numpy(
                store.waveform(place, max(0, start) * FRAME, (min(end, frames) - max(0, start)) * FRAME)
            )
            padding = (max(0, -start) * FRAME, max(0, end - frames) * FRAME)
            whole = F.pad(whole, padding)
            mels.append(log_mel(whole[None])[0])
            waveforms.append(whole[CONTEXT * FRAME : (CONTEXT + FRAMES) * FRAME])
            places.append((int(index), first))
        return torch.stack(mels), torch.stack(waveforms), places, 0 if opening else LEAD


def train(
    work: Path,
    steps: int,
    *,
    until: int | None = None,
    encoder_share: float = ENCODER_SHARE,
    own: float = 0.0,
    peak_rate: float = PEAK_RATE,
) -> None:
    """Train to step `until` (`steps` when None) of a schedule of `steps`. Goes on from the last saved step.

    `encoder_share` of the schedule moves encoder and codebooks: 0 for a decoder that goes on to codes as they are.
    `own` of the crops then are decoded from the frames that the trained Talker says in place of the teacher's: of
    sentences that it was not taught, and of closed lists, which it knows by heart.
    """
    folder = work / "codec"
    corpora = [unseen_store(work), by_heart_store(work)] if own else [speech_store(work)]
    crops, ear = Crops(corpora, CLOSED), train_ear(work)
    said: list[Frames] = []
    if own:
        spoken = [recordings.utterances[place] for recordings, place in crops.recordings]
        said = own_frames(work, [(utterance.sentence, utterance.voice) for utterance in spoken])
    torch.manual_seed(SEED)
    codec = Codec().train()
    parameters = [parameter for parameter in codec.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=peak_rate, betas=(0.8, 0.99), weight_decay=1e-4)
    step = resume(folder / "state.pt", codec, optimizer)
    log = TrainingLog(folder / "log.jsonl", every=20)
    upsample = torch.compile(codec.upsample)
    print(
        f"codec: {sum(p.numel() for p in codec.decoder.parameters())} decoder parameters, from step {step} of {steps}",
        flush=True,
    )
    while step < (until or steps):
        started = time.monotonic()
        seed_step(SEED, step)
        rate = cosine(step, steps, peak_rate)
        set_rate(optimizer, rate)
        mel, waveform, places, lead = crops.batch(step)
        encoding = step < encoder_share * steps
        codec.quantizer.train(encoding)
        with half_precision(), torch.set_grad_enabled(encoding):
            latents = codec.encoder(mel)[:, :, CONTEXT:-CONTEXT].float()
        shallow = torch.rand(BATCH) < (SHALLOW if encoding else 0.0)
        depth = torch.where(shallow, torch.randint(1, QUANTIZERS + 1, (BATCH,)), QUANTIZERS)
        quantised, commitment, used = codec.quantizer(latents, depth)
        for crop, (recording, first) in enumerate(places):
            if random.random() < own:
                frames = torch.from_numpy(said[recording][first : first + FRAMES]).long()
                quantised[crop, :, : len(frames)] = codec.quantizer.entries(frames).T
        with half_precision():
            output = upsample(codec.transform(quantised)).float()
        target = waveform[:, : output.shape[1]]
        output, target = output[:, lead * FRAME :], target[:, lead * FRAME :]
        spectral, absolute = spectral_loss(output, target), F.l1_loss(output, target)
        clarity = clarity_loss(ear, output, target)
        onset = F.l1_loss(output[:, :ONSET_SAMPLES], target[:, :ONSET_SAMPLES]) if lead == 0 else torch.zeros(())
        loss = spectral + absolute + CLARITY * clarity + 0.25 * commitment + ONSET * onset
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
        step += 1
        log.add(
            step,
            spectral=spectral.item(),
            l1=absolute.item(),
            clarity=clarity.item(),
            commitment=commitment.item(),
            onset=onset.item(),
            gradient=norm.item(),
            rate=rate,
            used_first=used[0],
            used_last=used[-1],
            seconds=time.monotonic() - started,
        )
        if step % 100 == 0 or step == steps:
            save_step(folder / "state.pt", step, codec, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True, help="length of the cosine schedule")
    parser.add_argument("--until", type=int, help="stop at this step of it")
    parser.add_argument("--encoder-share", type=float, default=ENCODER_SHARE, help="0: the decoder alone")
    parser.add_argument("--own", type=float, default=0.0, help="share of crops decoded from the Talker's own frames")
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="the learning rate at its peak")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(
        arguments.work,
        arguments.steps,
        until=arguments.until,
        encoder_share=arguments.encoder_share,
        own=arguments.own,
        peak_rate=arguments.rate,
    )


if __name__ == "__main__":
    main()
