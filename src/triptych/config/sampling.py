"""Sampling parameters: one value per request and stage, valid by construction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from triptych.errors import ConfigError

MOST_STOP_STRINGS = 16
LONGEST_STOP_STRING = 1024
OF_TEXT_ALONE = ("stop", "stop_token_ids", "logprobs")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(\w*).*`")  # how msgspec ends the message of a ValidationError


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one stage draws its tokens.

    `temperature` 0 is greedy. `top_k` 0 keeps every token. `seed` None means a fresh random seed is chosen at
    admission. `max_tokens` None means what the stage's context leaves. `logprobs` is the number of alternatives to
    report for each token (0: only the chosen one; None: no logprobs at all).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None

    def check(self, path: str) -> None:
        """Raise ConfigError naming `path.<field>` for the first value out of its range."""
        ranges: dict[str, tuple[float, float]] = {
            "temperature": (0.0, 100.0),
            "top_k": (0, 2**31),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.01, 100.0),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{value} is not between {low} and {high}", f"{path}.{name}")
        if self.top_p == 0.0:
            raise ConfigError("0 keeps no token; use a value in (0, 1]", f"{path}.top_p")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"{self.max_tokens} is not at least 1", f"{path}.max_tokens")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ConfigError(f"{self.logprobs} is not between 0 and 20", f"{path}.logprobs")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"{self.seed} does not fit 64 bits", f"{path}.seed")
        for token_id, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise ConfigError(f"{bias} is not between -100 and 100", f"{path}.logit_bias.{token_id}")
        if len(self.stop) > MOST_STOP_STRINGS:
            raise ConfigError(f"{len(self.stop)} stop strings; at most {MOST_STOP_STRINGS}", f"{path}.stop")
        for text in self.stop:
            if not 0 < len(text) <= LONGEST_STOP_STRING:
                message = f"a stop string has {len(text)} characters, not 1 to {LONGEST_STOP_STRING}"
                raise ConfigError(message, f"{path}.stop")
            if not is_text(text):
                raise ConfigError("a stop string has half a surrogate pair in it: no character", f"{path}.stop")

    def check_vocabulary(self, size: int, prefix: str = "") -> None:
        """Raise ConfigError naming `<prefix><field>` for a token id that a vocabulary of `size` does not have."""
        for field, ids in (("logit_bias", tuple(self.logit_bias)), ("stop_token_ids", self.stop_token_ids)):
            if len(ids) > size:
                raise ConfigError(f"{len(ids)} token ids, but the vocabulary has {size}", f"{prefix}{field}")
            outside = next((token_id for token_id in ids if not 0 <= token_id < size), None)
            if outside is not None:
                raise ConfigError(f"token id {outside} is not between 0 and {size - 1}", f"{prefix}{field}")


def is_text(text: str) -> bool:
    """Whether UTF-8 can write a string. One that comes from JSON or a command line may hold half a surrogate pair."""
    return text.isascii() or _SURROGATE.search(text) is None


def sampling_params(values: Mapping[str, Any], path: str, *, speech: bool = False) -> SamplingParams:
    """Build SamplingParams from plain values, for text or for speech, which has no use for those of text alone.

    Raises ConfigError with the dotted path of what is wrong.
    """
    for name in OF_TEXT_ALONE if speech else ():
        if values.get(name) not in (None, [], ()):
            raise ConfigError("speech has no such setting; leave it out", f"{path}.{name}")
    if isinstance(values.get("stop"), str):
        values = {**values, "stop": [values["stop"]]}
    try:
        params = msgspec.convert(values, SamplingParams, str_keys=True)  # JSON's keys are strings
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        if place is not None and place[1]:
            raise ConfigError(_PLACE.sub("", str(error)), f"{path}.{place[1]}") from error
        names = ", ".join(SamplingParams.__struct_fields__)
        raise ConfigError(f"{error} (allowed: {names})", path) from error
    params.check(path)
    return params
