"""Hidden states of media rows on their way from the Thinker to the Talker: which rows, and how they travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.connectors.contract import Array
from triptych.connectors.wire import MediaItem
from triptych.models.qwen3_omni.config import OmniConfig

PIECE_ROWS = 512  # the most that one handoff carries


def placeholder_rows(token_ids: Sequence[int], item: MediaItem, config: OmniConfig) -> NDArray[np.int64]:
    """The rows of a prompt that belong to one item, in order: those of its span with the placeholder of its kind."""
    placeholder = {"image": config.image_token_id, "audio": config.audio_token_id, "video": config.video_token_id}
    span = np.asarray(token_ids[item.start : item.end], dtype=np.int64)
    return np.flatnonzero(span == placeholder[item.kind]) + item.start


def media_rows(token_ids: Sequence[int], media: Iterable[MediaItem], config: OmniConfig) -> NDArray[np.int64]:
    """The rows of several items together, in the order of the prompt."""
    rows = [placeholder_rows(token_ids, item, config) for item in media]
    return np.sort(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int64)


def to_array(hidden: Tensor) -> Array:
    """Rows as they travel, bit for bit: numpy has no bfloat16, so that goes as uint16."""
    hidden = hidden.cpu()
    return (hidden.view(torch.uint16) if hidden.dtype is torch.bfloat16 else hidden).numpy()


def from_array(array: Array) -> Tensor:
    """The rows that `to_array` was given, in the array's own memory."""
    hidden = torch.from_numpy(array)
    return hidden.view(torch.bfloat16) if hidden.dtype is torch.uint16 else hidden
