"""The input rows of one request in the Talker: what is known of them, and which comes next."""

from __future__ import annotations

from typing import Protocol

from triptych.connectors.wire import SubmitSpeech
from triptych.engine.request import EngineRequest
from triptych.errors import TriptychError
from triptych.models.qwen3_omni.bridge import talker_prompt_rows
from triptych.models.qwen3_omni.config import OmniConfig


class CodeTable(Protocol):
    """The part of the Talker that turns codes into rows of its code table."""

    @property
    def no_code(self) -> int: ...

    @property
    def num_code_groups(self) -> int: ...


class SpeechRows:
    """Row r of the prompt is known at submission but for the last, which needs the first text token.

    Each later row needs the frame drawn from the row before and the next text id: the next token, once `tts_eos` when
    the text is over, then `tts_pad` for ever.
    """

    def __init__(self, message: SubmitSpeech, config: OmniConfig, model: CodeTable, *, single: bool) -> None:
        talker = config.talker
        if talker is None:
            raise TriptychError("this checkpoint has no Talker")
        rows = talker_prompt_rows(message.prompt_token_ids, message.speaker_id, config, talker)
        nothing = [model.no_code] * (model.num_code_groups - 1)
        self.text_ids = [row.text_id for row in rows]
        self.code_rows = [[model.no_code if row.codec_id is None else row.codec_id, *nothing] for row in rows]
        # The row of the first text token is always computed alone: it may come with the prompt or long after it.
        self.engine = EngineRequest(
            request_id=message.request_id,
            num_prompt_tokens=len(rows) + 1,
            params=message.params,
            num_tokens=len(rows),
            single_from=len(rows) if single else None,
        )
        self.max_frames = 0
        self.num_frames = 0
        self.num_text_tokens = 0
        self.heard_all = False
        self.admitted = False
        self._text: list[int] = []
        self._next_codes: list[int] | None = [talker.codec_bos_id, *nothing]
        self._eos, self._pad = config.tts_eos_token_id, config.tts_pad_token_id

    def hear(self, token_ids: list[int], *, final: bool) -> None:
        """More text of the answer; `final` when it is all."""
        self._text += token_ids
        self.num_text_tokens += len(token_ids)
        self.heard_all = final

    def add_frame(self, frame: list[int], code_rows: list[int]) -> None:
        """A frame was drawn; its codes belong to the next row."""
        self.num_frames += 1
        self._next_codes = code_rows

    def next_row(self) -> bool:
        """Append the next row if both its parts are known. Returns whether it did."""
        if self._next_codes is None:
            return False
        if self.num_frames < self.num_text_tokens:
            text_id = self._text[self.num_frames]
        elif self.heard_all:
            text_id = self._eos if self.num_frames == self.num_text_tokens else self._pad
        else:
            return False
        self.text_ids.append(text_id)
        self.code_rows.append(self._next_codes)
        self._next_codes = None
        return True
