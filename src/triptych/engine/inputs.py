"""A scheduled batch as tensors: packed rows, their positions, and where their keys and values live."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.engine.batch import ScheduledBatch, ScheduledRow
from triptych.engine.buckets import DecodeBuckets
from triptych.engine.scheduler_config import PREFILL_CELL
from triptych.layers.attention import PagedMetadata, PrefillPiece, RowMetadata, StepMetadata
from triptych.layers.linear import ROW_TILE, padded_rows

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`rows` are packed in this order, decode rows first, and padded to `num_rows`.

    `sampling` names the rows whose output is drawn from.
    `positions` [3, num_rows] for M-RoPE; `sample_rows` [padded] indexes the packed rows, its own padding included.
    `bucket`: rows and blocks a row, where these are padded to a shape that can be recorded.
    """

    rows: tuple[ScheduledRow, ...]
    num_rows: int
    positions: Tensor
    metadata: StepMetadata
    sampling: tuple[ScheduledRow, ...]
    sample_rows: Tensor
    bucket: tuple[int, int] | None = None


def build_inputs(
    batch: ScheduledBatch,
    *,
    block_size: int,
    device: torch.device,
    batch_invariant: bool,
    by_row: bool = False,
    buckets: DecodeBuckets | None = None,
) -> StepInputs:
    """Lay out one step. Padded rows stand where the first row does, write to the trash block and are dropped.

    `by_row`: with `RowMetadata`, else with `PagedMetadata`. With `buckets` a step of decode rows alone is padded to one
    of them, in rows and in what they look at; its padding looks at what the first row does.
    """
    tile = ROW_TILE if batch_invariant else 1
    bucket: tuple[int, int] | None = None
    if buckets is not None and all(map(_is_decode, batch.rows)):
        bucket = buckets.fit(len(batch.rows), max(-(-(row.start + 1) // block_size) for row in batch.rows))
    count = padded_rows(batch.num_tokens, tile) if bucket is None else bucket[0]
    indices = np.zeros(count, dtype=np.int64)  # of each row within its request
    slots = np.arange(count, dtype=np.int64) % block_size  # trash block, for the padded rows
    decodes = [row for row in batch.rows if _is_decode(row)]
    rows = (*decodes, *(row for row in batch.rows if not _is_decode(row)))
    sampling: list[ScheduledRow] = []
    sample_rows: list[int] = []
    at = 0
    for row in rows:
        end = row.start + row.num_tokens
        span = np.arange(row.start, end, dtype=np.int64)
        indices[at : at + row.num_tokens] = span
        # Of a long request only the blocks that these rows lie in: the rest is for attention alone to look at.
        first = row.start // block_size
        blocks = np.asarray(row.request.block_ids[first : -(-end // block_size)], dtype=np.int64)
        slots[at : at + row.num_tokens] = blocks[span // block_size - first] * block_size + span % block_size
        at += row.num_tokens
        if row.samples:
            sampling.append(row)
            sample_rows.append(at - 1)
    indices[at:] = indices[0]
    if sample_rows:
        sample_rows += sample_rows[:1] * (padded_rows(len(sample_rows), tile) - len(sample_rows))
    placed = torch.from_numpy(slots).to(device)
    metadata: StepMetadata
    if by_row:
        metadata = _row_metadata(rows, placed, indices[:at] + 1, block_size)
    else:
        metadata = _paged_metadata(rows, len(decodes), placed, block_size, device, batch_invariant, bucket)
    return StepInputs(
        rows=rows,
        num_rows=count,
        positions=_positions(rows, indices, device),
        metadata=metadata,
        sampling=tuple(sampling),
        sample_rows=torch.tensor(sample_rows, dtype=torch.long, device=device),
        bucket=bucket,
    )


def begun_blocks(batch: ScheduledBatch, block_size: int) -> list[int]:
    """The blocks that a step begins and does not fill: what is behind its rows there is from an earlier request."""
    found: list[int] = []
    for row in batch.rows:
        end = row.start + row.num_tokens
        last = (end - 1) // block_size
        if end % block_size and last * block_size >= row.start:
            found.append(row.request.block_ids[last])
    return found


def _positions(rows: Sequence[ScheduledRow], indices: _Ints, device: torch.device) -> Tensor:
    """[3, N]: row r stands at r, where its request does not say otherwise."""
    if all(row.request.positions is None for row in rows):
        return torch.from_numpy(indices).to(device).expand(3, -1)
    positions = np.tile(indices.astype(np.float32), (3, 1))
    at = 0
    for row in rows:
        end, placed = at + row.num_tokens, row.request.positions
        if placed is not None:
            prompt = placed[:, row.start : row.start + row.num_tokens]
            positions[:, at : at + prompt.shape[1]] = prompt
            behind = slice(at + prompt.shape[1], end)
            positions[:, behind] = indices[behind] + row.request.position_delta  # in float64, then rounded once
        at = end
    positions[:, at:] = positions[:, :1]
    return torch.from_numpy(positions).to(device)


def _is_decode(row: ScheduledRow) -> bool:
    """A row computed alone takes the decode path where it always does: by its place, never by how a prompt was cut."""
    single_from = row.request.single_from
    return row.num_tokens == 1 and (single_from is None or row.start >= single_from)


def _row_metadata(rows: Sequence[ScheduledRow], slots: Tensor, lengths: _Ints, block_size: int) -> RowMetadata:
    """On the CPU, where compiled layers read it."""
    blocks: list[int] = []
    starts: list[int] = []
    for row in rows:
        starts += [len(blocks)] * row.num_tokens
        blocks += row.request.block_ids[: -(-(row.start + row.num_tokens) // block_size)]
    return RowMetadata(
        slots=slots,
        blocks=torch.from_numpy(np.array(blocks, dtype=np.int64)),
        starts=torch.from_numpy(np.array(starts, dtype=np.int64)),
        lengths=torch.from_numpy(lengths),
        longest=int(lengths.max()),
    )


def _paged_metadata(
    rows: Sequence[ScheduledRow],
    num_decodes: int,
    slots: Tensor,
    block_size: int,
    device: torch.device,
    batch_invariant: bool,
    bucket: tuple[int, int] | None,
) -> PagedMetadata:
    """The first `num_decodes` of `rows` are decode rows, the others prefills."""
    table, lengths = _decode_table(rows[:num_decodes], block_size, bucket)
    places = torch.arange(table.shape[1] * block_size, device=device)
    visible = places < torch.from_numpy(lengths).to(device).unsqueeze(1)
    pieces: list[PrefillPiece] = []
    at = num_decodes
    for row in rows[num_decodes:]:
        pieces.extend(_pieces(row, at, block_size, device, batch_invariant))
        at += row.num_tokens
    return PagedMetadata(
        slots=slots,
        num_decodes=num_decodes if bucket is None else bucket[0],
        decode_blocks=torch.from_numpy(table.reshape(-1)).to(device),
        decode_mask=visible[:, None, None],
        pieces=tuple(pieces),
    )


def _decode_table(
    decodes: Sequence[ScheduledRow], block_size: int, bucket: tuple[int, int] | None
) -> tuple[_Ints, _Ints]:
    """Blocks [rows, width] and lengths [rows] of decode rows, as wide as the longest of them; or of a bucket's rows.

    Behind its blocks a row has its first one again, which it does not look at there: even what is masked is read, and
    NaN survives a mask, so a row must not read what another may have written.
    """
    lengths = np.array([row.start + 1 for row in decodes], dtype=np.int64)
    width = int(-(-lengths.max() // block_size)) if decodes else 0
    count, width = (len(decodes), width) if bucket is None else bucket
    table = np.zeros((count, width), dtype=np.int64)
    for index, row in enumerate(decodes):
        used = row.request.block_ids[: -(-(row.start + 1) // block_size)]
        table[index, : len(used)] = used
        table[index, len(used) :] = used[0]
    if missing := count - len(decodes):
        table[-missing:] = table[0]
        lengths = np.concatenate((lengths, lengths[:1].repeat(missing)))
    return table, lengths


def _pieces(
    row: ScheduledRow, at: int, block_size: int, device: torch.device, batch_invariant: bool
) -> list[PrefillPiece]:
    end = row.start + row.num_tokens
    blocks = np.asarray(row.request.block_ids, dtype=np.int64)
    cuts = [row.start, end]
    if batch_invariant:
        first = (row.start // PREFILL_CELL + 1) * PREFILL_CELL
        cuts = [row.start, *range(first, end, PREFILL_CELL), end]
    pieces = []
    for low, high in itertools.pairwise(cuts):
        used = torch.from_numpy(blocks[: -(-high // block_size)]).to(device)
        looks_at = torch.arange(used.shape[0] * block_size, device=device)
        mask = looks_at <= torch.arange(low, high, device=device).unsqueeze(1)
        offset = at + low - row.start
        pieces.append(PrefillPiece(start=offset, end=offset + high - low, blocks=used, mask=mask))
    return pieces
