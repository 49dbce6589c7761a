"""The Talker's prompt, made from the Thinker's. Plain ids, no torch: the server process uses it too.

HF: `Qwen3OmniMoeForConditionalGeneration.generate`, `_get_talker_user_parts`, `_get_talker_assistant_parts`. System
turns and earlier answers are dropped with their media, every user turn is kept, and the block of the answer to come
follows. A row of that block is the sum of a text row and a codec row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from triptych.models.qwen3_omni.config import OmniConfig, TalkerConfig
from triptych.models.qwen3_omni.media_layout import Placed, Span

HEADER_ROWS = 3  # <|im_start|> assistant \n
ASSISTANT_ROWS = 9  # the header, four pads, tts_bos, and the first token of the answer


class TalkerRow(NamedTuple):
    """One row of the Talker's prompt: a text id, and the codec id whose embedding is added (None: nothing is)."""

    text_id: int
    codec_id: int | None


def talker_prompt_token_ids(prompt_token_ids: Sequence[int], config: OmniConfig) -> tuple[int, ...]:
    """The ids of a Thinker prompt that the Talker sees: its user turns, then the three of the last answer's header.

    Raises ValueError when the prompt does not end with an assistant header.
    """
    kept: list[int] = []
    for start, end in _user_turns(prompt_token_ids, config):
        kept.extend(prompt_token_ids[start:end])
    kept.extend(prompt_token_ids[-HEADER_ROWS:])
    return tuple(kept)


def num_talker_rows(talker_prompt: Sequence[int]) -> int:
    """How many rows the Talker's prompt has, that of the answer's first token included."""
    return len(talker_prompt) - HEADER_ROWS + ASSISTANT_ROWS


def talker_spans(prompt_token_ids: Sequence[int], media: Sequence[Placed], config: OmniConfig) -> tuple[Span, ...]:
    """Where the media of the user turns lies in the Talker's prompt; `part` is the index in `media`.

    An item lies in one turn, as templates write it, so its rows stay together. Raises ValueError as above.
    """
    spans: list[Span] = []
    dropped, kept_until = 0, 0  # rows that are not the Talker's, and the end of the user turn before
    for start, end in _user_turns(prompt_token_ids, config):
        dropped += start - kept_until
        kept_until = end
        spans += (
            Span(index, item.start - dropped, item.end - dropped, item.in_video)
            for index, item in enumerate(media)
            if start <= item.start < end
        )
    return tuple(spans)


def _user_turns(prompt_token_ids: Sequence[int], config: OmniConfig) -> list[tuple[int, int]]:
    starts = [index for index, token in enumerate(prompt_token_ids) if token == config.im_start_token_id]
    if not starts or len(prompt_token_ids) - starts[-1] != HEADER_ROWS:
        raise ValueError("the prompt does not end with an assistant header of three tokens")
    if prompt_token_ids[starts[-1] + 1] != config.assistant_token_id:
        raise ValueError("the last turn of the prompt is not the assistant's")
    return [
        (start, end) for start, end in itertools.pairwise(starts) if prompt_token_ids[start + 1] == config.user_token_id
    ]


def talker_prompt_rows(
    talker_prompt: Sequence[int], speaker_id: int, config: OmniConfig, talker: TalkerConfig
) -> list[TalkerRow]:
    """Every prompt row that is known before the answer's first token: all but the last, which adds `codec_bos_id`."""
    users, header = talker_prompt[:-HEADER_ROWS], talker_prompt[-HEADER_ROWS:]
    pad = config.tts_pad_token_id
    return [
        *(TalkerRow(token, None) for token in users),
        *(TalkerRow(token, None) for token in header),
        TalkerRow(pad, talker.codec_nothink_id),
        TalkerRow(pad, talker.codec_think_bos_id),
        TalkerRow(pad, talker.codec_think_eos_id),
        TalkerRow(pad, speaker_id),
        TalkerRow(config.tts_bos_token_id, talker.codec_pad_id),
    ]
