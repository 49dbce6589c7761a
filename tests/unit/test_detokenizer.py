"""Text one token at a time equals the text of all tokens at once, cut before the first stop string."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from triptych.engine.detokenizer import Detokenizer
from triptych.errors import CheckpointError

CORPUS = "Hello world, hello there! 你好、世界 你好 naïve café 😀😀👩‍👩‍👧 the stop is here. STOP END\n\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([CORPUS] * 5, trainer)
    made.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<|audio|>", special=True)])
    made.add_tokens([AddedToken("<think>", special=False), AddedToken("汉字 ", special=False)])
    return made


def run(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[str, list[int], bool]:
    """Text, released ids and whether a stop string came; checks each step's promises on the way."""
    detokenizer = Detokenizer(tokenizer, stop)
    text, released, stopped = "", list[int](), False
    for i, token_id in enumerate(ids):
        piece = detokenizer.push(token_id)
        text += piece.text
        released += piece.released
        if piece.stopped:
            stopped = True
            break
        whole: str = tokenizer.decode(list(ids[: i + 1]))
        assert whole.startswith(text)
        tail = max((len(string) for string in stop), default=1) - 1
        assert len(whole) - len(text) <= tail + 1  # a possible beginning of a stop string and one unfinished character
    last = detokenizer.finish()
    stopped = stopped or last.stopped
    return text + last.text, released + last.released, stopped


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first; the longest of those that end together."""
    for end in range(1, len(text) + 1):
        lengths = [len(string) for string in stop if text[:end].endswith(string)]
        if lengths:
            return end - max(lengths)
    return None


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def bytes_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of the one-byte tokens that spell `text`."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [id_of(tokenizer, char) for char in pre.pre_tokenize_str(text)[0][0]]


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    alphabet = byte_of_char()
    token = tokenizer.id_to_token(token_id)
    added = tokenizer.get_added_tokens_decoder().get(token_id)
    if token is None or (added is not None and added.special):
        return b""
    return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()


@cache
def byte_of_char() -> dict[str, int]:
    """Learnt from the library: text shows the character of each byte that UTF-8 uses; the others follow in order."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    chars: dict[int, str] = {}
    for code in [*range(0x100), *range(0x100, 0xD800, 0x40), *range(0x10000, 0x110000, 0x1000)]:
        for byte, char in zip(chr(code).encode(), pre.pre_tokenize_str(chr(code))[0][0], strict=True):
            chars[byte] = char
    rest = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(chars.values()))
    missing = [byte for byte in range(256) if byte not in chars]
    chars.update(zip(missing, rest, strict=True))
    return {char: byte for byte, char in chars.items()}


def expected_released(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """The tokens that end within `text`, then those of what is left of it, but for the white space at its end."""
    data, found, length = b"", list[int](), 0
    for token_id in ids:
        data += token_bytes(tokenizer, token_id)
        end = len(data.decode(errors="replace"))  # an unfinished character counts
        if end > len(text):
            break
        found.append(token_id)
        length = end
    rest: list[int] = tokenizer.encode(text[length:].rstrip(), add_special_tokens=False).ids
    return found + rest


STOPS: list[tuple[str, ...]] = [
    (),
    ("STOP",),
    ("\n\n", "END"),
    ("o", "lo w"),
    ("abab", "ababc", "bc"),
    ("好", "世界 "),
    ("�",),
    ("x�",),
    ("aaab",),
    (" ",),
]


@pytest.mark.parametrize("stop", STOPS, ids=repr)
def test_pieces_join_to_the_whole_text_cut_at_the_first_stop(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    rng = random.Random(repr(stop))
    vocab = tokenizer.get_vocab_size()
    texts = [CORPUS, "ababababcab", "aaaaaaab", "xx�x", *stop]
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    specials = [id_of(tokenizer, "<|im_end|>"), id_of(tokenizer, "<|audio|>"), vocab + 7]
    letters = [id_of(tokenizer, char) for char in "abcxlo"]
    chars = {byte: char for char, byte in byte_of_char().items()}
    # Leads and what may not follow them: overlong forms, surrogates, beyond U+10FFFF, characters cut short.
    nasty = [id_of(tokenizer, chars[byte]) for byte in b"\xed\xa0\xe0\x80\xf0\x90\xf4\xc3\xe4\xbd"]
    for _ in range(400):
        ids: list[int] = []
        length = rng.randint(1, 40)
        while len(ids) < length:
            match rng.randrange(6):
                case 0:
                    ids.append(rng.randrange(vocab))  # any bytes, mostly malformed UTF-8
                case 5:
                    ids += rng.choices(nasty, k=rng.randint(1, 4))
                case 1:
                    ids.append(rng.choice(specials))
                case 2:
                    ids.append(rng.choice(letters))
                case _:
                    chosen = rng.choice(encoded)
                    start = rng.randrange(len(chosen))
                    ids += chosen[start : start + rng.randint(1, 8)]
        whole: str = tokenizer.decode(ids)
        cut = first_stop(whole, stop)
        text, released, stopped = run(tokenizer, ids, stop)
        assert stopped == (cut is not None)
        assert text == whole[:cut]
        assert released == (ids if cut is None else expected_released(tokenizer, ids, text))


def test_every_byte_decodes_as_in_the_library(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    bytes_only = [id_of(tokenizer, char) for char in pre_tokenizers.ByteLevel.alphabet()]
    for _ in range(300):
        ids = rng.choices(bytes_only, k=60)
        assert run(tokenizer, ids)[0] == tokenizer.decode(ids)


def test_a_character_split_over_tokens_comes_out_whole(tokenizer: Tokenizer) -> None:
    ids = bytes_of(tokenizer, "😀")
    assert len(ids) == 4
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token_id).text for token_id in ids] == ["", "", "", "😀"]


def test_an_unfinished_character_is_flushed_as_a_replacement_with_its_tokens(tokenizer: Tokenizer) -> None:
    ids = bytes_of(tokenizer, "😀")[:2]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token_id).released for token_id in ids] == [[], []]
    last = detokenizer.finish()
    assert (last.text, last.released, last.stopped) == ("�", ids, False)


def test_bytes_that_never_make_a_character_are_not_held(tokenizer: Tokenizer) -> None:
    lead, follow = bytes_of(tokenizer, "é")
    detokenizer = Detokenizer(tokenizer)
    for _ in range(100):
        assert detokenizer.push(follow).text == "�"
    detokenizer.push(lead)
    for _ in range(100):
        assert detokenizer.push(lead).text == "�"


def test_a_possible_stop_is_held_and_given_out_when_it_fails(tokenizer: Tokenizer) -> None:
    ids = [id_of(tokenizer, char) for char in "xabx"]
    detokenizer = Detokenizer(tokenizer, ["abc"])
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert [piece.text for piece in pieces] == ["x", "", "", "abx"]
    assert [piece.released for piece in pieces] == [ids[:1], [], [], ids[1:]]


def test_the_end_of_the_text_gives_out_what_is_held(tokenizer: Tokenizer) -> None:
    ids = [id_of(tokenizer, char) for char in "xab"]
    detokenizer = Detokenizer(tokenizer, ["abc"])
    for token_id in ids:
        detokenizer.push(token_id)
    last = detokenizer.finish()
    assert (last.text, last.released, last.stopped) == ("ab", ids[1:], False)


def test_of_a_token_that_reaches_into_the_stop_only_what_is_before_it_is_released(tokenizer: Tokenizer) -> None:
    hello = id_of(tokenizer, "Hello")
    space, world = id_of(tokenizer, "Ġ"), id_of(tokenizer, "w")
    detokenizer = Detokenizer(tokenizer, ["lo w"])
    assert detokenizer.push(hello).text == "Hel"
    assert detokenizer.push(space).released == []
    piece = detokenizer.push(world)
    assert (piece.text, piece.stopped) == ("", True)
    assert hello not in piece.released and tokenizer.decode(piece.released) == "Hel"


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "said"),
    [
        (["Hello", "Ġworld"], "world", "Hello ", "Hello"),
        (["Hello", "Ġ", "world"], "world", "Hello ", "Hello "),  # a space that is a token belongs to the text
        (["Hello", "Ġworld"], " world", "Hello", "Hello"),
        (["Hello", "Ġthe", "Ġstop"], "the stop", "Hello ", "Hello"),
        (["Hello", "Ġthe", "Ġstop"], "stop", "Hello the ", "Hello the"),
        (["Ġthe", "Ġtheirs", "."], "the", " ", ""),
        (["Hello", "Ġtheirs", "."], "irs", "Hello the", "Hello the"),
        (["Hello", "Ġtheirs", "."], "rs.", "Hello thei", "Hello thei"),
        (["Hello", ".ĊĊ"], "\n", "Hello.", "Hello."),
        (["Hello", "ĠĊ"], "\n", "Hello ", "Hello"),
        (["Hello", "Ġthe", "Ġthe", "Ġstop"], "the stop", "Hello the ", "Hello the"),  # one attempt inside another
    ],
)
def test_what_a_stop_string_cuts_off_is_not_spoken(
    tokenizer: Tokenizer, tokens: list[str], stop: str, text: str, said: str
) -> None:
    """Tokens of words begin with a space, as in the checkpoints' vocabularies; text up to the stop is kept."""
    # Tokens that the small vocabulary may lack.
    words = Tokenizer.from_str(tokenizer.to_str())
    words.add_tokens([AddedToken(token, normalized=False) for token in tokens if words.token_to_id(token) is None])
    got, released, stopped = run(words, [id_of(words, token) for token in tokens], [stop])
    assert (got, words.decode(released), stopped) == (text, said, True)


def test_after_a_stop_there_is_nothing_more(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ["a"])
    a = id_of(tokenizer, "a")
    assert detokenizer.push(a).stopped
    for piece in (detokenizer.push(a), detokenizer.finish()):
        assert (piece.text, piece.released, piece.stopped) == ("", [], True)


def test_the_first_space_is_kept(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" world", add_special_tokens=False).ids
    assert run(tokenizer, ids)[0] == " world"


def test_another_kind_of_tokenizer_is_refused() -> None:
    made = Tokenizer(models.BPE())
    made.decoder = decoders.Metaspace()
    with pytest.raises(CheckpointError, match="Metaspace; only ByteLevel"):
        Detokenizer(made)
