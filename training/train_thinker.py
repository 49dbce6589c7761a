"""Train the Thinker's text decoder on the closed domain. Resumable by step."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training.checkpoints import resume, save_step, seed_step
from training.command import run_trainer
from training.domain import Sample, samples
from training.log import TrainingLog
from training.parts import TextThinker
from training.phrasing import phrased, system, written
from training.rows import chat
from training.schedule import cosine, pooled_batch, set_rate
from training.tiny_config import tiny_config
from training.tokenizer import build_tokenizer
from triptych.models.qwen3_omni.synthetic_tokenizer import token_id

BATCH, PEAK_RATE, SEED = 48, 2e-3, 3
_IGNORED = -100


class ChatExamples:
    """Token ids of whole conversations, and which of them are to be learnt: the answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = token_id(tokenizer, "<|im_end|>")
        self.pad = token_id(tokenizer, "<|endoftext|>")

    def draw(self, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        source = random.Random(int(rng.integers(2**62)))
        return self.example(written(source, "train"), source)

    def example(self, sample: Sample, rng: random.Random) -> tuple[list[int], list[int]]:
        """Ids and labels of a sample, its questions in some style of typing."""
        ids: list[int] = []
        labels: list[int] = []
        begin = system(rng)
        for index, (question, answer) in enumerate([*sample.history, (sample.question, sample.answer)]):
            prompt = chat(self.tokenizer, (), phrased(rng, question), begin if index == 0 else None)
            reply = [*self.tokenizer.encode(answer).ids, self.end]
            newline = self.tokenizer.encode("\n").ids
            ids += prompt + reply + newline
            labels += [_IGNORED] * len(prompt) + reply + [_IGNORED] * len(newline)
        return ids, labels

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Ids [B, T] and the labels of the tokens that follow them [B, T]."""
        rows = pooled_batch(step, SEED, BATCH, self.draw, lambda row: len(row[0]))
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), longest), self.pad)
        labels = torch.full((len(rows), longest), _IGNORED)
        for index, (row, wanted) in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            labels[index, : len(row) - 1] = torch.tensor(wanted[1:])
        return ids, labels


@torch.no_grad()
def answer(model: TextThinker, prompt: list[int], end: int, limit: int = 64) -> list[int]:
    """The greedy answer to a prompt. Reads the whole sequence again at each step: for a few short answers."""
    ids = list(prompt)
    while len(ids) - len(prompt) < limit:
        token = int(model(torch.tensor([ids]))[0, -1].argmax())
        if token == end:
            break
        ids.append(token)
    return ids[len(prompt) :]


@torch.no_grad()
def evaluate(model: TextThinker, examples: ChatExamples, count: int) -> dict[str, float]:
    """Share of held-out samples answered exactly, teacher forced: right only if every token is the likeliest."""
    rng = random.Random(0)
    right: dict[str, list[bool]] = {}
    for sample in samples(count, "held_out", seed=1):
        ids, labels = examples.example(sample, rng)
        wanted = torch.tensor(labels[1:])
        start = len(ids) - len(examples.tokenizer.encode(sample.answer).ids) - 3  # the last answer alone
        likeliest = model(torch.tensor([ids]))[0, :-1].argmax(-1)
        kept = (wanted != _IGNORED) & (torch.arange(len(wanted)) >= start)
        right.setdefault(sample.kind, []).append(bool((likeliest == wanted)[kept].all()))
    scores = {kind: round(sum(values) / len(values), 4) for kind, values in sorted(right.items())}
    everything = [value for values in right.values() for value in values]
    return {"all": round(sum(everything) / len(everything), 4), **scores}


def train(work: Path, steps: int) -> None:
    """Train to step `steps`, from the last saved step on."""
    folder = work / "thinker"
    tokenizer = build_tokenizer()
    examples = ChatExamples(tokenizer)
    torch.manual_seed(SEED)
    model = TextThinker(tiny_config(tokenizer)).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    step = resume(folder / "state.pt", model, optimizer)
    log = TrainingLog(folder / "log.jsonl", every=20)
    while step < steps:
        started = time.monotonic()
        seed_step(SEED, step)
        set_rate(optimizer, cosine(step, steps, PEAK_RATE, warm_up=100))
        ids, labels = examples.batch(step)
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        log.add(step, loss=loss.item(), gradient=norm.item(), seconds=time.monotonic() - started)
        if step % 200 == 0 or step == steps:
            save_step(folder / "state.pt", step, model, optimizer)
        if step % 1000 == 0 or step == steps:
            model.eval()
            log.evaluated(step, exact=evaluate(model, examples, 300))
            model.train()


if __name__ == "__main__":
    run_trainer(__doc__, train, steps=6_000)
