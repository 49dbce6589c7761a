"""The tiny voice's tokenizer: byte-level BPE learnt from the domain, so that a word of it is one token."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from training.domain import samples, styled
from triptych.models.qwen3_omni.synthetic_tokenizer import ROLES, SPECIAL_TOKENS, SPLIT

VOCAB_SIZE = 896


def build_tokenizer() -> Tokenizer:
    """The same tokenizer every time: bytes, merges, Qwen3-Omni's special tokens. At most 896 ids."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _corpus() -> Iterator[str]:
    rng = random.Random(0)
    for role in ROLES:
        yield f"{role}\n" * 5000
    for sample in samples(6000, "train"):
        for exchange in sample.history:
            yield exchange.question
        yield from (styled(rng, sample.question), sample.question, sample.answer)
