"""A byte-level BPE tokenizer for synthetic checkpoints: small, seeded, with the special tokens of Qwen3-Omni.

The vocabulary is 256 bytes, then merges learnt from the sentences of a small grammar, then the special tokens, and
fills `vocab_size` exactly. Most ids decode to readable ASCII, so a random model writes readable nonsense.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<|audio_pad|>",
)
# The split of Qwen's tokenizers: Transformers' Qwen2Tokenizer applies it whatever tokenizer.json says.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ROLES = ("system", "user", "assistant")
_DETERMINERS = ("the", "a", "this", "every", "another", "some", "no", "our", "that")
_ADJECTIVES = tuple(
    "quiet bright old small warm early distant green careful narrow gentle hollow silver open patient heavy".split()
)
_NOUNS = tuple(
    "river bridge lantern garden window letter train mountain harbour clock singer teacher engine market forest "
    "winter morning signal painter station cable stone paper voice road island number story table question".split()
)
_VERBS = tuple(
    "carries follows watches opens crosses remembers finds builds answers paints repeats leaves calls moves".split()
)
_ADVERBS = tuple("slowly again today often nearby together once later always quickly".split())
_ONSETS = "b c d f g h k l m n p r s t v w br cl dr fl gr pl sh st th tr".split()
_VOWELS = "a e i o u ai ea ou".split()
_CODAS = ("", "", "n", "r", "l", "s", "t", "nd", "st", "m")


def build_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """Train a tokenizer of exactly `vocab_size` ids. Raises ValueError when `vocab_size` has no room for its parts."""
    learnt = vocab_size - len(SPECIAL_TOKENS)
    if learnt < 512:
        raise ValueError(f"vocab_size {vocab_size} is too small: at least {512 + len(SPECIAL_TOKENS)} is needed")
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
        vocab_size=learnt, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(_corpus(vocab_size, seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the grammar yields {tokenizer.get_vocab_size()} tokens, not the {vocab_size} asked for")
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token. Raises ValueError when the vocabulary has no such token."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"{token!r} is not one token of the vocabulary")
    return found


def readable_ids(tokenizer: Tokenizer) -> list[bool]:
    """For each id, whether a model may write it freely: printable ASCII (or a line break), and not a special token."""
    readable = []
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id], skip_special_tokens=True)
        readable.append(bool(text) and all(" " <= character <= "~" or character == "\n" for character in text))
    return readable


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that Transformers' AutoTokenizer reads, chat template included, into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    template = (files(__package__) / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(template), indent=2), encoding="utf-8")


def _tokenizer_config(template: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "extra_special_tokens": {
            "image_token": "<|image_pad|>",
            "audio_token": "<|audio_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        "chat_template": template,
    }


def _corpus(vocab_size: int, seed: int) -> Iterator[str]:
    """Sentences of the grammar, with role names often enough that each becomes one token."""
    generator = random.Random(seed)
    coined = [_coined_word(generator) for _ in range(vocab_size // 2)]
    for role in ROLES:
        yield f"{role}\n" * 200
    for word in coined:
        noun, verb, adverb = generator.choice(_NOUNS), generator.choice(_VERBS), generator.choice(_ADVERBS)
        subject = f"{generator.choice(_DETERMINERS)} {generator.choice(_ADJECTIVES)} {noun}"
        sentence = f"{subject} {verb} {generator.choice(_DETERMINERS)} {word} {adverb}"
        yield f"{sentence[0].upper()}{sentence[1:]}{generator.choice('.,!?')} {sentence}.\n"


def _coined_word(generator: random.Random) -> str:
    syllables = generator.choice((1, 2, 2, 3))
    return "".join(
        generator.choice(_ONSETS) + generator.choice(_VOWELS) + generator.choice(_CODAS) for _ in range(syllables)
    )
