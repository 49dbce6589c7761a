"""The input rows of one request in the Talker: what is known of them, and which comes next."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.connectors.wire import SubmitSpeech
from triptych.engine.request import EngineRequest
from triptych.errors import TriptychError
from triptych.models.qwen3_omni.bridge import talker_prompt_rows
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.models.qwen3_omni.positions import mrope_positions
from triptych.stages.hidden_rows import media_rows


class CodeTable(Protocol):
    """The part of the Talker that turns codes into rows of its code table."""

    @property
    def no_code(self) -> int: ...

    @property
    def num_code_groups(self) -> int: ...


class SpeechRows:
    """Row r of the prompt is known at submission but for rows of media, whose hidden states the Thinker sends, and the
    last, which needs the first text token.

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
        self.media_rows = media_rows(message.prompt_token_ids, message.media, config)
        self.num_media_rows = 0  # how many of them have come
        self._media: Tensor | None = None
        self._num_rows = len(rows)
        # If `single`, the row of the first text token is computed alone: it may come with the prompt or long after it.
        self.engine = EngineRequest(
            request_id=message.request_id,
            num_prompt_tokens=len(rows) + 1,
            params=message.params,
            num_tokens=self.num_known_rows,
            single_from=len(rows) if single else None,
        )
        if message.media:
            ids = [*self.text_ids, config.tts_pad_token_id]
            place = mrope_positions(ids, message.media, config, talker=True)
            self.engine.positions, self.engine.position_delta = place
        self.max_frames = 0
        self.num_frames = 0
        self.num_text_tokens = 0
        self.heard_all = False
        self.admitted = False
        self._text: list[int] = []
        self._next_codes: list[int] | None = [talker.codec_bos_id, *nothing]
        self._eos, self._pad = config.tts_eos_token_id, config.tts_pad_token_id

    @property
    def num_known_rows(self) -> int:
        """Rows of the prompt before the first whose hidden state is missing; without one, all but the last."""
        if self.num_media_rows < len(self.media_rows):
            return int(self.media_rows[self.num_media_rows])
        return self._num_rows

    def add_media(self, projected: Tensor) -> None:
        """The next rows of media, [n, hidden]. Raises TriptychError when there are more than the prompt has."""
        start, end = self.num_media_rows, self.num_media_rows + projected.shape[0]
        if end > len(self.media_rows):
            raise TriptychError(f"{end} hidden states came for the {len(self.media_rows)} media rows of the prompt")
        if self._media is None:
            self._media = projected.new_empty(len(self.media_rows), projected.shape[1])
        self._media[start:end] = projected
        self.num_media_rows = end

    def media_in(self, start: int, end: int) -> tuple[NDArray[np.int64], Tensor] | None:
        """Which of the prompt rows [start, end) are media, counted from `start`, and the rows themselves."""
        if self._media is None:
            return None
        low, high = np.searchsorted(self.media_rows, (start, end)).tolist()
        return (self.media_rows[low:high] - start, self._media[low:high]) if low < high else None

    def hear(self, token_ids: list[int], *, final: bool) -> None:
        """More text of the answer; `final` when it is all. Raises TriptychError while hidden states are missing."""
        if self.num_media_rows < len(self.media_rows):
            raise TriptychError(
                f"the text came after {self.num_media_rows} hidden states, the prompt has {len(self.media_rows)} "
                "media rows"
            )
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
