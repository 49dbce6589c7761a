"""Which platform this machine is, found without torch: the server process never imports it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Platform = Literal["cpu", "cuda"]


def num_cuda_devices() -> int:
    """How many CUDA devices a process started here may see: the driver's, or those CUDA_VISIBLE_DEVICES names."""
    driver = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    nodes = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = max(driver, nodes)
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def detect_platform() -> Platform:
    """ "cuda" where at least one NVIDIA device is to be seen, else "cpu"."""
    return "cuda" if num_cuda_devices() else "cpu"
