"""Per-stream state of layers that mix time, as explicit tensors with a leading slot axis.

The contract every streaming layer keeps: `layer(x, None)` is the one-shot run, and for every way of cutting `x` into
chunks the concatenated results of `layer(chunk, state.chunk(...))` equal it. A layer's state is simply the last inputs
it will need again (its *history*); it joins history and chunk, computes, and keeps the new tail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class StreamingLayer(nn.Module):
    """A layer with a history of shape `history_shape` per stream. An empty shape (a zero in it) holds nothing."""

    history_shape: tuple[int, ...]


class StreamState:
    """The histories of every streaming layer below `model`, for `num_slots` streams and one trash slot.

    Rows of a padded batch point at `trash_slot`: they compute and write like any other, and nobody reads them.
    A stream's first chunk overwrites all of its slot, so `reset` is needed only where old data must not stay in memory.
    Steps that are `recorded` read their slots when they are replayed.
    """

    def __init__(
        self,
        model: nn.Module,
        num_slots: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        recorded: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self.trash_slot = num_slots
        # One stream on CPU is addressed as a slice: gathering and scattering by index costs more than small layers do.
        self._slices = torch.device(device).type == "cpu" and not recorded
        self.num_frames = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._histories: dict[StreamingLayer, Tensor] = {
            layer: torch.zeros(num_slots + 1, *layer.history_shape, device=device, dtype=dtype)
            for layer in model.modules()
            if isinstance(layer, StreamingLayer) and 0 not in layer.history_shape
        }

    @property
    def nbytes(self) -> int:
        """Bytes held by all slots together."""
        return sum(history.nbytes for history in self._histories.values())

    def chunk(self, slots: Tensor, *, first: bool) -> StreamChunk:
        """The state as one batch of chunks sees it. `slots` is int64 [B]; no two rows share a slot but the trash."""
        single = int(slots) if self._slices and slots.numel() == 1 else None
        return StreamChunk(self.num_frames, self._histories, slots, first, single)

    def reset(self, slots: Tensor) -> None:
        """Forget the streams in `slots` (int64 [N])."""
        self.num_frames.index_fill_(0, slots, 0)
        for history in self._histories.values():
            history.index_fill_(0, slots, 0)

    def snapshot(self, slot: int) -> list[Tensor]:
        """A copy of one stream, to continue it later in any slot of a state of the same model."""
        return [self.num_frames[slot].clone(), *(history[slot].clone() for history in self._histories.values())]

    def restore(self, slot: int, snapshot: list[Tensor]) -> None:
        """Put a `snapshot` into `slot`."""
        for tensor, saved in zip((self.num_frames, *self._histories.values()), snapshot, strict=True):
            tensor[slot] = saved


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """One batch's window on a `StreamState`: row b of every history is that of stream `slots[b]`."""

    _num_frames: Tensor
    _histories: Mapping[StreamingLayer, Tensor]
    slots: Tensor
    first: bool
    _single: int | None

    def num_frames(self) -> Tensor:
        """Frames each stream has had before this chunk, int64 [B]; zeros on a first chunk, whatever the slot held."""
        return torch.zeros_like(self.slots) if self.first else self._num_frames.index_select(0, self.slots)

    def history(self, layer: StreamingLayer) -> Tensor | None:
        """[B, *history_shape] to read before `keep` replaces it, or None on the first chunk."""
        if self.first:
            return None
        histories = self._histories[layer]
        if self._single is not None:
            return histories[self._single : self._single + 1]
        return histories.index_select(0, self.slots)

    def storage(self, layer: StreamingLayer) -> tuple[Tensor, Tensor]:
        """Histories [slots, *history_shape] and numbers of frames [slots] of all streams, which the layer keeps."""
        return self._histories[layer], self._num_frames

    def keep(self, layer: StreamingLayer, history: Tensor) -> None:
        """Store [B, *history_shape] for the next chunk."""
        histories = self._histories[layer]
        if self._single is not None:
            histories[self._single].copy_(history[0])
        else:
            histories.index_copy_(0, self.slots, history)

    def advance(self, frames: int) -> None:
        """The chunk of `frames` frames has passed every layer."""
        self._num_frames.index_copy_(0, self.slots, self.num_frames() + frames)


def last_steps(x: Tensor, steps: int, dim: int) -> Tensor:
    """The last `steps` of `x` along `dim`, with zeros in front where `x` is shorter."""
    length = x.shape[dim]
    if length >= steps:
        return x.narrow(dim, length - steps, steps)
    shape = list(x.shape)
    shape[dim] = steps - length
    return torch.cat([x.new_zeros(shape), x], dim)
