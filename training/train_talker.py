"""Train the Talker and its code predictor on the teacher's frames, teacher forced. Resumable by step."""

from __future__ import annotations

import random
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import DynamicCache

from training.alignment import PHONES
from training.checkpoints import resume, save_step, seed_step
from training.code_bank import CodeBank, build_bank
from training.command import run_trainer
from training.distortion import Distortion
from training.domain import samples, typed
from training.evaluate_codec import load_codec
from training.listening import Crops, Listening, crops
from training.log import TrainingLog
from training.parts import SHARPER, build_talker, text_embedding
from training.rows import NO_CODE, UNKNOWN
from training.schedule import cosine, pooled_batch, set_rate, step_generator
from training.spoken_examples import SpokenExamples
from training.talker_batch import Batch
from training.tiny_config import tiny_config
from training.tokenizer import build_tokenizer
from triptych.models.qwen3_omni.config import parse_config

BATCH, PEAK_RATE, SEED = 16, 1.5e-3, 5
PREDICTED_FRAMES = 512  # frames of a batch whose residual codes are learnt in a step
OWN_FROM = 0.4  # of the schedule: from there on it reads its own frames back
NAMING, NAMING_LAYER = 0.3, 1  # weight and place of the auxiliary losses: what is said next has to be known half way up
DISTORTION = 1.0  # weight of what its own residual codes leave unsaid
# Weight of how its own residual codes sound; in which share of the schedule; in one of so many steps, as it takes as
# long as all the rest; and how many frames are drawn beside those that are heard.
HEARING, HEARD_FROM, HEARD_EVERY, BESIDE_HEARD = 0.5, 0.8, 3, 130
MEAN_DECAY = 0.996  # of the moving average of its weights, which is what is kept
POINTING, POINTERS = 0.3, ((1, 5), (2, 2))  # weight; (layer, head) that must look at the word that is said next


class TalkerTrainee(nn.Module):
    """The Talker with the losses of its two parts.

    Some heads are told where to look, as in guided attention (Tachibana et al., "Efficiently trainable text-to-speech",
    2018); here the row of each word is known, so that it need not be near a diagonal.
    """

    embedding: Tensor
    media_ids: Tensor

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        self.talker = build_talker(raw)
        hidden = raw["talker_config"]["text_config"]["hidden_size"]
        self.word_head = nn.Linear(hidden, raw["thinker_config"]["text_config"]["vocab_size"])
        self.phone_head = nn.Linear(hidden, len(PHONES))
        self.talker.model.config._attn_implementation = "eager"  # the one that gives its weights
        config = raw["thinker_config"]["text_config"]
        self.register_buffer("embedding", text_embedding(config["vocab_size"], config["hidden_size"]), persistent=False)
        thinker = raw["thinker_config"]
        media = [thinker[f"{kind}_token_id"] for kind in ("audio", "image", "video")]
        self.register_buffer("media_ids", torch.tensor(media), persistent=False)
        self.groups: int = raw["talker_config"]["num_code_groups"]
        self.codebook: int = raw["code2wav_config"]["codebook_size"]
        self.end: int = raw["talker_config"]["codec_eos_token_id"]

    def embed(self, text_ids: Tensor, codes: Tensor) -> Tensor:
        """text_ids [B, R], codes [B, R, groups], NO_CODE where there is none -> input rows [B, R, hidden]."""
        rows: Tensor = self.talker.text_projection(F.embedding(text_ids, self.embedding))
        rows = rows.masked_fill(torch.isin(text_ids, self.media_ids).unsqueeze(-1), 0)
        tables = [self.talker.model.codec_embedding, *self.talker.code_predictor.model.codec_embedding]
        for index, table in enumerate(tables):
            code = codes[..., index]
            rows = rows + table(code.clamp(min=0)) * (code != NO_CODE).unsqueeze(-1)
        return rows

    def residual_logits(self, hidden: Tensor, frames: Tensor) -> Tensor:
        """Hidden states [N, hidden] and their frames [N, groups] -> logits [N, groups - 1, codebook]."""
        predictor = self.talker.code_predictor
        inputs = [hidden, self.talker.model.codec_embedding(frames[:, 0])]
        inputs += [table(frames[:, index + 1]) for index, table in enumerate(predictor.model.codec_embedding[:-1])]
        states = predictor.model(inputs_embeds=torch.stack(inputs, 1), use_cache=False).last_hidden_state
        return torch.stack([head(states[:, index + 1]) for index, head in enumerate(predictor.lm_head)], 1)

    def states(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The last hidden states [M, hidden] of a row per frame and one per end, those of NAMING_LAYER, and the weights
        [pointers, M] with which the pointers look at the word that is said."""
        inputs = self.embed(batch.text_ids, batch.codes)
        found = self.talker.model(
            inputs_embeds=inputs, use_cache=False, output_hidden_states=True, output_attentions=True
        )
        place = batch.rows, batch.columns
        given = batch.sources.clamp(min=0)
        looks = [found.attentions[layer][batch.rows, head, batch.columns, given] for layer, head in POINTERS]
        # the first of the hidden states is that before all layers
        return found.last_hidden_state[place], found.hidden_states[NAMING_LAYER + 1][place], torch.stack(looks)

    def drawn_in_turn(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden] -> frames [N, groups] as in serving, each residual code drawn behind its own ones;
        and the logits [N, groups - 1, codebook] they were drawn from, with their gradient."""
        predictor = self.talker.code_predictor
        past = DynamicCache(config=predictor.model.config)
        frame = [self.talker.codec_head(hidden)[:, : self.codebook].argmax(-1)]
        rows = torch.stack([hidden, self.talker.model.codec_embedding(frame[0])], 1)
        logits: list[Tensor] = []
        for head, table in zip(predictor.lm_head, predictor.model.codec_embedding, strict=True):
            # The cache goes by place: releases of Transformers name it differently.
            found = predictor.model(None, None, None, past, rows, use_cache=True)
            state = found.last_hidden_state[:, -1]
            logits.append(SHARPER * head(state))
            frame.append(_drawn(logits[-1]))
            rows = table(frame[-1]).unsqueeze(1)
        return torch.stack(frame, 1), torch.stack(logits, 1)

    @torch.no_grad()
    def own_frames(self, batch: Batch, *, in_turn: bool = False) -> Tensor:
        """What it would say itself in place of each target: frames [M, groups]; those in place of ends mean nothing.

        Each stands behind the true frames before it, and each residual code behind the true ones or, `in_turn`, as in
        serving, behind its own.
        """
        hidden, *_ = self.states(batch)
        if in_turn:
            return self.drawn_in_turn(hidden)[0]
        frames = batch.targets.clamp(max=self.codebook - 1)
        frames[:, 0] = self.talker.codec_head(hidden)[:, : self.codebook].argmax(-1)
        return torch.cat((frames[:, :1], _drawn(SHARPER * self.residual_logits(hidden, frames))), 1)

    def forward(
        self,
        batch: Batch,
        distortion: Distortion,
        predicted: int | None = None,
        heard: tuple[Listening, Crops] | None = None,
    ) -> dict[str, Tensor]:
        """Losses and accuracies of codebook 0 and of the residual codes, over at most `predicted` frames of these; with
        `heard` also those of what is heard in some stretches."""
        hidden, inside, looks = self.states(batch)
        logits = self.talker.codec_head(hidden)
        speaking = torch.nonzero(batch.targets[:, 0] != self.end).flatten()
        if predicted is not None and len(speaking) > predicted:
            speaking = speaking[torch.randperm(len(speaking))[:predicted]]
        words, phones = self.word_head(inside), self.phone_head(inside)
        frames = batch.targets[speaking]
        residual = self.residual_logits(hidden[speaking], frames)
        wanted = frames[:, 1:]
        right = residual.argmax(-1) == wanted
        turned = speaking
        if heard is not None:
            turned = torch.cat((heard[1].places.flatten(), speaking[:BESIDE_HEARD]))
        drawn, drawn_from = self.drawn_in_turn(hidden[turned])
        looks = looks[:, batch.sources != UNKNOWN]
        sound = {} if heard is None else heard[0](drawn, drawn_from, heard[1])
        return sound | {
            "pointing": -looks.clamp(min=1e-6).log().mean(),
            "looks": looks.mean(),
            "first": F.cross_entropy(logits, batch.targets[:, 0]),
            "residual": F.cross_entropy(residual.flatten(0, 1), wanted.flatten()),
            "distortion": distortion(drawn, drawn_from, batch.targets[turned]),
            "word": F.cross_entropy(words, batch.words, ignore_index=UNKNOWN),
            "phone": F.cross_entropy(phones, batch.phones, ignore_index=UNKNOWN),
            "first_right": (logits.argmax(-1) == batch.targets[:, 0]).float().mean(),
            "word_right": (words.argmax(-1) == batch.words)[batch.words != UNKNOWN].float().mean(),
            "second_right": right[:, 0].float().mean(),
            "residual_right": right.float().mean(),
        }


def _drawn(logits: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits.detach()).sample()


@torch.no_grad()
def evaluate(
    trainee: TalkerTrainee,
    examples: SpokenExamples,
    distortion: Distortion,
    listening: Listening,
    pad: int,
    count: int = 128,
) -> dict[str, float]:
    """Mean losses and accuracies over held-out answers, each in one of the voices that spoke it."""
    trainee.eval()
    rng, places = random.Random(0), np.random.default_rng(0)
    held_out = [sample for sample in samples(4 * count, "held_out") if sample.answer in examples.bank][:count]
    found: dict[str, list[float]] = {}
    for start in range(0, len(held_out), BATCH):
        part = [
            examples.example(
                sample, typed(rng, sample.question), sample.answer, rng.choice(examples.bank.voices(sample.answer))
            )
            for sample in held_out[start : start + BATCH]
        ]
        stretches = crops(part, places)
        heard = None if stretches is None else (listening, stretches)
        for name, value in trainee(Batch(part, trainee.end, pad), distortion, heard=heard).items():
            found.setdefault(name, []).append(value.item())
    trainee.train()
    return {name: round(fmean(values), 4) for name, values in found.items()}


def measure(work: Path, bank: CodeBank) -> Distortion:
    """The codec's own distance between frames, in units of their variance in a bank."""
    frames = [bank.frames(sentence, voice) for sentence in bank.sentences for voice in bank.voices(sentence)]
    codec, _ = load_codec(work)
    return Distortion(codec.quantizer.codebooks, torch.from_numpy(np.concatenate(frames)).long())


def train(work: Path, steps: int, rate: float = PEAK_RATE) -> None:
    """Train to step `steps`, from the last saved step on."""
    folder = work / "talker"
    tokenizer = build_tokenizer()
    raw = tiny_config(tokenizer)
    config = parse_config(raw)
    spoken = SpokenExamples(build_bank(work, "train"), tokenizer, config)
    held_out = SpokenExamples(build_bank(work, "held_out"), tokenizer, config)
    pad = config.tts_pad_token_id
    distortion, listening = measure(work, held_out.bank), Listening(work)
    torch.manual_seed(SEED)
    trainee = TalkerTrainee(raw).train()
    mean = AveragedModel(trainee, multi_avg_fn=get_ema_multi_avg_fn(MEAN_DECAY))
    parameters = list(trainee.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.02)
    step = resume(folder / "state.pt", trainee, optimizer, mean)
    log = TrainingLog(folder / "log.jsonl", every=20)
    while step < steps:
        started = time.monotonic()
        seed_step(SEED, step)
        set_rate(optimizer, cosine(step, steps, rate, warm_up=200))
        examples = pooled_batch(step, SEED, BATCH, spoken.draw, lambda row: len(row.text_ids))
        batch = Batch(examples, trainee.end, pad)
        if step >= OWN_FROM * steps:
            batch.give_back(trainee.own_frames(batch))
        batch.spoil(trainee.codebook)
        stretches = None
        if step >= HEARD_FROM * steps and step % HEARD_EVERY == 0:
            stretches = crops(examples, step_generator(SEED, step))
        heard = None if stretches is None else (listening, stretches)
        values = trainee(batch, distortion, PREDICTED_FRAMES, heard)
        optimizer.zero_grad()
        aside = NAMING * (values["word"] + values["phone"]) + POINTING * values["pointing"]
        loss = values["first"] + values["residual"] + DISTORTION * values["distortion"] + aside
        if heard is not None:
            loss = loss + HEARING * (values["spectral"] + values["clarity"])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        mean.update_parameters(trainee)
        step += 1
        found = {name: value.item() for name, value in values.items()}
        log.add(step, **found, gradient=norm.item(), seconds=time.monotonic() - started)
        if step % 200 == 0 or step == steps:
            save_step(folder / "state.pt", step, trainee, optimizer, mean)
        if step % 1000 == 0 or step == steps:
            log.evaluated(step, **evaluate(mean.module, held_out, distortion, listening, pad))


if __name__ == "__main__":
    run_trainer(__doc__, train, steps=12_000, rate=PEAK_RATE)
