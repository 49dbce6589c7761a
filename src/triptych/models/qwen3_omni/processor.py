"""From chat messages to prompt token ids, and back from ids to text: the tokenizer and chat template of a checkpoint.

Runs in the server process, so it imports neither torch nor transformers. What a user writes is text and stays text: a
special token spelled inside a message (`<|im_start|>`) is encoded as the characters it is made of, never as the token.
For an image, a clip or a video the template writes one placeholder; `media_layout.expand` repeats it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from triptych.errors import CheckpointError, RequestError
from triptych.models.qwen3_omni.media_layout import KINDS

# How Qwen's tokenizers cut text before merging (transformers' Qwen2Tokenizer has it as a constant, too).
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRIVATE_USE = range(0xE000, 0xF900)

Message = Mapping[str, Any]


class Processor:
    """The tokenizer and the chat template of one checkpoint folder.

    Raises CheckpointError when the folder has no tokenizer, no chat template, or one that cannot be read.
    """

    def __init__(self, model_dir: str | Path) -> None:
        folder = Path(model_dir)
        settings = _read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
        self.tokenizer = _load_tokenizer(folder, settings)
        self.tokenizer.encode_special_tokens = True  # `encode` cuts the specials out itself; elsewhere they are text
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self._added_text = {token_id: token.content for token_id, token in added.items()}
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")
        self._starts = {token[:end] for token in longest_first for end in range(1, len(token))}
        self._longest = len(longest_first[0]) if longest_first else 0
        self._source = _template_source(folder, settings)
        self._template = _compile(self._source, folder)
        vocab = self.tokenizer.get_vocab(with_added_tokens=False)
        self._most_bytes = max(
            [1, *map(len, vocab), *(len(text.encode()) for text in self._added_text.values())]  # of one token
        )
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._variables = {name: _token_content(settings[name]) for name in names if settings.get(name)}

    def is_special(self, token_id: int) -> bool:
        """Whether an id is that of a token which only the chat template can write."""
        return token_id in self._special_ids.values()

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt as one string, as the chat template writes it, ending with the header of the answer.

        A part of type "image", "audio" or "video" is passed on without what it holds: as its type alone, under that
        name as well, because some templates look at the type of a part and others at its keys. Raises RequestError
        (param `messages`) when the template refuses the conversation.
        """
        plain = [
            {key: _bare(value) if key == "content" else value for key, value in message.items() if value is not None}
            for message in messages
        ]
        try:
            return self._template.render(
                messages=plain, tools=None, documents=None, add_generation_prompt=True, **self._variables
            )
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError, ValueError) as error:
            raise RequestError(f"the chat template cannot render these messages: {error}", "messages") from error

    def fewest_tokens(self, messages: Sequence[Message]) -> int:
        """How many tokens the text of these messages has at the least, told at once from its length.

        No token stands for more bytes than the longest one, and no character for less than a byte: half a byte where
        normalisation (NFC) may join it to others.
        """
        texts = _texts(messages)
        return sum(len(text) if text.isascii() else len(text) // 2 for text in texts) // self._most_bytes

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the rendered prompt. Special tokens come from the template alone, never from a message.

        Media parts have one placeholder each, wherever the template writes it. Raises RequestError as `render` does.
        """
        # Inside messages, the first character of everything that is (or could become, joined to what follows) a
        # special token is swapped for a stand-in until the template's own special tokens have been cut out.
        swap = self._stand_ins(messages)
        back = {ord(stand_in): character for character, stand_in in swap.items()}
        rendered = self.render([self._guard(message, swap) for message in messages])
        texts: list[str] = []
        specials: list[int] = []  # after each text but the last
        end = 0
        for match in self._special.finditer(rendered):
            texts.append(rendered[end : match.start()].translate(back))
            specials.append(self._special_ids[match.group()])
            end = match.end()
        texts.append(rendered[end:].translate(back))
        # As a batch, because that alone lets go of Python's lock: a long prompt must not hold the event loop.
        first, *others = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = list(first.ids)
        for special, encoding in zip(specials, others, strict=True):
            ids.append(special)
            ids += encoding.ids
        return tuple(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a token may end inside a character. Empty for an id without a token."""
        if (added := self._added_text.get(token_id)) is not None:
            return str(added).encode()
        token = self.tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if any(character not in _BYTES for character in token):  # not a byte-level token
            return str(token).encode()
        return bytes(_BYTES[character] for character in token)

    def token_text(self, token_id: int) -> str:
        """The text of a token alone; bytes that are not whole characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _stand_ins(self, messages: Sequence[Message]) -> dict[str, str]:
        firsts = sorted({token[0] for token in self._special_ids})
        taken = set(self._source).union(*_strings(messages))
        free = [chr(code) for code in _PRIVATE_USE if chr(code) not in taken]
        if len(free) < len(firsts):
            raise RequestError("the messages use every private-use character (U+E000 to U+F8FF)", "messages")
        return dict(zip(firsts, free, strict=False))

    def _guard(self, value: Any, swap: Mapping[str, str]) -> Any:
        if isinstance(value, str):
            return self._guard_text(value, swap)
        if isinstance(value, Mapping):
            return {key: self._guard(item, swap) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item, swap) for item in value]
        return value

    def _guard_text(self, text: str, swap: Mapping[str, str]) -> str:
        guarded = self._special.sub(lambda match: swap[match.group()[0]] + match.group()[1:], text)
        # Two parts of a message may spell one token between them: every end that starts one is guarded as well.
        for length in range(1, min(self._longest, len(guarded) + 1)):
            if guarded[-length:] in self._starts:
                at = len(guarded) - length
                guarded = guarded[:at] + swap[guarded[at]] + guarded[at + 1 :]
        return guarded


def _load_tokenizer(folder: Path, settings: Mapping[str, Any]) -> Any:
    whole = folder / "tokenizer.json"
    try:
        if whole.exists():
            return Tokenizer.from_file(str(whole))
        return _qwen_tokenizer(folder, settings)
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {error}") from error


def _qwen_tokenizer(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Qwen's byte-level BPE from `vocab.json`, `merges.txt` and the added tokens of `tokenizer_config.json`."""
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    missing = [path.name for path in (vocab, merges) if not path.exists()]
    if missing:
        raise CheckpointError(f"{folder} has no tokenizer: neither tokenizer.json nor {' and '.join(missing)}")
    tokenizer = Tokenizer(BPE.from_file(str(vocab), str(merges)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = sorted((int(key), token) for key, token in settings.get("added_tokens_decoder", {}).items())
    flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
    for token_id, token in added:
        token = AddedToken(token["content"], **{flag: bool(token.get(flag, False)) for flag in flags})
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"{folder}/tokenizer_config.json gives {token.content!r} the id {token_id}, "
                f"vocab.json makes it {tokenizer.token_to_id(token.content)}"
            )
    return tokenizer


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return _read_text(path)
    path = folder / "chat_template.json"
    source = _read_json(path).get("chat_template") if path.exists() else settings.get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise CheckpointError(
            f"{folder} has no chat template: none of chat_template.jinja, chat_template.json and "
            "the key chat_template of tokenizer_config.json"
        )
    return source


def _compile(source: str, folder: Path) -> jinja2.Template:
    """The template in the environment that transformers gives to chat templates."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template in {folder} is not valid, line {error.lineno}: {error}") from error


def _bare(content: Any) -> Any:
    """The content of a message with its media parts reduced to what a template asks of them."""
    if not isinstance(content, list | tuple):
        return content
    return [
        {"type": kind, kind: kind} if isinstance(part, Mapping) and (kind := part.get("type")) in KINDS else part
        for part in content
    ]


def _texts(messages: Sequence[Message]) -> Iterable[str]:
    """The content of messages, as far as it is text."""
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else [{"text": content}]
        for part in parts:
            if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
                yield text


def _strings(value: Any) -> Iterable[str]:
    """Every string in messages, or in a part of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _token_content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character (the table of GPT-2's published encoder)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()
