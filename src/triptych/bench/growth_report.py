"""What `bench growth` shows of its points: tables, what exceeds a limit, a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from triptych.bench.ceilings import Ceilings
from triptych.bench.grid import Grid, number
from triptych.bench.growth import Growth, MemoryGrowth, Point, StageGrowth, memory_growth, stage_growth
from triptych.bench.stage_cost import PARTS


def grids(growth: Growth, ceilings: Sequence[Ceilings]) -> list[tuple[str, Grid]]:
    """Those for which something was measured, with their titles."""
    found = []
    if growth.streams:
        each = growth.streams[0].speech.seconds
        table = Grid(["streams", "stage", "steps", "tokens a step", "ms a step", "ms a token", "of linear"])
        for point, stage in _rows(growth.streams, ceilings):
            table.rows.append([str(point.streams), *_cells(stage), number(stage.of_linear, 2)])
        found.append((f"streams of {each:g} s at a time", table))
        found.append(("memory of the server and its stages", _memory(memory_growth(growth))))
    if growth.lengths:
        thirds = [f"{part}, ms" for part in PARTS]
        table = Grid(
            [
                *("speech, s", "stage", "steps", "tokens a step", "ms a step", "ms a token", "of linear"),
                *thirds,
                "worst",
            ]
        )
        for point, stage in _rows(growth.lengths, ceilings):
            cells = [number(1000 * part.token_s, 3) for part in stage.parts] if stage.parts else ["-"] * len(PARTS)
            cells = [*_cells(stage), number(stage.of_linear, 2), *cells, number(stage.parts_of_linear, 2)]
            table.rows.append([f"{point.speech.seconds:g}", *cells])
        found.append(("one stream, by its length", table))
    return found


def _rows(points: Sequence[Point], ceilings: Sequence[Ceilings]) -> list[tuple[Point, StageGrowth]]:
    rows = zip(points, stage_growth(points, ceilings), strict=True)
    return [(point, stage) for point, stages in rows for stage in stages]


def _cells(stage: StageGrowth) -> list[str]:
    cost = stage.cost
    return [
        stage.stage,
        f"{cost.steps:.0f}",
        number(cost.tokens / cost.steps, 1),
        number(1000 * cost.step_s, 2),
        number(1000 * cost.token_s, 3),
    ]


def _memory(rows: Sequence[MemoryGrowth]) -> Grid:
    processes, stages = list(rows[0].memory_mib), list(rows[0].kv_blocks)
    table = Grid(
        [
            *("streams", *(f"{name}, MiB" for name in processes), "all, MiB", "MiB a stream", "of linear"),
            *(*(f"{stage}, KV blocks" for stage in stages), "blocks of linear"),
        ]
    )
    for row in rows:
        table.rows.append(
            [str(row.streams)]
            + [number(row.memory_mib.get(name), 0) for name in processes]
            + [number(row.total_mib, 0), number(row.stream_mib, 2), number(row.of_linear, 2)]
            + [number(row.kv_blocks.get(stage), 0) for stage in stages]
            + [number(row.kv_of_linear, 2)]
        )
    return table


def exceeded(growth: Growth, ceilings: Sequence[Ceilings], limit: float) -> list[str]:
    """A sentence for each growth that is more than `limit` times the linear one."""
    found = []
    for where, points in (("streams", growth.streams), ("s of speech", growth.lengths)):
        for point, stage in _rows(points, ceilings):
            at = f"{stage.stage} at {point.streams if where == 'streams' else f'{point.speech.seconds:g}'} {where}"
            if stage.of_linear is not None and stage.of_linear > limit:
                took = f"{1000 * stage.cost.token_s:.3g} ms a token"
                found.append(f"{at}: {took}, {stage.of_linear:.2f} times what linear growth gives")
            if stage.parts_of_linear is not None and stage.parts_of_linear > limit:
                found.append(f"{at}: a later third took {stage.parts_of_linear:.2f} times what the first one gives")
    for row in memory_growth(growth):
        for ratio, what in ((row.of_linear, f"{row.total_mib:.0f} MiB"), (row.kv_of_linear, "KV blocks")):
            if ratio is not None and ratio > limit:
                found.append(f"memory at {row.streams} streams: {what}, {ratio:.2f} times what linear growth gives")
    return found


def notes(growth: Growth) -> list[str]:
    """What to know when reading the numbers."""
    return [
        f"{point.streams} streams of {point.speech.seconds:g} s: {point.preemptions} preemptions; the KV cache is too "
        "small for them (kv_cache_bytes, gpu_memory_utilization), and what was lost was computed again"
        for point in [*growth.streams, *growth.lengths]
        if point.preemptions
    ]


def record(growth: Growth, ceilings: Sequence[Ceilings], limit: float | None) -> dict[str, Any]:
    """For a result file."""

    def of(points: Sequence[Point]) -> list[dict[str, Any]]:
        return [
            {
                "streams": point.streams,
                "seconds": point.speech.seconds,
                "frames": point.speech.frames,
                "text_tokens": point.speech.text_tokens,
                "preemptions": point.preemptions,
                "stages": [stage.record() for stage in stages],
                **point.summary,
            }
            for point, stages in zip(points, stage_growth(points, ceilings), strict=True)
        ]

    return {
        "idle_memory_mib": growth.idle.memory_mib,
        "by_streams": of(growth.streams),
        "memory": [msgspec.to_builtins(row) for row in memory_growth(growth)],
        "by_length": of(growth.lengths),
        "fail_above": limit,
        "exceeded": exceeded(growth, ceilings, limit) if limit is not None else [],
    }


def markdown(growth: Growth, ceilings: Sequence[Ceilings], *, title: str, about: Sequence[str]) -> str:
    """The record of a run; `about` says how and where it was taken, a paragraph each."""
    blocks = [f"# {title}", *about]
    for heading, table in grids(growth, ceilings):
        blocks += [f"## {heading[0].upper()}{heading[1:]}", table.markdown()]
    if said := notes(growth):
        blocks.append("\n".join(f"- {line}." for line in said))
    return "\n\n".join(blocks) + "\n"
