"""From token ids to text, one token at a time: whole characters only, cut before the first stop string.

The text is that of decoding all ids at once, special tokens skipped. Byte-level tokens stand for bytes, so decoding is
joining bytes and reading UTF-8, which needs to remember at most the three bytes of an unfinished character.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer, decoders

from triptych.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """`text` may be emitted now. `released` are the next ids to speak, in order: of text that is now certain not to
    belong to a stop string. `stopped` is whether a stop string has ended the text."""

    text: str
    released: list[int]
    stopped: bool


class _Waiting(NamedTuple):
    """A token that is not released yet. The characters that begin in it lie at [begin, end) of the text; `text` is what
    is known of them."""

    token_id: int
    begin: int
    end: int
    text: str


def _byte_of_char() -> dict[str, int]:
    """How byte-level BPE writes bytes as characters: printable Latin-1 stands for itself, the rest follows U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class Detokenizer:
    """The text of one request.

    The first stop string is the one that is complete first; of several that end at the same character, the longest.
    Text that may be the beginning of a stop string is held back until it is certain, and so is an unfinished UTF-8
    character; `finish` gives out what is held when no more tokens come. A token is released once all of its text is
    certain, one without text as soon as all text before it is. What is released is the text, to its end: where a stop
    string begins inside a token, what that token has before it is encoded anew, without the white space at its end. A
    word's token begins with a space, so a stop string that is a word leaves nothing of it.

    Costs O(1) for a token, whatever came before. Raises CheckpointError when the tokenizer is not byte-level.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise CheckpointError(
                f"the tokenizer's decoder is {type(tokenizer.decoder).__name__}; only ByteLevel is supported"
            )
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._stops = [_StopString(text) for text in stop]
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = False  # bytes of a character that has not ended are in _utf8
        self._length = 0  # characters decoded so far
        self._held = ""  # the last of them, which may begin a stop string
        self._waiting: deque[_Waiting] = deque()
        self._stopped = False

    def push(self, token_id: int) -> Piece:
        """Take the next token. After a stop there is no more text: every further piece is empty and `stopped`."""
        if self._stopped:
            return Piece(text="", released=[], stopped=True)
        unfinished = int(self._unfinished)  # a character that began before this token
        text = self._feed(self._bytes(token_id))
        end = self._length + len(text) + self._unfinished
        self._waiting.append(_Waiting(token_id, self._length + unfinished, end, text[unfinished:]))
        return self._advance(text)

    def finish(self) -> Piece:
        """Give out what is held: no more tokens come. An unfinished character becomes U+FFFD."""
        if self._stopped:
            return Piece(text="", released=[], stopped=True)
        piece = self._advance(self._utf8.decode(b"", final=True))
        if piece.stopped:
            return piece
        released = piece.released + [token.token_id for token in self._waiting]
        text = piece.text + self._held
        self._waiting.clear()
        self._held, self._unfinished = "", False
        return Piece(text=text, released=released, stopped=False)

    def _bytes(self, token_id: int) -> bytes:
        """Of an id without a token (a vocabulary may be padded), or of a special one: none."""
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token, written as it is
            return str(token).encode()

    def _feed(self, data: bytes) -> str:
        """The characters that `data` completes."""
        text = self._utf8.decode(data)
        rest = self._utf8.getstate()[0]
        if len(rest) == 2 and rest[0] == 0xED and rest[1] >= 0xA0:
            # A surrogate, which is malformed already, but Python waits for its third byte.
            text, rest = text + self._utf8.decode(b"", final=True), b""
        self._unfinished = rest != b""
        return text

    def _advance(self, text: str) -> Piece:
        """Look for stop strings in new text, and release what is certain."""
        for i, char in enumerate(text if self._stops else ""):
            complete = max((stop.advance(char) for stop in self._stops), default=0)
            if complete:
                cut = self._length + i + 1 - complete
                return self._stop(cut, self._held + text[: i + 1])
        self._length += len(text)
        pending = max((stop.matched for stop in self._stops), default=0)
        text = self._held + text
        emit = len(text) - pending
        self._held = text[emit:]
        certain = self._length - pending
        return Piece(text=text[:emit], released=self._release(certain), stopped=False)

    def _release(self, certain: int) -> list[int]:
        """The ids of the tokens that end before position `certain` or at it."""
        released = []
        while self._waiting and self._waiting[0].end <= certain:
            released.append(self._waiting.popleft().token_id)
        return released

    def _stop(self, cut: int, text: str) -> Piece:
        """End the text at position `cut`; `text` is what is not emitted yet, up to the end of the stop string."""
        first = self._length - len(self._held)  # where `text` begins
        released = self._release(cut)
        if self._waiting and self._waiting[0].begin < cut:
            token = self._waiting[0]
            rest = token.text[: cut - token.begin].rstrip()
            released += self._tokenizer.encode(rest, add_special_tokens=False).ids
        self._waiting.clear()
        self._held = ""
        self._stopped = True
        return Piece(text=text[: cut - first], released=released, stopped=True)


class _StopString:
    """A stop string and how much of it the text so far ends with (Knuth, Morris, Pratt)."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string is empty")
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)  # for each prefix, the longest shorter one that it ends with
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def advance(self, char: str) -> int:
        """Take a character. Returns the length of the stop string when it is complete, else 0."""
        while self.matched and char != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched if self.matched == len(self.text) else 0
