"""A scheduled batch as tensors: where rows are written, and what decode rows read."""

from __future__ import annotations

import torch

from triptych.config.sampling import SamplingParams
from triptych.engine.batch import ScheduledBatch, ScheduledRow
from triptych.engine.inputs import StepInputs, build_inputs
from triptych.engine.request import EngineRequest

BLOCK = 16


def request(name: str, num_prompt_tokens: int, num_tokens: int, block_ids: list[int]) -> EngineRequest:
    found = EngineRequest(
        request_id=name, num_prompt_tokens=num_prompt_tokens, params=SamplingParams(), single_from=num_prompt_tokens
    )
    found.num_tokens, found.block_ids = num_tokens, block_ids
    return found


def build(*rows: ScheduledRow) -> StepInputs:
    return build_inputs(ScheduledBatch(rows), block_size=BLOCK, device=torch.device("cpu"), batch_invariant=True)


def test_rows_are_written_into_the_blocks_they_lie_in() -> None:
    long = request("long", 40, 3751, list(range(300, 60, -1)))
    fresh = request("fresh", 100, 100, [7, 3, 9, 5, 2, 4, 6])
    inputs = build(ScheduledRow(fresh, 30, 40, False), ScheduledRow(long, 3750, 1, True))
    assert [row.request.request_id for row in inputs.rows] == ["long", "fresh"], "decode rows first"
    slots = inputs.metadata.slots.tolist()
    assert slots[0] == (300 - 3750 // BLOCK) * BLOCK + 3750 % BLOCK
    assert slots[1:41] == [fresh.block_ids[row // BLOCK] * BLOCK + row % BLOCK for row in range(30, 70)]
    assert max(slots[41:]) < BLOCK, "padding goes to the trash block"
    [first, second] = inputs.metadata.pieces
    assert first.blocks.tolist() == fresh.block_ids[:4] and second.blocks.tolist() == fresh.block_ids[:5]


def test_padding_reads_no_keys_however_long_the_rows_beside_it_are() -> None:
    long = request("long", 40, 3751, list(range(1, 240)))
    inputs = build(ScheduledRow(long, 3750, 1, True))
    metadata = inputs.metadata
    assert (inputs.num_rows, metadata.num_decodes) == (4, 1)
    assert metadata.decode_blocks.tolist() == long.block_ids[: 3750 // BLOCK + 1]
    assert metadata.decode_mask.sum() == 3751


def test_a_short_row_beside_a_long_one_sees_only_its_own() -> None:
    inputs = build(
        ScheduledRow(request("a", 4, 70, [8, 9, 10, 11, 12]), 69, 1, True),
        ScheduledRow(request("b", 4, 18, [2, 3]), 17, 1, True),
    )
    assert inputs.metadata.decode_blocks.view(2, -1).tolist() == [[8, 9, 10, 11, 12], [2, 3, 2, 2, 2]], "its own"
    assert inputs.metadata.decode_mask.flatten(1).sum(1).tolist() == [70, 18]
