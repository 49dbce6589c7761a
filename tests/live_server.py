"""A `triptych serve` in a process of its own, as its clients and its operator see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

LOAD_S = 120
STOP_S = 30
LABELS = ("stage", "process", "outcome", "le")
HEARTBEAT_S = 1.0  # what /metrics says of a stage is no older


class LiveServer:
    """Starts on entering, is killed on leaving if it still runs. Port and log are its own."""

    def __init__(
        self, model: str | Path, *arguments: str, log: Path, deploy: str | Path = "tiny_cpu", name: str = "nano"
    ) -> None:
        self.log = log
        self.url = ""
        self._command = [sys.executable, "-m", "triptych", "serve", str(model), "--deploy-config", str(deploy)]
        self._command += ["--served-model-name", name, "--port", "0", *arguments]
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)
        wait_until(lambda: "ready in" in self.said() or self.process.poll() is not None, LOAD_S)
        assert self.process.poll() is None, self.said()
        [line] = [line for line in self.said().splitlines() if line.startswith("ready in")]
        self.url = line.split(" at ")[1].strip()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(STOP_S)

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    # --- what the operator sees ---

    def metrics(self) -> dict[str, dict[str, float]]:
        """name (without its prefix) -> value by stage, process, outcome, bucket, in this order, as "thinker finished";
        "" where there is none of them."""
        text = httpx.get(f"{self.url}/metrics", timeout=5).text
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                label = " ".join(sample.labels[name] for name in LABELS if name in sample.labels)
                found.setdefault(sample.name.removeprefix("triptych:"), {})[label] = sample.value
        return found

    def settled_metrics(self) -> dict[str, dict[str, float]]:
        """The same, when every stage has told the latest: what ran before this call is in it."""
        time.sleep(1.1 * HEARTBEAT_S)
        return self.metrics()

    def held(self) -> dict[str, float]:
        """Everything that requests occupy and that is not free, by name."""
        metrics = self.metrics()
        whole = {name: metrics[f"num_requests_{name}"][""] for name in ("running", "waiting", "freeing")}
        stages = {
            f"{stage} {name}": value
            for name in (
                "stage_running_requests",
                "stage_waiting_requests",
                "stage_parked_requests",
                "kv_cache_usage_perc",
            )
            for stage, value in metrics[name].items()
        }
        return {name: value for name, value in (whole | stages).items() if value}

    def ready(self) -> bool:
        return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, process: str) -> psutil.Process:
        """The stage process of that name."""
        [found] = [child for child in self.children() if f"--process {process}" in " ".join(child.cmdline())]
        return found

    def traces(self) -> list[str]:
        """Shared memory, sockets and folders that belong to this server."""
        places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
        return [str(path) for place in places for path in place.glob(f"triptych-{self.process.pid}x*")]


def wait_until(condition: Callable[[], bool], seconds: float, what: Callable[[], object] = lambda: "") -> float:
    """Wait until it holds; how long that took. Fails with what `what` says when it never does."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"this never came true: {what()}"
        time.sleep(0.02)
    return time.monotonic() - started


def is_gone(process: psutil.Process) -> bool:
    """Whether it has exited; one whose parent has died too may wait a while to be reaped."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def sse_events(lines: list[str]) -> list[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
