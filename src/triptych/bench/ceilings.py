"""What a machine can do at most, measured: bytes a second of its memory, operations a second in products of matrices.

Looked-up numbers are those of another machine: with all its memory channels filled, nobody else on it, and every core
at work. A stage has the threads that its deploy config gives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from triptych.bench.grid import Grid
from triptych.bench.worker import run_worker

MEASURE_S = 300.0  # that measuring one setting may take; it takes a second or two on a machine that is not busy


class Setting(msgspec.Struct, frozen=True):
    """What somebody computes with: the dtype, threads (of a CPU) and the device as torch names them."""

    dtype: str
    threads: int
    device: str

    def __str__(self) -> str:
        threads = f", {self.threads} thread{'s' if self.threads > 1 else ''}" if self.device == "cpu" else ""
        return f"{self.dtype} on {self.device}{threads}"


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The best of some runs of each. Bytes are those of float32 arrays far larger than a cache, as STREAM counts them:
    one read and one written (copy), two read and one written (triad), two read (read, a dot product)."""

    setting: Setting
    copy_bytes_per_s: float
    triad_bytes_per_s: float
    read_bytes_per_s: float
    flops_per_s: float  # of a product of two square matrices in the setting's dtype

    @property
    def bytes_per_s(self) -> float:
        return max(self.copy_bytes_per_s, self.triad_bytes_per_s, self.read_bytes_per_s)

    def __str__(self) -> str:
        return f"{self.setting}: {self.bytes_per_s / 1e9:.1f} GB/s, {self.flops_per_s / 1e9:.1f} GFLOP/s"


async def measure(settings: Iterable[Setting]) -> list[Ceilings]:
    """Measure each setting once, one after the other, in a process of its own: this one loads no torch.

    Raises TriptychError where a setting cannot be measured here.
    """
    return [await _measure(setting) for setting in dict.fromkeys(settings)]


async def _measure(setting: Setting) -> Ceilings:
    found = await run_worker(
        "triptych.bench.ceiling_worker",
        msgspec.json.encode(setting),
        MEASURE_S,
        doing=f"measuring {setting}",
        failed=f"{setting} cannot be measured here",
    )
    return Ceilings(setting=setting, **msgspec.json.decode(found, type=dict[str, float]))


def settings_of(deploy: Mapping[str, Any]) -> list[Setting]:
    """What the stages of a resolved deploy config compute with, each once; a process has its stages' most threads.

    Code2Wav computes in float32 on a CPU whatever its dtype is.
    """
    threads: dict[str, int] = {}
    for stage in deploy["stages"]:
        threads[stage["process"]] = max(threads.get(stage["process"], 1), stage["threads"])
    found = []
    for stage in deploy["stages"]:
        for device in stage["devices"].split(","):
            dtype = "float32" if device == "cpu" and stage["stage"] == "code2wav" else stage["dtype"]
            found.append(Setting(dtype, threads[stage["process"]], device))
    return list(dict.fromkeys(found))


def grid(ceilings: Sequence[Ceilings]) -> Grid:
    table = Grid(["setting", "copy, GB/s", "triad, GB/s", "read, GB/s", "products, GFLOP/s"])
    for one in ceilings:
        numbers = (one.copy_bytes_per_s, one.triad_bytes_per_s, one.read_bytes_per_s, one.flops_per_s)
        table.rows.append([str(one.setting), *(f"{number / 1e9:.1f}" for number in numbers)])
    return table


def sentence(ceilings: Sequence[Ceilings]) -> str:
    """For a record in Markdown."""
    return f"Ceilings as measured: {'; '.join(map(str, ceilings)) or 'none'}."
