"""The media of the Thinker's prompts: encoded when a prompt needs it, and put into its rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.connectors import segments
from triptych.connectors.contract import Array
from triptych.connectors.wire import FeatureRef, MediaItem
from triptych.engine.batch import ScheduledRow
from triptych.engine.request import EngineRequest, RequestStatus
from triptych.engine.scheduler import Scheduler
from triptych.errors import TriptychError
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.models.qwen3_omni.positions import mrope_positions
from triptych.stages.encoding import Encoded, EncoderLine, Fault
from triptych.stages.hidden_rows import placeholder_rows
from triptych.stages.media_slices import EncoderItem


@dataclass(slots=True)
class _Item:
    """One item of a prompt and its rows there. Those from `first_row` on are had from an order, the others from a
    prefix-cache hit; `order` names what was submitted to the encoder line with the item."""

    media: MediaItem
    rows: NDArray[np.int64]
    order: str = ""
    index: int = 0  # within the order
    first_row: int = 0

    @property
    def end(self) -> int:
        return int(self.rows[-1]) + 1

    @property
    def hit_end(self) -> int:
        """How far a hit must reach; 0 when none is needed."""
        if not self.order:
            return self.end
        return int(self.rows[self.first_row - 1]) + 1 if self.first_row else 0


@dataclass(slots=True)
class _Prompt:
    engine: EngineRequest
    items: list[_Item]
    orders: list[str] = field(default_factory=list)
    num_orders: int = 0
    looked_up: tuple[int, int] | None = None  # when the prefix cache was last asked, as what may change its answer

    @property
    def end(self) -> int:
        return max(item.end for item in self.items)


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Encoder output at its packed rows of one step."""

    places: Tensor
    encoded: Encoded


class PromptMedia:
    """Media by request, from `open` to `close`.

    What the prefix cache holds is not encoded. What a prompt needed is let go once its media rows are computed; a
    request that is preempted after that finds them in the prefix cache, or has them encoded again.
    """

    def __init__(self, *, line: EncoderLine, scheduler: Scheduler, config: OmniConfig) -> None:
        self._line, self._scheduler, self._config = line, scheduler, config
        self._prompts: dict[str, _Prompt] = {}
        self._clients: dict[str, str] = {}  # order -> request

    def __len__(self) -> int:
        """Requests with media."""
        return len(self._prompts)

    def open(self, engine: EngineRequest, media: Sequence[MediaItem]) -> None:
        """Give a request that is not yet in line its positions and keys.

        Raises TriptychError for media that does not fit the prompt.
        """
        items = [_Item(item, placeholder_rows(engine.token_ids, item, self._config)) for item in media]
        for item in items:
            if not len(item.rows):
                raise TriptychError(
                    f"the prompt has no rows for its {item.media.kind} at [{item.media.start}, {item.media.end})"
                )
            key = engine.content_keys.get(item.media.start, b"")
            engine.content_keys[item.media.start] = key + item.media.digest
        place = mrope_positions(engine.token_ids, media, self._config)
        engine.positions, engine.position_delta = place
        prompt = self._prompts[engine.request_id] = _Prompt(engine, items)
        self._tell(prompt)

    def close(self, request_id: str) -> None:
        """Forget a request. Idempotent."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._release(prompt)

    def order(self) -> list[Fault]:
        """Have encoded what waiting requests need and the prefix cache does not hold, or no longer."""
        faults = []
        for request_id, prompt in self._prompts.items():
            try:
                self._order(request_id, prompt)
            except TriptychError as error:
                faults.append(Fault(request_id, str(error)))
        return faults

    def has_work(self) -> bool:
        return self._line.has_work()

    def step(self) -> list[Fault]:
        """Some encoder work. Returns the requests that failed by it, each once; close them."""
        if not self._line.has_work():
            return []
        faults = {self._clients[fault.request_id]: fault.message for fault in self._line.step()}
        for request_id, prompt in self._prompts.items():
            if prompt.orders and request_id not in faults:
                self._tell(prompt)
        return [Fault(request_id, message) for request_id, message in faults.items()]

    def placed(self, rows: Iterable[ScheduledRow], device: torch.device) -> list[PlacedRows]:
        """What the encoders made for those rows of a step, which are packed in this order."""
        found, at = [], 0
        for row in rows:
            if row.request.content_keys and row.start < row.request.num_prompt_tokens:
                for item in self._prompts[row.request.request_id].items:
                    low, high = np.searchsorted(item.rows, (row.start, row.start + row.num_tokens)).tolist()
                    if low < high:
                        places = torch.from_numpy(item.rows[low:high] + (at - row.start)).to(device)
                        found.append(PlacedRows(places, self._line.rows(item.order, item.index, low, high)))
            at += row.num_tokens
        return found

    def computed(self, rows: Iterable[ScheduledRow]) -> None:
        """A step has computed `rows`: let go of media that is not needed for more."""
        for row in rows:
            prompt = self._prompts.get(row.request.request_id) if row.request.content_keys else None
            if prompt is not None and prompt.orders and row.request.num_computed_tokens >= prompt.end:
                self._release(prompt)
                self._tell(prompt)

    def _order(self, request_id: str, prompt: _Prompt) -> None:
        engine = prompt.engine
        if engine.status is not RequestStatus.WAITING or engine.parked or not any(i.hit_end for i in prompt.items):
            return
        now = (self._scheduler.pool.num_forgotten, engine.num_preemptions)
        if prompt.looked_up == now:
            return
        prompt.looked_up = now
        num_cached = self._scheduler.num_hit_tokens(engine)
        missing = [item for item in prompt.items if item.hit_end > num_cached]
        if not missing:
            return
        name = f"{request_id}/{prompt.num_orders}"
        first_rows = [int(np.searchsorted(item.rows, num_cached)) for item in missing]
        self._line.submit(name, [self._encoder_item(*pair) for pair in zip(missing, first_rows, strict=True)])
        prompt.num_orders += 1
        prompt.orders.append(name)
        self._clients[name] = request_id
        for index, (item, first_row) in enumerate(zip(missing, first_rows, strict=True)):
            item.order, item.index, item.first_row = name, index, first_row
        self._tell(prompt)

    @staticmethod
    def _encoder_item(item: _Item, first_row: int) -> EncoderItem:
        media = item.media
        if media.features is None:
            raise TriptychError(f"the {media.kind} at row {media.start} came without features")
        return EncoderItem(
            kind=media.kind,
            digest=media.digest,
            num_rows=len(item.rows),
            features=map_features(media.features),
            grid=media.grid,
            first_row=first_row,
        )

    def _tell(self, prompt: _Prompt) -> None:
        """Tell the scheduler how far inputs are missing."""
        prompt.engine.absent_end = max(item.hit_end if self._is_ready(item) else item.end for item in prompt.items)

    def _is_ready(self, item: _Item) -> bool:
        return bool(item.order) and self._line.rows_ready(item.order, item.index) == len(item.rows)

    def _release(self, prompt: _Prompt) -> None:
        for name in prompt.orders:
            self._line.release(name)
            del self._clients[name]
        prompt.orders.clear()
        for item in prompt.items:
            item.order = ""


@dataclass(frozen=True, slots=True)
class MediaLayers:
    """Between the layers of one step with rows of media: hidden states are kept, DeepStack rows added.

    `hidden` [slots, hidden] keeps what layer `kept_layer` gave, as the Talker takes it: without the DeepStack rows that
    are added behind that layer (HF's hooks record what a layer returns).
    """

    hidden: Tensor | None
    kept_layer: int
    slots: Tensor
    added: Sequence[PlacedRows]

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        if self.hidden is not None and layer == self.kept_layer:
            self.hidden.index_copy_(0, self.slots, x.to(self.hidden.dtype))
        for rows in self.added:
            if layer < len(rows.encoded.deepstack):
                x.index_add_(0, rows.places, rows.encoded.deepstack[layer].to(x.dtype))
        return x


def map_features(ref: FeatureRef) -> Array:
    """The array behind a reference, in memory shared with others: not to be written to. Raises TriptychError."""
    try:
        dtype = np.dtype(ref.dtype)
        mapped = segments.map_readonly(ref.segment, segments.MEDIA)
        return np.frombuffer(mapped, dtype, math.prod(ref.shape)).reshape(ref.shape)
    except (OSError, ValueError, TypeError) as error:
        raise TriptychError(f"media features {ref.segment!r} cannot be read: {error}") from error
