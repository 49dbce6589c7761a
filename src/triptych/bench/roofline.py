"""How near the stages of a server come to what the machine can do, from two looks at its `/metrics`.

What a stage had to move and to compute, by the time that its steps took; docs/metrics.md says what is counted. Only
Triptych exposes it: of another server nothing is said.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from triptych.bench.ceilings import Ceilings, Setting
from triptych.bench.grid import Grid

ASK_S = 10.0
PREFIX = "triptych:"
_COUNTS = {
    f"{PREFIX}stage_step_time_s_count": "steps",
    f"{PREFIX}stage_step_time_s_sum": "step_s",
    f"{PREFIX}stage_tokens_total": "tokens",
    f"{PREFIX}stage_moved_bytes_total": "moved_bytes",
    f"{PREFIX}stage_flops_total": "flops",
    f"{PREFIX}num_preemptions_total": "preemptions",
    f"{PREFIX}kv_cache_blocks": "kv_blocks",
    f"{PREFIX}kv_cache_usage_perc": "kv_usage",
}


class Counted(msgspec.Struct, kw_only=True):
    """What one replica of a stage has counted, and the share of its KV blocks that requests hold. `setting` is None
    where it does not say what it computes with."""

    steps: float = 0.0
    step_s: float = 0.0
    tokens: float = 0.0
    moved_bytes: float = 0.0
    flops: float = 0.0
    preemptions: float = 0.0
    kv_blocks: float = 0.0
    kv_usage: float = 0.0
    setting: Setting | None = None


Scrape = Mapping[tuple[str, str], Counted]  # by stage and replica


class StageRates(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica of a stage achieved while it was stepping. A share is None where no ceiling is known."""

    stage: str
    replica: str
    setting: Setting | None
    steps: int
    step_s: float
    bytes_per_s: float
    flops_per_s: float
    bytes_share: float | None
    flops_share: float | None


async def scrape(base: str) -> Scrape:
    """The counts of the stages of the server at `base`; empty for a server that does not tell them."""
    try:
        async with httpx.AsyncClient(timeout=ASK_S, trust_env=False) as client:
            answer = await client.get(f"{base}/metrics")
    except httpx.HTTPError:
        return {}
    return parse(answer.text) if answer.status_code == 200 else {}


def parse(text: str) -> Scrape:
    """The same from Prometheus' text format; empty where it is something else."""
    found: dict[tuple[str, str], Counted] = {}
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        return {}
    for sample in samples:
        name, labels = sample.name, sample.labels
        if name != f"{PREFIX}stage_info" and name not in _COUNTS:
            continue
        counts = found.setdefault((labels["stage"], labels["replica"]), Counted())
        if name in _COUNTS:
            setattr(counts, _COUNTS[name], sample.value)
        else:
            counts.setting = Setting(labels["dtype"], int(labels["threads"]), labels["device"])
    return found


def settings(counts: Scrape) -> list[Setting]:
    """What the stages compute with, each once."""
    return list(dict.fromkeys(stage.setting for stage in counts.values() if stage.setting is not None))


def on_this_machine(base: str) -> bool:
    """Whether the server's address is one of this machine's own (loopback)."""
    host = urlsplit(base).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def rates(before: Scrape, after: Scrape, ceilings: Sequence[Ceilings]) -> list[StageRates]:
    """Of each replica that stepped in between."""
    by_setting = {one.setting: one for one in ceilings}
    found = []
    for (stage, replica), now in after.items():
        then = before.get((stage, replica), Counted())
        steps, step_s = now.steps - then.steps, now.step_s - then.step_s
        if steps <= 0 or step_s <= 0:
            continue
        moved, flops = (now.moved_bytes - then.moved_bytes) / step_s, (now.flops - then.flops) / step_s
        most = by_setting.get(now.setting) if now.setting is not None else None
        found.append(
            StageRates(
                stage=stage,
                replica=replica,
                setting=now.setting,
                steps=int(steps),
                step_s=step_s,
                bytes_per_s=moved,
                flops_per_s=flops,
                bytes_share=moved / most.bytes_per_s if most else None,
                flops_share=flops / most.flops_per_s if most else None,
            )
        )
    return found


def grid(stages: Sequence[StageRates]) -> Grid:
    table = Grid(["stage", "computes in", "steps", "busy, s", "GB/s", "of memory's", "GFLOP/s", "of products'"])
    for one in stages:
        table.rows.append(
            [
                one.stage if one.replica == "0" else f"{one.stage}:{one.replica}",
                str(one.setting or "-"),
                str(one.steps),
                f"{one.step_s:.2f}",
                _significant(one.bytes_per_s / 1e9),
                _percent(one.bytes_share),
                _significant(one.flops_per_s / 1e9),
                _percent(one.flops_share),
            ]
        )
    return table


def record(stages: Sequence[StageRates]) -> list[dict[str, Any]]:
    """For a result file."""
    return [msgspec.to_builtins(stage) for stage in stages]


def _significant(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
