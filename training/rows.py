"""The Talker's input rows for a known answer and its known frames: teacher forcing, in the layout of serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from training.domain import Exchange
from training.speech_store import Recording
from triptych.errors import CheckpointError
from triptych.models.qwen3_omni.bridge import talker_prompt_rows, talker_prompt_token_ids
from triptych.models.qwen3_omni.config import OmniConfig

NO_CODE = -1  # a row without codec part, or with codebook 0 alone
UNKNOWN = -100  # a frame in which no word is said


@dataclass(frozen=True, slots=True)
class SpeechExample:
    """Rows [R] of text ids and [R][groups] of codes, and the frames that follow from the last rows.

    Row `first + k` predicts frame k; the row behind the last frame predicts the end.
    """

    text_ids: list[int]
    codes: list[list[int]]
    frames: list[list[int]]
    first: int
    words: list[int] = field(default_factory=list)  # [frames], the token said in each, UNKNOWN in pauses
    phones: list[int] = field(default_factory=list)  # [frames]
    sources: list[int] = field(default_factory=list)  # [frames], the row in which the word was given, UNKNOWN if none
    recording: Recording | None = None  # what the teacher said


def chat(tokenizer: Tokenizer, history: Sequence[Exchange], question: str, system: str | None = None) -> list[int]:
    """Prompt ids of a conversation in the checkpoint's chat template, the last answer's header included."""
    turns = [] if system is None else [("system", system)]
    for exchange in history:
        turns += [("user", exchange.question), ("assistant", exchange.answer)]
    turns.append(("user", question))
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    ids: list[int] = tokenizer.encode(f"{text}<|im_start|>assistant\n").ids
    return ids


def speech_example(
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    frames: Sequence[Sequence[int]],
    speaker: str,
    config: OmniConfig,
) -> SpeechExample:
    """Every input row of one spoken answer. `answer_ids` are the tokens the Thinker hands over: no end marker.

    Raises CheckpointError where the config has no Talker, ValueError for a prompt without an assistant header.
    """
    talker = config.talker
    if talker is None:
        raise CheckpointError("this checkpoint has no Talker")
    groups = talker.num_code_groups
    prompt = talker_prompt_rows(talker_prompt_token_ids(prompt_ids, config), talker.speaker_id[speaker], config, talker)
    text_ids = [row.text_id for row in prompt]
    codes = [_lone(row.codec_id, groups) for row in prompt]
    first = len(text_ids)
    answer = [*answer_ids, config.tts_eos_token_id]
    for index in range(len(frames) + 1):
        text_ids.append(answer[index] if index < len(answer) else config.tts_pad_token_id)
        codes.append(list(frames[index - 1]) if index else _lone(talker.codec_bos_id, groups))
    return SpeechExample(text_ids, codes, [list(frame) for frame in frames], first)


def _lone(codec_id: int | None, groups: int) -> list[int]:
    return [NO_CODE if codec_id is None else codec_id, *[NO_CODE] * (groups - 1)]


def sources(words: Sequence[int | None], token_of: Mapping[int, int], first: int) -> list[int]:
    """The row that gave the word of each frame; UNKNOWN in pauses, and where a word is said before it was given."""
    rows = [None if word is None else first + token_of[word] for word in words]
    return [UNKNOWN if row is None or row > first + frame else row for frame, row in enumerate(rows)]
