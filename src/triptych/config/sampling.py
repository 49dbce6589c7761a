"""Sampling parameters: one value per request and stage, valid by construction."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args, get_origin

import msgspec

from triptych.config.json_value import cut, shown
from triptych.errors import ConfigError, UnknownNameError

LARGEST_TOP_K = 2**31
MOST_TOKENS = 2**31 - 1  # more than any context
SEEDS = range(-(2**63), 2**64)
MOST_STOP_STRINGS = 16
LONGEST_STOP_STRING = 1024
OF_TEXT_ALONE = ("stop", "stop_token_ids", "logprobs")
_SURROGATE = re.compile("[\ud800-\udfff]")
_TOKEN_ID = re.compile("[0-9]{1,10}", re.ASCII)
_SCALARS: dict[type, tuple[type | tuple[type, ...], str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    str: (str, "a string"),
}


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
            "top_k": (0, LARGEST_TOP_K),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.01, 100.0),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{shown(value)} is not between {low} and {high}", f"{path}.{name}")
        if self.top_p == 0.0:
            raise ConfigError("0 keeps no token; use a value in (0, 1]", f"{path}.top_p")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"{shown(self.max_tokens)} is not at least 1", f"{path}.max_tokens")
        if self.max_tokens is not None and self.max_tokens > MOST_TOKENS:
            raise ConfigError(f"{shown(self.max_tokens)} is more than {MOST_TOKENS}", f"{path}.max_tokens")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ConfigError(f"{shown(self.logprobs)} is not between 0 and 20", f"{path}.logprobs")
        if self.seed is not None and self.seed not in SEEDS:
            raise ConfigError(f"{shown(self.seed)} does not fit 64 bits", f"{path}.seed")
        for token_id, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise ConfigError(f"{shown(bias)} is not between -100 and 100", f"{path}.logit_bias.{token_id}")
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
                raise ConfigError(f"token id {shown(outside)} is not between 0 and {size - 1}", f"{prefix}{field}")


def is_text(text: str) -> bool:
    """Whether UTF-8 can write a string. One that comes from JSON or a command line may hold half a surrogate pair."""
    return text.isascii() or _SURROGATE.search(text) is None


def sampling_params(values: Mapping[str, Any], path: str, *, speech: bool = False) -> SamplingParams:
    """Build SamplingParams from plain values, for text or for speech, which has no use for those of text alone.

    Raises ConfigError with the dotted path of what is wrong, UnknownNameError where that is a name.
    """
    for name in OF_TEXT_ALONE if speech else ():
        if values.get(name) not in (None, [], ()):
            raise ConfigError("speech has no such setting; leave it out", f"{path}.{name}")
    if isinstance(values.get("stop"), str):
        values = {**values, "stop": [values["stop"]]}
    kinds = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
    for name, value in values.items():
        if name not in kinds:
            raise UnknownNameError(str(name), kinds, f"{path}.{cut(str(name))}")
        _check_type(value, kinds[name], f"{path}.{name}")
    params = msgspec.convert(values, SamplingParams, str_keys=True)  # JSON's keys are strings
    params.check(path)
    return params


def _check_type(value: Any, kind: Any, path: str) -> None:
    """Hold a value, and those inside it, to a type of SamplingParams: msgspec would tell of Python's types."""
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise _mistyped("an array", value, path)
        for index, item in enumerate(value):
            _check_type(item, get_args(kind)[0], f"{path}.{index}")
    elif get_origin(kind) is dict:
        if not isinstance(value, Mapping):
            raise _mistyped("an object", value, path)
        for key, item in value.items():
            where = f"{path}.{cut(str(key))}"
            if type(key) is not int and not (isinstance(key, str) and _TOKEN_ID.fullmatch(key)):
                raise ConfigError(f"a key should be a token id; got {shown(key)}, with the value {shown(item)}", where)
            _check_type(item, get_args(kind)[1], where)
    elif value is not None or NoneType not in get_args(kind):
        scalar = next((one for one in get_args(kind) if one is not NoneType), kind)
        types, words = _SCALARS[scalar]
        if not isinstance(value, types) or (isinstance(value, bool) and scalar is not bool):
            raise _mistyped(words, value, path)
        if scalar is float and isinstance(value, float) and not math.isfinite(value):
            raise _mistyped("a number, which NaN and Infinity are not", value, path)
        if scalar is float and isinstance(value, int) and abs(value) > 2**63:  # more than msgspec turns into a float
            raise _mistyped("a smaller number", value, path)


def _mistyped(words: str, value: Any, path: str) -> ConfigError:
    return ConfigError(f"should be {words}; got {shown(value)}", path)
