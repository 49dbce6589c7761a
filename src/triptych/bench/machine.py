"""Where a benchmark ran: the hardware and versions of the client's side, which go into every record."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import triptych

PACKAGES = ("triptych", "torch", "transformers", "httpx", "numpy", "av")
COMMAND_S = 10


def name() -> str:
    """What baselines of this machine go by: its GPUs, or its CPU and how many cores of it may be used."""
    here = hardware()
    if gpus := [gpu.partition(",")[0].removeprefix("NVIDIA ") for gpu in here["gpus"]]:
        return f"{len(gpus)} x {gpus[0]}"
    return f"{here['cpu']}, {here['cores']} core{'s' if here['cores'] != 1 else ''}"


def sentence() -> str:
    """Day, hardware, versions and commit, for a record in Markdown."""
    here, installed = hardware(), versions()
    parts = [
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        f"{here['cpu']}, cores: {here['cores']}, {here['memory_gib']:.0f} GiB",
        "; ".join(here["gpus"]) or "no GPU",
        ", ".join(f"{package} {found}" for package, found in installed.items() if found),
        f"commit {commit() or 'unknown'}",
    ]
    return "; ".join(parts) + "."


def hardware() -> dict[str, Any]:
    """This machine. The server's is the same one only if it runs here."""
    return {
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _lines(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]),
    }


def memory_mib(pid: int) -> float:
    """Memory of a process and all below it; pages that they share are counted once (proportional set size)."""
    return _own_mib(pid) + sum(map(memory_mib, _children(pid)))


def memory_by_process(pid: int) -> dict[str, float]:
    """The same of a server, as `server`, and of each of its stage processes, by the name in the deploy config. Not of
    its media workers."""
    found = {"server": _own_mib(pid)}
    for child in _children(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8").split("\0")
        except OSError:  # it has just ended
            continue
        if "--process" in words:
            found[words[words.index("--process") + 1]] = _own_mib(child)
    return found


def _own_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:  # it has just ended
        return 0.0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0) / 1024


def _children(pid: int) -> list[int]:
    try:
        lines = [task.read_text(encoding="ascii") for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has just ended
        return []
    return [int(child) for line in lines for child in line.split()]


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that are installed here; torch is not loaded for it."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The commit of Triptych's own checkout, with `-dirty` if it was changed; None if it is installed otherwise."""
    root = Path(triptych.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    found = _lines(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"])
    return found[0] if found else None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _lines(command: list[str]) -> list[str]:
    """What a program prints; nothing if it is not there, fails or hangs: a record is still worth having."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
