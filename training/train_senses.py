"""Teach the trained Thinker to hear and to see: its encoders and its text decoder together. Resumable by step."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

from training.checkpoints import load_state, resume, save_step, seed_step
from training.command import run_trainer
from training.log import TrainingLog
from training.naming import Names, names_of
from training.parts import widen
from training.schedule import cosine, set_rate, step_generator
from training.senses import IGNORED, SenseBatch, SenseExamples, Turn, question_store
from training.tiny_config import tiny_config
from training.tokenizer import build_tokenizer
from triptych.models.qwen3_omni.synthetic_tokenizer import token_id

PEAK_RATE, SEED = 7e-4, 7
WRITTEN, SPOKEN, SEEN = 18, 16, 12  # samples of a step
NAMING = 0.5  # weight of the encoders' auxiliary losses
_HEARD_OR_READ = ("written", "spoken")


def build_thinker(raw: dict[str, Any]) -> Any:
    """Transformers' whole Thinker, freshly drawn; its embedding table is not trained."""
    config = Qwen3OmniMoeConfig.from_dict(raw).thinker_config
    for part in (config, config.text_config, config.audio_config, config.vision_config):
        part._attn_implementation = "sdpa"
        part._experts_implementation = "eager"
    thinker = Qwen3OmniMoeThinkerForConditionalGeneration(config)
    for encoder in (thinker.model.audio_tower, thinker.model.visual):
        widen(encoder)
    thinker.model.language_model.embed_tokens.weight.requires_grad_(False)
    return thinker


def load_text(thinker: Any, text: dict[str, Tensor]) -> None:
    """Give a Thinker the text decoder that `train_thinker` left. Raises ValueError where it does not fit."""
    state = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in text.items()}
    missing, unexpected = thinker.load_state_dict(state, strict=False)
    strays = [name for name in missing if not name.startswith(("model.audio_tower.", "model.visual."))]
    if strays or unexpected:
        raise ValueError(f"the text decoder's state does not fit: {[*strays, *unexpected][:3]}")


@torch.no_grad()
def evaluate(thinker: Any, examples: SenseExamples, pad: int, count: int) -> dict[str, float]:
    """Share of held-out answers of which every token is the likeliest, by kind; `count` samples of each sense."""
    thinker.eval()
    rng = random.Random(0)
    right: dict[str, list[bool]] = {}
    for draw_one in (examples.written, examples.spoken, examples.seen):
        turns = [draw_one(rng) for _ in range(count)]
        for start in range(0, count, 10):
            batch = SenseBatch(turns[start : start + 10], pad)
            likeliest = thinker(**batch.inputs, use_cache=False).logits.argmax(-1)
            good = ((likeliest == batch.labels) | (batch.labels == IGNORED)).all(1)
            for kind, fine in zip(batch.kinds, good.tolist(), strict=True):
                right.setdefault(kind, []).append(fine)
    thinker.train()
    return {kind: round(sum(values) / len(values), 4) for kind, values in sorted(right.items())}


def of_one_length(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Written, spoken, pictures and videos apart: each sense is several times as long as the one before it."""
    senses: dict[str, list[Turn]] = {}
    for turn in turns:
        sense = turn.kind if turn.kind in _HEARD_OR_READ else "video" if turn.video else "picture"
        senses.setdefault(sense, []).append(turn)
    return list(senses.values())


@contextmanager
def encoder_rows(thinker: Any) -> Iterator[list[Tensor]]:
    """The rows [N, hidden] that the encoders make inside."""
    found: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        found.append(output.pooler_output)

    hooks = [part.register_forward_hook(keep) for part in (thinker.model.audio_tower, thinker.model.visual)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def losses_of(thinker: Any, names: Names, batch: SenseBatch) -> tuple[Tensor, Tensor]:
    """The mean loss of each example's answers [B], and of the names of what a batch of one sense holds."""
    with encoder_rows(thinker) as rows:
        answers = answer_losses(thinker, batch)
    if not batch.rows:
        return answers, answers.new_zeros(())
    parts = rows[0].split(batch.rows)
    return answers, names.heard(parts, batch.words) if batch.words else names.seen(parts, batch.covered)


def answer_losses(thinker: Any, batch: SenseBatch) -> Tensor:
    """The mean loss of each example's answers [B]."""
    logits = thinker(**batch.inputs, use_cache=False).logits
    each = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="none")
    return each.view_as(batch.labels).sum(1) / (batch.labels != IGNORED).sum(1)


def first_thinker(work: Path, raw: dict[str, Any]) -> Any:
    """The Thinker to begin with: the text decoder, the eyes and the ears trained under `work`.

    Raises FileNotFoundError where the text decoder is not trained.
    """
    text = load_state(work / "thinker" / "state.pt")
    if text is None:
        raise FileNotFoundError(f"{work / 'thinker' / 'state.pt'} does not exist; train the thinker first")
    thinker = build_thinker(raw)
    load_text(thinker, text["model"])
    for stage, encoder in (("eyes", thinker.model.visual), ("ears", thinker.model.audio_tower)):
        if state := load_state(work / stage / "state.pt"):
            encoder.load_state_dict(state["model"])
    return thinker


def train(work: Path, steps: int) -> None:
    """Train to step `steps`, from the last saved step on; the first one starts from `first_thinker`."""
    folder = work / "senses"
    tokenizer = build_tokenizer()
    raw = tiny_config(tokenizer)
    examples = SenseExamples(tokenizer, question_store(work, "train"), "train")
    held_out = SenseExamples(tokenizer, question_store(work, "held_out"), "held_out")
    pad = token_id(tokenizer, "<|endoftext|>")
    torch.manual_seed(SEED)
    begun = (folder / "state.pt").exists()
    thinker = (build_thinker(raw) if begun else first_thinker(work, raw)).train()
    parameters = [parameter for parameter in thinker.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    names = names_of(tokenizer)
    step = resume(folder / "state.pt", thinker, optimizer)
    log = TrainingLog(folder / "log.jsonl", every=20)
    while step < steps:
        started = time.monotonic()
        seed_step(SEED, step)
        rng = random.Random(int(step_generator(SEED, step).integers(2**62)))
        set_rate(optimizer, cosine(step, steps, PEAK_RATE, warm_up=200))
        turns = [examples.written(rng) for _ in range(WRITTEN)]
        turns += [examples.spoken(rng) for _ in range(SPOKEN)]
        turns += [examples.seen(rng) for _ in range(SEEN)]
        optimizer.zero_grad()
        by_sense: dict[str, list[float]] = {}
        for part in of_one_length(turns):
            losses, naming = losses_of(thinker, names, SenseBatch(part, pad))
            ((losses.sum() + NAMING * len(part) * naming) / len(turns)).backward()
            if part[0].kind != "written":
                named = "heard_names" if part[0].kind == "spoken" else "seen_names"
                by_sense.setdefault(named, []).append(naming.item())
            for turn, loss in zip(part, losses.tolist(), strict=True):
                by_sense.setdefault(turn.kind if turn.kind in _HEARD_OR_READ else "seen", []).append(loss)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        log.add(
            step,
            **{sense: sum(values) / len(values) for sense, values in by_sense.items()},
            gradient=norm.item(),
            seconds=time.monotonic() - started,
        )
        if step % 200 == 0 or step == steps:
            save_step(folder / "state.pt", step, thinker, optimizer)
        if step % 1000 == 0 or step == steps:
            log.evaluated(step, exact=evaluate(thinker, held_out, pad, 100))


if __name__ == "__main__":
    run_trainer(__doc__, train, steps=6_000)
