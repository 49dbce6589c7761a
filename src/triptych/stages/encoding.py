"""The Thinker's encoder work: images, clips and videos become rows, a slice at a time between two decode steps."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from triptych.engine.encoder_cache import AHEAD_BYTES, EncoderCache
from triptych.errors import TriptychError
from triptych.models.qwen3_omni.encoders import Encoders, encoder_prefixes
from triptych.models.qwen3_omni.patches import patchify
from triptych.models.qwen3_omni.preprocessor_config import PreprocessorConfig, load_preprocessor
from triptych.stages.contract import StageContext
from triptych.stages.loading import load_model
from triptych.stages.media_slices import EncoderItem, Slice, check_item, slices
from triptych.telemetry.histogram import STEP_SECONDS, Histogram

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows of one item: `embeds` [rows, hidden] and as many for each DeepStack layer (none for audio)."""

    embeds: Tensor
    deepstack: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """A request whose media could not be encoded. The line has released it already."""

    request_id: str
    message: str


_Key = tuple[str, bytes, int]  # kind, digest, and the first row that is made


@dataclass(slots=True, eq=False)
class _Encoding:
    """An item on its way, or done. `item` is None once every row is there, `output` until the first slice is due.

    Rows before `first_row` are not made. `rows_ready` and the slices count from the item's first row all the same.
    """

    key: _Key
    item: EncoderItem | None
    first_row: int
    num_rows: int
    todo: deque[Slice]
    users: set[str] = field(default_factory=set)
    output: Encoded | None = None
    rows_ready: int = 0


_Work = tuple[_Encoding, EncoderItem, Slice]


class EncoderLine:
    """Encodes the media of many requests in slices, and keeps the rows while they are needed and then as a cache.

    For a stage:

    - `submit(request_id, items)` when a request comes; raises TriptychError, and holds nothing, when an item is not
      what its grid and rows say. The line drops the features once they are encoded or nobody needs them, or at once
      when their rows are there already: a caller who keeps no reference has a memory map closed by that.
    - `step()` encodes at most `budget` patches and spectrogram frames, or one slice where that alone is more (an image
      is not cut). Call it once a turn while `has_work()`. It returns the requests that failed.
    - `rows_ready(request_id, index)` is how far an item's rows can be had, from the first needed one on; it grows slice
      by slice. `rows(request_id, index, start, end)` are those, as views that must not be written to.
    - `release(request_id)` when its rows are needed no more: they may be forgotten. Idempotent.

    Requests take turns, first come first served, so a long video does not hold up a small picture. Items with one
    digest are encoded once. With `batch_invariant` every slice goes through its encoder alone, and slices depend on the
    item and the budget only: so the rows have the same bits whatever else is there. Without, slices share calls.

    Memory: rows are `dtype` on `device`. Needed rows stay; the rest is a cache of `cache_bytes`. While needed rows fill
    that (or AHEAD_BYTES, if more), only the oldest request that still waits begins new items.
    """

    def __init__(
        self,
        *,
        encoders: Encoders,
        preprocessor: PreprocessorConfig,
        budget: int,
        cache_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
    ) -> None:
        self.encoders, self.preprocessor, self.budget = encoders, preprocessor, max(1, budget)
        self.dtype, self.device, self.batch_invariant = dtype, device, batch_invariant
        self.cache: EncoderCache[_Encoding] = EncoderCache(cache_bytes)
        self.ahead_bytes = max(cache_bytes, AHEAD_BYTES)
        self.step_time_s = Histogram(STEP_SECONDS)
        self.num_queries = self.num_hits = 0  # items, and those whose rows were there or on their way
        self._requests: dict[str, tuple[_Encoding, ...]] = {}  # first come first
        self._unfinished: dict[_Key, _Encoding] = {}
        self._turns: deque[str] = deque()

    @classmethod
    def load(cls, context: StageContext, device: torch.device, dtype: torch.dtype) -> EncoderLine | None:
        """The line of the Thinker of `context`, or None where its checkpoint has no encoders.

        On a CPU they are float32 whatever `dtype`, the stage's, is. Raises CheckpointError.
        """
        prefixes = encoder_prefixes(context.model)
        if not prefixes:
            return None
        raw = json.loads(Path(context.model, "config.json").read_text(encoding="utf-8"))
        weights = torch.float32 if device.type == "cpu" else dtype
        return cls(
            encoders=load_model(context, lambda: Encoders(raw, prefixes), device, weights),
            preprocessor=load_preprocessor(context.model),
            budget=context.config.encoder_budget,
            cache_bytes=context.config.encoder_cache_bytes,
            dtype=dtype,
            device=device,
            batch_invariant=context.config.batch_invariant,
        )

    def submit(self, request_id: str, items: Sequence[EncoderItem]) -> None:
        """Take over the media of a request."""
        if request_id in self._requests:
            raise TriptychError(f"request {request_id!r} has its media here already")
        for item in items:
            check_item(item, self.encoders)
        encodings = tuple(self._encoding(request_id, item) for item in items)
        self._requests[request_id] = encodings
        if any(encoding.item is not None for encoding in encodings):
            self._turns.append(request_id)

    def release(self, request_id: str) -> None:
        """Forget a request: what only it waited for is not encoded, what it needed may leave the cache."""
        for encoding in self._requests.pop(request_id, ()):
            encoding.users.discard(request_id)
            if encoding.item is not None and not encoding.users:
                self._unfinished.pop(encoding.key, None)
                self.cache.discard(encoding.key)
            else:
                self.cache.unpin(encoding.key, request_id)
        if request_id in self._turns:
            self._turns.remove(request_id)

    def has_work(self) -> bool:
        return bool(self._unfinished)

    def rows_ready(self, request_id: str, index: int) -> int:
        """Up to which row the request's item number `index` can be had, from the first needed one on."""
        return self._requests[request_id][index].rows_ready

    def rows(self, request_id: str, index: int, start: int, end: int) -> Encoded:
        """Rows [start, end) of an item, all of them ready."""
        encoding = self._requests[request_id][index]
        first, ready = encoding.first_row, encoding.rows_ready
        if encoding.output is None or not first <= start <= end <= ready:
            raise ValueError(f"rows [{start}, {end}) of item {index}: those from {first} to {ready} are ready")
        part = slice(start - first, end - first)
        return Encoded(encoding.output.embeds[part], tuple(layer[part] for layer in encoding.output.deepstack))

    @torch.inference_mode()
    def step(self) -> tuple[Fault, ...]:
        """Encode the next slices; the requests that failed over theirs."""
        started = time.perf_counter()
        due = self._due()
        if self.batch_invariant:
            calls = [[work] for work in due]
        else:  # all pictures together, and sound of one chunk length
            together: dict[int, list[_Work]] = {}
            for work in due:
                together.setdefault(work[2].chunk, []).append(work)
            calls = list(together.values())
        faults = tuple(fault for call in calls for fault in self._encode(call))
        self.step_time_s.observe(time.perf_counter() - started)
        return faults

    # --- whose turn it is --------------------------------------------------------------------------------------------

    def _encoding(self, request_id: str, item: EncoderItem) -> _Encoding:
        """The encoding of an item, shared with whoever brought the same one and needs no earlier row."""
        todo = deque(piece for piece in slices(item, self.encoders, self.budget) if piece.end > item.first_row)
        first_row = todo[0].row
        self.num_queries += 1
        for first in dict.fromkeys((0, first_row)):
            key = (item.kind, item.digest, first)
            encoding = self.cache.pin(key, request_id) or self._unfinished.get(key)
            if encoding is not None:
                self.num_hits += 1
                break
        else:
            encoding = _Encoding(key, item, first_row, item.num_rows, todo)
            self._unfinished[key] = encoding
        encoding.users.add(request_id)
        return encoding

    def _due(self) -> list[_Work]:
        """Slices within the budget, one a turn; at least one while there is work."""
        due: list[_Work] = []
        spent = passed_over = 0
        while passed_over < len(self._turns):
            request_id = self._turns[0]
            encoding = self._next(request_id)
            if encoding is None or encoding.item is None:
                self._turns.popleft()
                continue
            if encoding.output is None and not self._may_begin(request_id, encoding):
                passed_over += 1
                self._turns.rotate(-1)
                continue
            cost = encoding.todo[0].cost
            if due and spent + cost > self.budget:
                break
            if encoding.output is None:
                self._begin(encoding)
            due.append((encoding, encoding.item, encoding.todo.popleft()))
            spent += cost
            passed_over = 0
            self._turns.rotate(-1)
        return due

    def _next(self, request_id: str) -> _Encoding | None:
        return next((encoding for encoding in self._requests[request_id] if encoding.todo), None)

    def _may_begin(self, request_id: str, encoding: _Encoding) -> bool:
        if self.cache.pinned_bytes + self._nbytes(encoding) <= self.ahead_bytes:
            return True
        return request_id == next(waiting for waiting in self._requests if self._next(waiting))

    def _begin(self, encoding: _Encoding) -> None:
        """Make room for the rows of an item."""
        self.cache.add(encoding.key, encoding, self._nbytes(encoding), encoding.users)
        shape = (encoding.num_rows - encoding.first_row, self.encoders.hidden_size)
        embeds, *deepstack = (
            torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(self._num_tensors(encoding))
        )
        encoding.output = Encoded(embeds, tuple(deepstack))

    def _nbytes(self, encoding: _Encoding) -> int:
        num_rows = encoding.num_rows - encoding.first_row
        return self._num_tensors(encoding) * num_rows * self.encoders.hidden_size * self.dtype.itemsize

    def _num_tensors(self, encoding: _Encoding) -> int:
        return 1 if encoding.key[0] == "audio" else 1 + self.encoders.num_deepstack

    # --- encoding ----------------------------------------------------------------------------------------------------

    def _encode(self, call: list[_Work]) -> list[Fault]:
        """One call of an encoder. When it fails, each slice alone, so that only those whose slice it is fail."""
        call = [work for work in call if work[0].users]  # an earlier slice may have failed
        if not call:
            return []
        try:
            found = self._call(call)
        except (RuntimeError, ValueError) as error:  # RuntimeError: out of memory, too
            if len(call) > 1:
                return [fault for work in call for fault in self._encode([work])]
            encoding = call[0][0]
            logger.exception("a slice of %s cannot be encoded", encoding.key[0])
            return self._fail(encoding, f"{encoding.key[0]} cannot be encoded: {error}")
        faults: list[Fault] = []
        row = 0
        for encoding, _, piece in call:
            faults += self._store(encoding, piece, [tensor[row : row + piece.num_rows] for tensor in found])
            row += piece.num_rows
        return faults

    def _call(self, call: list[_Work]) -> list[Tensor]:
        """The rows of slices one after another: embeds, then the DeepStack layers."""
        if call[0][1].kind == "audio":
            # Copied: a memory map cannot be written to, which torch does not know.
            mels = [torch.from_numpy(item.features[:, piece.start : piece.stop].copy()) for _, item, piece in call]
            return [self.encoders.encode_audio([mel.to(self.device) for mel in mels], chunk=call[0][2].chunk)]
        weights = self.encoders.dtype
        pixels = [torch.from_numpy(item.features[piece.start : piece.stop].copy()) for _, item, piece in call]
        patches = torch.cat([patchify(part, self.preprocessor, weights, self.device) for part in pixels])
        embeds, deepstack = self.encoders.encode_vision(patches, [piece.grid for *_, piece in call])
        return [embeds, *deepstack]

    def _store(self, encoding: _Encoding, piece: Slice, found: Sequence[Tensor]) -> list[Fault]:
        if encoding.output is None or not encoding.users:
            return []  # an earlier slice of it has failed
        rows = slice(piece.row - encoding.first_row, piece.end - encoding.first_row)
        for whole, part in zip((encoding.output.embeds, *encoding.output.deepstack), found, strict=True):
            whole[rows].copy_(part)
            if not whole[rows].isfinite().all():
                return self._fail(encoding, f"the encoder gave no finite values for this {encoding.key[0]}")
        encoding.rows_ready = piece.end
        if piece.end == encoding.num_rows:
            encoding.item = None
            del self._unfinished[encoding.key]
        return []

    def _fail(self, encoding: _Encoding, message: str) -> list[Fault]:
        """Everyone who brought this item fails with it."""
        users = [request_id for request_id in self._requests if request_id in encoding.users]
        for request_id in users:
            self.release(request_id)
        return [Fault(request_id, message) for request_id in users]
