"""What a dry run prints below the deploy config: still a deploy file, with a plain verdict for every device."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from triptych.cli import app, memory_report
from triptych.config import platform
from triptych.config.load import load_deploy
from triptych.errors import ConfigError


def dry_run(model: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["serve", str(model), "--dry-run", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def report(text: str) -> str:
    """The comments, without their marks."""
    return "\n".join(line[2:] for line in text.splitlines() if line.startswith("# "))


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_report, "cuda_memory_bytes", lambda index: None)


def test_it_is_still_a_deploy_file_and_adds_up(nano: Path, tmp_path: Path) -> None:
    text = dry_run(nano, "--platform", "cuda", "--device-memory", "80GiB")
    (tmp_path / "printed.yaml").write_text(text, encoding="utf-8")
    deploy = load_deploy(tmp_path / "printed.yaml", platform="cuda", flags={}, stage_overrides={})
    assert yaml.safe_load(text)["stages"][0]["devices"] == deploy.stages[0].devices == "cuda"
    rows = re.findall(r"^ {4}(.+?) +([\d,]+) +[\d.]+ (?:[KMG]iB|B)", report(text), re.MULTILINE)
    counts = [(name, int(number.replace(",", ""))) for name, number in rows]
    assert counts[-1][0] == "total"
    assert sum(count for _, count in counts[:-1]) == counts[-1][1]
    assert {"backbone", "vision encoder", "projected text table", "KV cache", "streams", "~ workspace"} <= dict(
        counts
    ).keys()
    assert re.search(r"^cuda:0: fits; about \d+\.\d GiB of 80\.0 GiB are left\.$", report(text), re.MULTILINE)


def test_a_cpu_has_the_memory_of_this_machine(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_report, "host_memory_bytes", lambda: 64 * 2**30)
    assert "cpu: fits; about 62." in report(dry_run(nano, "--platform", "cpu"))
    monkeypatch.setattr(memory_report, "host_memory_bytes", lambda: 2**30)
    text = report(dry_run(nano, "--platform", "cpu"))
    assert "cpu: does not fit 1.0 GiB.\n  All together take 1.5 GiB, " in text
    assert (
        "No single one of dtype, quantization, max_model_len, max_num_seqs, devices and kv_cache_bytes makes it fit; a "
        "device of 2.0" in text
    )
    monkeypatch.setattr(memory_report, "host_memory_bytes", lambda: 5 * 2**28)
    text = report(dry_run(nano, "--platform", "cpu", "--text-only"))
    assert "cpu: fits" in text and "talker" not in text


def test_a_device_nobody_knows_the_size_of_is_planned_without_a_verdict(nano: Path) -> None:
    text = report(dry_run(nano, "--platform", "cuda"))
    assert "cuda:0: its size is not known on this machine; --device-memory 80GiB plans for one of that size." in text
    smallest = re.search(r"fits, by its gpu_memory_utilization: (\d)\.0 GiB", text)
    assert smallest is not None
    assert "at least: one context of 16384" in text and "total with one context each" in text
    assert "does not fit" not in text
    assert "cuda:0: fits" in report(dry_run(nano, "--platform", "cuda", "--device-memory", f"{smallest[1]}GiB"))
    less = report(dry_run(nano, "--platform", "cuda", "--device-memory", f"{int(smallest[1]) - 1}GiB"))
    assert "cuda:0: does not fit" in less
    assert re.search(r"thinker does not start: its share leaves .* one context of 16384 tokens takes \d", less)
    assert re.search(
        r"Any one of these makes it fit:\n(    stages\[\d\]\.\w+: .*\n)*    stages\[0\]\.gpu_memory_util", less
    )


def test_the_driver_is_asked_and_the_option_wins(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_report, "cuda_memory_bytes", lambda index: (24 + index) * 2**30)
    override = '{"1": {"devices": "3"}}'
    text = report(dry_run(nano, "--platform", "cuda", "--stage-overrides", override))
    assert re.search(r"cuda:0: fits; .* of 24\.0 GiB", text) and re.search(r"cuda:3: fits; .* of 27\.0 GiB", text)
    assert "of 40.0 GiB are left" in report(dry_run(nano, "--platform", "cuda", "--device-memory", "40 GiB"))


def test_long_contexts_that_would_not_fit_are_told(nano: Path) -> None:
    override = '{"0": {"max_num_seqs": 1024, "gpu_memory_utilization": 0.5}}'
    text = report(dry_run(nano, "--platform", "cuda", "--device-memory", "8GiB", "--stage-overrides", override))
    assert "cuda:0: fits" in text
    assert (
        "answers in the thinker, one of them of 16384 tokens, gathers ~4.0 GiB:\n  if such are to come, lower" in text
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "--device-memory", "much"], "'much' is not a size"),
        (["--dry-run", "--device-memory", "0"], "'0' is no memory at all"),
        (["--device-memory", "80GiB"], "a server asks its devices for their size"),
    ],
)
def test_a_size_that_is_none_is_refused(nano: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        CliRunner().invoke(app, ["serve", str(nano), *arguments], catch_exceptions=False)
    assert caught.value.path == "--device-memory"


class FakeDriver:
    """libcuda with one device."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0 if index == 0 else 101

    def cuDeviceTotalMem_v2(self, size: Any, device: ctypes.c_int) -> int:
        size._obj.value = 2**36 + device.value
        return 0


def test_the_driver_says_how_large_a_cuda_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    assert (platform.cuda_memory_bytes(0), platform.cuda_memory_bytes(1)) == (2**36, None)

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert platform.cuda_memory_bytes(0) is None
