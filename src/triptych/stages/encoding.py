"""The Thinker's encoder work: images, clips and videos become rows, a slice at a time between two decode steps."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from triptych.engine.encoder_cache import EncoderCache
from triptych.errors import TriptychError
from triptych.models.qwen3_omni.encoders import Encoders, has_encoders
from triptych.stages.contract import StageContext
from triptych.stages.loading import load_model

logger = logging.getLogger(__name__)

Kind = Literal["image", "audio", "video"]
Patchify = Callable[[Kind, Tensor], Tensor]

# Rows made ahead of the oldest request may weigh this much, or the cache's bytes if those are more.
AHEAD_BYTES = 256 * 1024**2


class SliceEncoder(Protocol):
    """What the line needs of `models.qwen3_omni.encoders.Encoders`."""

    chunk_frames: int
    window_frames: int
    num_mel_bins: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    hidden_size: int
    num_deepstack: int

    def audio_rows(self, frames: int) -> int: ...

    def encode_vision(
        self, patches: Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> tuple[Tensor, tuple[Tensor, ...]]: ...

    def encode_audio(self, slices: Sequence[Tensor], *, chunk: int) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderItem:
    """One image, clip or video of a prompt. `digest`, `grid` and `features` are those of `wire.MediaItem`.

    `num_rows` is how many rows of the prompt it fills. `features` may be a view of a read-only memory map: the line
    drops its reference once the item is encoded or nobody needs it, or at once when its rows are there already.
    """

    kind: Kind
    digest: bytes
    num_rows: int
    features: np.ndarray
    grid: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows of one item: `embeds` [rows, hidden] and as many for each DeepStack layer (none for audio)."""

    embeds: Tensor
    deepstack: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """A request whose media could not be encoded. The line has forgotten it already."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class _Unit:
    """What goes through an encoder at once: temporal patches, or frames of a spectrogram, [start, stop)."""

    start: int
    stop: int
    cost: int
    row: int  # the first of its rows in the item
    num_rows: int


_Key = tuple[Kind, bytes]


@dataclass(slots=True, eq=False)
class _Encoding:
    """An item on its way. `item` is None once every row is there, `output` until the first slice is due."""

    key: _Key
    item: EncoderItem | None
    num_rows: int
    units: deque[_Unit]
    users: set[str] = field(default_factory=set)
    output: Encoded | None = None
    rows_ready: int = 0


class EncoderLine:
    """Encodes the media of many requests in slices, and keeps the rows while they are needed and then as a cache.

    For a stage:

    - `submit(request_id, items)` when a request comes; raises TriptychError, and holds nothing, when an item is not
      what its grid and rows say.
    - `step()` encodes at most `budget` patches and spectrogram frames, or one slice where that alone is more (an image
      is not cut). Call it once a turn while `has_work()`. It returns the requests that failed.
    - `rows_ready(request_id, index)` rows of an item can be had, from its first on; they grow slice by slice.
      `rows(request_id, index, start, end)` are those, as views that must not be written to.
    - `release(request_id)` when a request ends or is aborted, and not before: a preempted request asks for its rows
      again. Idempotent.

    Requests take turns, first come first served, so a long video does not hold up a small picture. Items with one
    digest are encoded once. With `batch_invariant` every slice goes through its encoder alone, and slices depend on the
    item and the budget only: so the rows have the same bits whatever else is there. Without, slices share calls.

    Memory: rows are `dtype` on `device`. Needed rows stay; the rest is a cache of `cache_bytes`. While needed rows fill
    that (or AHEAD_BYTES, if more), only the oldest request that still waits begins new items.

    `patchify(kind, pixels)` normalises uint8 [frames, height, width, 3] on `device`, frames of whole temporal patches
    but for the last, and cuts it to patches [t * h * w, channels * temporal patch * patch^2].
    """

    def __init__(
        self,
        *,
        encoders: SliceEncoder,
        patchify: Patchify,
        budget: int,
        cache_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
    ) -> None:
        self.encoders, self.patchify, self.budget = encoders, patchify, max(1, budget)
        self.dtype, self.device, self.batch_invariant = dtype, device, batch_invariant
        self.cache: EncoderCache[_Encoding] = EncoderCache(cache_bytes)
        self.ahead_bytes = max(cache_bytes, AHEAD_BYTES)
        self._requests: dict[str, tuple[_Encoding, ...]] = {}  # first come first
        self._unfinished: dict[_Key, _Encoding] = {}
        self._turns: deque[str] = deque()

    def submit(self, request_id: str, items: Sequence[EncoderItem]) -> None:
        """Take over the media of a request."""
        if request_id in self._requests:
            raise TriptychError(f"request {request_id!r} is being encoded already")
        for item in items:
            self._check(item)
        encodings = tuple(self._encoding(request_id, item) for item in items)
        self._requests[request_id] = encodings
        if any(encoding.item is not None for encoding in encodings):
            self._turns.append(request_id)

    def release(self, request_id: str) -> None:
        """Forget a request: what only it waited for is not encoded, what it needed may leave the cache."""
        for encoding in self._requests.pop(request_id, ()):
            encoding.users.discard(request_id)
            self.cache.unpin(encoding.key, request_id)
            if encoding.item is not None and not encoding.users:
                self._unfinished.pop(encoding.key, None)
                self.cache.discard(encoding.key)
        if request_id in self._turns:
            self._turns.remove(request_id)

    def has_work(self) -> bool:
        return bool(self._unfinished)

    def rows_ready(self, request_id: str, index: int) -> int:
        """How many rows of the request's item number `index` can be had, counted from its first."""
        return self._requests[request_id][index].rows_ready

    def rows(self, request_id: str, index: int, start: int, end: int) -> Encoded:
        """Rows [start, end) of an item, all of them ready."""
        encoding = self._requests[request_id][index]
        if encoding.output is None or not 0 <= start <= end <= encoding.rows_ready:
            raise ValueError(f"rows [{start}, {end}) of item {index}: {encoding.rows_ready} are ready")
        return Encoded(
            encoding.output.embeds[start:end], tuple(layer[start:end] for layer in encoding.output.deepstack)
        )

    @torch.inference_mode()
    def step(self) -> tuple[Fault, ...]:
        """Encode the next slices; the requests that failed over theirs."""
        faults: list[Fault] = []
        for batch in self._batches(self._next_slices()):
            faults += self._encode(batch)
        return tuple(faults)

    # --- which slices ------------------------------------------------------------------------------------------------

    def _next_slices(self) -> list[tuple[_Encoding, _Unit]]:
        """Slices within the budget, one a turn; at least one while there is work."""
        taken: list[tuple[_Encoding, _Unit]] = []
        spent = passed_over = 0
        while passed_over < len(self._turns):
            request_id = self._turns[0]
            encoding = self._next_encoding(request_id)
            if encoding is None:
                self._turns.popleft()
                continue
            if encoding.output is None and not self._may_begin(request_id, encoding):
                passed_over += 1
                self._turns.rotate(-1)
                continue
            unit = encoding.units[0]
            if taken and spent + unit.cost > self.budget:
                break
            if encoding.output is None:
                self._begin(encoding)
            taken.append((encoding, encoding.units.popleft()))
            spent += unit.cost
            passed_over = 0
            self._turns.rotate(-1)
        return taken

    def _next_encoding(self, request_id: str) -> _Encoding | None:
        return next((encoding for encoding in self._requests[request_id] if encoding.units), None)

    def _may_begin(self, request_id: str, encoding: _Encoding) -> bool:
        if self.cache.pinned_bytes + self._nbytes(encoding) <= self.ahead_bytes:
            return True
        return request_id == next(waiting for waiting in self._requests if self._next_encoding(waiting))

    def _begin(self, encoding: _Encoding) -> None:
        """Make room for the rows of an item."""
        self.cache.add(encoding.key, encoding, self._nbytes(encoding), encoding.users)
        embeds, *deepstack = (
            torch.empty(encoding.num_rows, self.encoders.hidden_size, dtype=self.dtype, device=self.device)
            for _ in range(1 + self._num_deepstack(encoding))
        )
        encoding.output = Encoded(embeds, tuple(deepstack))

    def _nbytes(self, encoding: _Encoding) -> int:
        tensors = 1 + self._num_deepstack(encoding)
        return tensors * encoding.num_rows * self.encoders.hidden_size * self.dtype.itemsize

    def _num_deepstack(self, encoding: _Encoding) -> int:
        return 0 if encoding.key[0] == "audio" else self.encoders.num_deepstack

    # --- an item as slices -------------------------------------------------------------------------------------------

    def _encoding(self, request_id: str, item: EncoderItem) -> _Encoding:
        """The encoding of an item, shared with whoever brought the same one."""
        key = (item.kind, item.digest)
        encoding = self.cache.pin(key, request_id) or self._unfinished.get(key)
        if encoding is None:
            encoding = _Encoding(key, item, item.num_rows, deque(self._units(item)))
            self._unfinished[key] = encoding
        encoding.users.add(request_id)
        return encoding

    def _units(self, item: EncoderItem) -> Iterator[_Unit]:
        if item.kind == "audio":
            frames, window = item.features.shape[1], self.encoders.window_frames
            length = max(1, self.budget // window) * window
            for start in range(0, frames, length):
                stop = min(start + length, frames)
                rows = self.encoders.audio_rows(stop - start)
                yield _Unit(start, stop, stop - start, self.encoders.audio_rows(start), rows)
            return
        t, h, w = item.grid
        rows = h * w // self.encoders.spatial_merge_size**2
        length = max(1, self.budget // (h * w))
        for start in range(0, t, length):
            stop = min(start + length, t)
            yield _Unit(start, stop, (stop - start) * h * w, start * rows, (stop - start) * rows)

    def _check(self, item: EncoderItem) -> None:
        """Raise TriptychError unless features, grid and rows belong together."""
        encoders, shape, dtype = self.encoders, item.features.shape, item.features.dtype
        if item.kind == "audio":
            if dtype != np.float32 or len(shape) != 2 or shape[0] != encoders.num_mel_bins or not shape[1]:
                raise TriptychError(
                    f"audio features are {dtype} {list(shape)}, not float32 [{encoders.num_mel_bins}, frames]"
                )
            rows = encoders.audio_rows(shape[1])
        else:
            t, h, w = item.grid
            merge = encoders.spatial_merge_size
            if min(item.grid) < 1 or h % merge or w % merge:
                raise TriptychError(
                    f"grid {item.grid} of {item.kind} features is not of whole {merge} x {merge} blocks"
                )
            frames, size = encoders.temporal_patch_size, encoders.patch_size
            expected = (h * size, w * size, 3)
            if dtype != np.uint8 or len(shape) != 4 or shape[1:] != expected or -(-shape[0] // frames) != t:
                raise TriptychError(
                    f"{item.kind} features are {dtype} {list(shape)}, not uint8 "
                    f"[{(t - 1) * frames + 1} to {t * frames}, {', '.join(map(str, expected))}]"
                )
            rows = t * h * w // merge**2
        if rows != item.num_rows:
            raise TriptychError(f"{item.kind} features give {rows} rows, the prompt has {item.num_rows} for them")

    # --- encoding ----------------------------------------------------------------------------------------------------

    def _batches(self, slices: list[tuple[_Encoding, _Unit]]) -> list[list[tuple[_Encoding, _Unit]]]:
        """What shares a call: nothing when batch-invariant; else all pictures, and sound of one chunk length."""
        if self.batch_invariant:
            return [[one] for one in slices]
        groups: dict[int, list[tuple[_Encoding, _Unit]]] = {}
        for encoding, unit in slices:
            groups.setdefault(self._chunk(encoding), []).append((encoding, unit))
        return list(groups.values())

    def _chunk(self, encoding: _Encoding) -> int:
        """The longest convolution chunk of a clip; 0 for a picture."""
        if encoding.item is None or encoding.key[0] != "audio":
            return 0
        return min(self.encoders.chunk_frames, int(encoding.item.features.shape[1]))

    def _encode(self, batch: list[tuple[_Encoding, _Unit]]) -> list[Fault]:
        """One call of an encoder. When it fails, each slice alone, so that only whose slice it is fails."""
        batch = [(encoding, unit) for encoding, unit in batch if encoding.users]
        if not batch:
            return []
        try:
            found = self._call(batch)
        except (RuntimeError, ValueError) as error:
            if len(batch) > 1:
                return [fault for one in batch for fault in self._encode([one])]
            encoding = batch[0][0]
            logger.exception("a slice of %s cannot be encoded", encoding.key[0])
            return self._fail(encoding, f"{encoding.key[0]} cannot be encoded: {error}")
        faults: list[Fault] = []
        row = 0
        for encoding, unit in batch:
            faults += self._store(encoding, unit, [tensor[row : row + unit.num_rows] for tensor in found])
            row += unit.num_rows
        return faults

    def _call(self, batch: list[tuple[_Encoding, _Unit]]) -> list[Tensor]:
        """The rows of slices one after another: embeds, then the DeepStack layers."""
        if batch[0][0].key[0] == "audio":
            mels = [self._features(encoding, unit) for encoding, unit in batch]
            return [self.encoders.encode_audio(mels, chunk=self._chunk(batch[0][0]))]
        patches = torch.cat(
            [self.patchify(encoding.key[0], self._features(encoding, unit)) for encoding, unit in batch]
        )
        grids = []
        for encoding, unit in batch:
            assert encoding.item is not None
            grids.append((unit.stop - unit.start, *encoding.item.grid[1:]))
        embeds, deepstack = self.encoders.encode_vision(patches, grids)
        return [embeds, *deepstack]

    def _features(self, encoding: _Encoding, unit: _Unit) -> Tensor:
        """A copy of a slice's frames, on the device."""
        item = encoding.item
        assert item is not None
        if item.kind == "audio":
            part = item.features[:, unit.start : unit.stop]
        else:
            frames = self.encoders.temporal_patch_size
            part = item.features[unit.start * frames : unit.stop * frames]
        return torch.from_numpy(part.copy()).to(self.device)

    def _store(self, encoding: _Encoding, unit: _Unit, found: Sequence[Tensor]) -> list[Fault]:
        if encoding.output is None or not encoding.users:
            return []  # an earlier slice of it has failed
        end = unit.row + unit.num_rows
        for whole, part in zip((encoding.output.embeds, *encoding.output.deepstack), found, strict=True):
            whole[unit.row : end].copy_(part)
            if not whole[unit.row : end].isfinite().all():
                return self._fail(encoding, f"the encoder gave values for this {encoding.key[0]} that are not finite")
        encoding.rows_ready = end
        if end == encoding.num_rows:
            encoding.item = None
            del self._unfinished[encoding.key]
        return []

    def _fail(self, encoding: _Encoding, message: str) -> list[Fault]:
        """Everyone who brought this item fails with it."""
        users = [request_id for request_id in self._requests if request_id in encoding.users]
        for request_id in users:
            self.release(request_id)
        return [Fault(request_id, message) for request_id in users]


def load_encoders(context: StageContext, device: torch.device, dtype: torch.dtype) -> Encoders | None:
    """The encoders of the checkpoint of `context`, ready to run; None where it has none.

    On a CPU they are float32 whatever `dtype`, the stage's, is: nothing is lost. Raises CheckpointError.
    """
    if not has_encoders(context.model):
        return None
    raw = json.loads(Path(context.model, "config.json").read_text(encoding="utf-8"))
    return load_model(context, lambda: Encoders(raw), device, torch.float32 if device.type == "cpu" else dtype)
